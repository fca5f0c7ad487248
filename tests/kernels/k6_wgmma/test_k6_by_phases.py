"""k6's store of a tile with some of a long stride's phases, on the CPU: from every lane's registers, every output once.

Instructions are replaced by their meanings, which also refuse bad addresses.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.outputs import Place, Thread
from numba_tconv.kernels.common.tensor_core.store_any import alignment_of
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.arguments import Sums
from numba_tconv.kernels.k6_wgmma.epilogue import by_phases as k6_part
from tests.kernels.test_tensor_store import cast_quickly, expected, output_of
from tests.thorough import thorough

from .test_k6_bulk import sums_of

WARPS, LANES = 4, 32
# Some tiles; samples that share a tile, which ends with the last one; outputs from an odd one on; an odd stride; a last
# tile of few phases, and of phases that fill no core matrix.
CASES = {
    "several tiles": Problem(1, 8, 1, 272, 140, stride=136, padding=68),
    "short samples": Problem(5, 8, 2, 200, 5, stride=150),
    "odd padding": Problem(2, 8, 1, 260, 3, stride=130, padding=65, output_padding=1),
    "odd rows": Problem(2, 8, 1, 131, 4, stride=130),
    "odd stride": Problem(2, 8, 1, 262, 3, stride=131, padding=2),
    "few phases more": Problem(2, 8, 2, 130, 3, stride=130),
    "K < stride": Problem(1, 8, 1, 50, 4, stride=140),
}
EVEN = "several tiles"


@pytest.fixture
def in_python(monkeypatch):
    def same(value):
        return value

    def st_global_if(words):
        def store(wanted, y, index, values):
            outputs = [value for word in values[:words] for value in (word if isinstance(word, tuple) else (word,))]
            assert not wanted or (state.shift + index) % 2 == 0
            for z, value in enumerate(outputs if wanted else ()):
                y[index + z] = value
            state.pairs += wanted

        return store

    class Output(dict):
        def __setitem__(self, index, value):
            state.written[int(index)] += 1
            super().__setitem__(int(index), float(value))

    state = SimpleNamespace(shift=0, pairs=0, written=Counter(), Output=Output)
    local = SimpleNamespace(array=lambda size, dtype: [None] * size)
    element = SimpleNamespace(load=same, store=same)
    for name, meaning in {
        "ELEMENTS": dict.fromkeys(DTYPES.values(), element),
        "cuda": SimpleNamespace(local=local),
        "repeated": lambda function, count: lambda k, state: [function(k + z, state) for z in range(count)],
        "st_global_if": st_global_if,
        **dict.fromkeys(("device_function", "recomputed", "bits_of"), same),
        **dict.fromkeys(("pack_f16", "pack_bf16"), lambda low, high: (low, high)),
    }.items():
        monkeypatch.setattr(k6_part, name, meaning)
    cast_quickly(monkeypatch, k6_part)
    return state


@pytest.mark.parametrize(
    ("case", "precision", "wide", "shift"),
    [
        *thorough(
            [(case, precision, False, 0) for case in CASES for precision in ("tf32", "bf16")],
            always=[(case, "tf32", False, 0) for case in CASES],
        ),
        *[(EVEN, "bf16", True, 0), (EVEN, "tf32", False, 1), (EVEN, "bf16", False, 2)],
    ],
)
def test_every_output_is_its_own_sum(in_python, case, precision, wide, shift):
    state, p = in_python, CASES[case]
    config = k6_config.configs(p, precision, wide_outputs=wide)[0]
    assert config.buffers == config.staging_bytes == 0
    tile, (first, columns) = config.tile, k6_config.sample_columns(p, config)
    state.shift = shift
    y, store = state.Output(), k6_part.make_phases_store(config)
    out = output_of(p, y, config, alignment_of(shift * tile.out_dtype.itemsize, p, tile))
    for row_tile in range(tile.row_tiles(p)):
        row, co = row_tile % tile.row_parts * tile.phases, row_tile // tile.row_parts
        for column_tile in range(k6_config.column_tiles(p, config)):
            n, j = divmod(column_tile * tile.advance, columns)
            for warp, lane in np.ndindex(WARPS, LANES):
                acc = sums_of(p, config, column_tile, co, warp, lane, row)
                place = Place(n, j, row, co, p.out_channels - co, None, None)
                store(Sums(acc, None, None, None), out, place, 0.5, Thread(0, warp, lane))
    assert state.written == Counter(range(p.batch * p.out_channels * p.out_length)), "each output once, and no other"
    for index, value in y.items():
        rest, o = divmod(index, p.out_length)
        sample, channel = divmod(rest, p.out_channels)
        sum_there = expected(p, first, sample, channel, o)
        # Rows without taps are computed too, with zero weights; here they are told apart.
        assert value == sum_there + 0.5 or (sum_there == 0 and (o + p.padding) % p.stride >= p.kernel_size)
    even = all(number % 2 == 0 for number in (p.stride, p.padding, p.out_length, shift))
    assert bool(state.pairs) == even


def test_split_operands_leave_from_their_own_sums(in_python):
    p = replace(CASES["odd rows"], batch=1, out_channels=1)
    config = k6_config.configs(p, "tf32x3")[0]
    y = in_python.Output()
    out = output_of(p, y, config, alignment_of(0, p, config.tile))
    zeros, total = [0.0] * config.tile.rows, [1.5] * config.tile.rows
    for warp, lane in np.ndindex(WARPS, LANES):
        place = Place(0, 0, 0, 0, 1, None, None)
        k6_part.make_phases_store(config)(Sums(zeros, total, None, None), out, place, 0.0, Thread(0, warp, lane))
    assert set(y.values()) == {1.5}
