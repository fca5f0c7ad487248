"""k6's last step on the CPU: lane by lane in plain Python, every output is its own sum.

Instructions without a word in Python are replaced by their meanings, which also refuse bad addresses.
"""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core import store_any as tensor_store
from numba_tconv.kernels.common.tensor_core import store_runs as tensor_runs
from numba_tconv.kernels.common.tensor_core.outputs import Alignment, Output, Place, Runs, Staging, Thread
from numba_tconv.kernels.common.tensor_core.tile import COLUMNS, SECTOR
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from tests.thorough import thorough

WARPS, LANES = 4, 32
# Stride, kernel size, dilation, output channels: one phase, two, eight; phases without taps; a dilation; parts; single.
# Mostly channels fill their tile, so that runs inside a sample go by ``store_runs``.
SHAPES = [
    (1, 3, 1, 16),
    (2, 4, 1, 8),
    (2, 4, 1, 9),
    (8, 16, 1, 5),
    (5, 3, 1, 4),
    (3, 7, 2, 6),
    (130, 140, 1, 2),
    (2, 3, 2, 8),
]


def cast_to(bits):
    """Numba's signed integers as casts; its own would take half of a test's time."""
    beyond = 2 ** (bits - 1)

    def cast(value):
        value = int(value)
        assert -beyond <= value < beyond
        return value

    return cast


def cast_quickly(monkeypatch, *modules):
    """Within the modules, 32- and 64-bit numbers are such casts; unsigned ones wrap."""
    for module, bits in product(modules, (32, 64)):
        casts = {f"int{bits}": cast_to(bits), f"uint{bits}": lambda value, end=2**bits: int(value) % end}
        for name, cast in casts.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, cast)


@pytest.fixture
def in_python(monkeypatch):
    """tensor_store with Python's meanings; counts writes in ``staged`` and ``written``."""

    def same(value):
        return value

    def ld_shared(count, kind):
        def load(address):
            assert address % (4 * count) == 0
            values = tuple(state.shared[address // 4 + z] for z in range(count))
            return values if count > 1 else values[0]

        return load

    def st_shared(address, *values):
        assert address % 16 == 0
        state.shared[address // 4 : address // 4 + 4] = values

    def st_global_if(count):
        def store(wanted, y, index, words):
            outputs = [value for word in words[:count] for value in (word if isinstance(word, tuple) else (word,))]
            assert (state.shift + index) * state.itemsize % (4 * count) == 0 or not wanted
            for z, value in enumerate(outputs if wanted else ()):
                y[index + z] = value

        return store

    class Output(dict):
        def __setitem__(self, index, value):
            state.written[int(index)] += 1
            super().__setitem__(int(index), float(value))

    state = SimpleNamespace(shared=None, shift=0, itemsize=4, straight=0, written=Counter(), Output=Output)
    element = SimpleNamespace(load=same, store=same)
    local = SimpleNamespace(array=lambda size, dtype: [None] * size)
    for module in (tensor_store, tensor_runs):
        monkeypatch.setattr(module, "ELEMENTS", dict.fromkeys(DTYPES.values(), element))
        monkeypatch.setattr(module, "device_function", same)
    cast_quickly(monkeypatch, tensor_store, tensor_runs)
    monkeypatch.setattr(tensor_runs, "cuda", SimpleNamespace(local=local))
    monkeypatch.setattr(tensor_store, "st_shared", st_shared)
    for name in ("pack_f16", "pack_bf16"):
        monkeypatch.setattr(tensor_runs, name, lambda low, high: (low, high))
    for meaning in (ld_shared, st_global_if):
        monkeypatch.setattr(tensor_runs, meaning.__name__, meaning)
    for name in ("bits_of", "recomputed"):
        monkeypatch.setattr(tensor_runs, name, same)
    return state


WAYS = [("tf32", True), ("tf32", False), ("bf16", True)]  # precision, whether runs begin with sectors


def code(sample, column, channel, row):
    """A number that tells whose sum it is."""
    return 1.0 + row + 200 * (channel + 50 * (column + 5000 * sample))


@pytest.mark.parametrize(
    ("shape", "precision", "aligned"),
    thorough(
        [(shape, *way) for shape in SHAPES for way in WAYS],
        always=[*((SHAPES[2], *way) for way in WAYS), (SHAPES[6], *WAYS[0])],
    ),
    ids=str,
)
def test_every_output_is_its_own_sum(in_python, shape, precision, aligned):
    @hypothesis.settings(max_examples=6, suppress_health_check=hypothesis.HealthCheck, deadline=None)
    @hypothesis.given(data=st.data())
    def run(data):
        stride, kernel_size, dilation, channels = shape
        # A few columns, or some tiles of them.
        length = data.draw(
            st.integers(1, 4) | (st.integers(250, 290) if stride < 100 else st.integers(5, 8)), label="length"
        )
        padding = data.draw(
            st.integers(0, min(2 * stride, ((length - 1) * stride + kernel_size - 1) // 2)), label="pad"
        )
        problem = Problem(
            *(data.draw(st.integers(1, 2), label="batch"), 8, channels, kernel_size, length),
            stride=stride,
            dilation=dilation,
            padding=padding,
        )
        if in_runs(problem, precision, aligned):
            check(in_python, problem, precision, data.draw(st.integers(0, SECTOR // 4), label="shift"), aligned)

    run()


def test_the_last_outputs_of_samples_that_fill_their_tiles(in_python):
    problem = Problem(2, 8, 16, 3, 117)
    tile = in_runs(problem, "tf32").tile
    assert problem.out_length == tile.advance - 1, "the run of a channel ends within the tile's last sector"
    check(in_python, problem, "tf32", 0)
    assert in_python.straight == 2  # all tiles, one a sample


@pytest.mark.parametrize("shape", SHAPES[4:6], ids=str)
def test_rows_that_fill_the_last_core_matrix_are_not_staged(in_python, shape):
    stride, kernel_size, dilation, channels = shape
    tile = in_runs(Problem(1, 8, channels, kernel_size, 3, stride=stride, dilation=dilation), "tf32").tile
    assert tile.phases * channels < tile.rows
    in_python.shared = np.zeros(2 * tile.rows * tile.pitch)
    stage_rows = tensor_store.make_stage_rows(tile)
    for warp, lane in np.ndindex(WARPS, LANES):
        stage_rows(np.ones(tile.rows), 0, tile.rows, 0, Staging(in_python.shared, 0, 0), 0, Thread(0, warp, lane))
    assert in_python.shared.sum() == tile.phases * channels * COLUMNS
    assert not in_python.shared[tile.staging :].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_which_tiles_may_begin_anywhere(shape):
    """Those that would compute columns twice; lanes write no single 16-bit element."""
    stride, kernel_size, dilation, channels = shape
    problem = Problem(1, 8, channels, kernel_size, 256, stride=stride, dilation=dilation)
    found = in_runs(problem, "tf32", aligned=False)
    assert (found is None) == (shape in [(3, 7, 2, 6), (130, 140, 1, 2)])
    assert found is None or found.tile.advance > in_runs(problem, "tf32").tile.advance
    assert in_runs(problem, "bf16", aligned=False) is None


def in_runs(problem, precision, aligned=True):
    """The configuration with the highest tile that stores by store_runs.py; None without one."""
    found = k6_config.configs(problem, precision)
    return next((c for c in found if not c.bulk_channels and c.tile.aligned == aligned and not c.tail), None)


def check(state, problem, precision, shift, aligned=True):
    """Aligned, with a bias."""
    p, config = problem, in_runs(problem, precision, aligned)
    tile, (first, columns) = config.tile, k6_config.sample_columns(problem, config)
    state.itemsize, state.shift = tile.itemsize, shift * 4 // tile.itemsize
    state.shared, state.written = np.zeros(tile.staging), Counter()
    alignment = tensor_store.alignment_of(shift * 4, p, tile)
    y, staging = state.Output(), Staging(state.shared, 0, 0)
    bias = [0.5 * (channel + 1) * aligned for channel in range(p.out_channels)]
    out = output_of(p, y, config, alignment)
    out = out._replace(bias=bias, has_bias=True) if aligned else out
    stage_rows = tensor_store.make_stage_rows(tile)
    aim, head_of = tensor_store.make_aim(tile)
    store_any = tensor_store.make_store_any(tile, WARPS, add_bias=True)
    prepare = tensor_runs.make_prepare(tile, WARPS)
    load_biases = tensor_runs.make_load_biases(tile, WARPS, add_bias=True)
    store_runs = tensor_runs.make_store_runs(tile, WARPS, alignment.quantum, prepare, load_biases)
    staged_rows, out_channels = tile.rows // tile.rounds, p.out_channels
    for row_tile in range(tile.row_tiles(p)):
        row = row_tile % tile.row_parts * tile.phases
        co = row_tile // tile.row_parts * tile.channels
        left = min(tile.channels, out_channels - co)
        for column_tile in range(k6_config.column_tiles(p, config)):
            n, j = divmod(column_tile * tile.advance, columns)
            extent, straight = aim(n, j, out)
            state.straight += straight
            heads = [head_of(n, co, extent, out, warp) for warp in range(WARPS)]
            sizes = tensor_runs.runs_sizes(tile, WARPS)
            # Only each lane's runs, moved on from round to round, are prepared once.
            runs = {k: Runs(*([0] * sizes[i] for i in (1, 0, 1, 1))) for k in np.ndindex(WARPS, LANES)}
            steady = left >= tile.channels and p.out_length * tile.round_channels % tile.sector == 0
            for round_ in range(tile.rounds):
                m0, done = round_ * staged_rows, round_ * tile.round_channels
                for warp in range(WARPS):
                    for lane in range(LANES):
                        values = sums_of(tile, problem, config, column_tile, row, co, m0, staged_rows, warp, lane)
                        stage_rows(values, 0, staged_rows, 0, staging, alignment.offset, Thread(0, warp, lane))
                for warp in range(WARPS):
                    for lane in range(LANES):
                        own, thread = runs[warp, lane], Thread(0, warp, lane)
                        place = Place(n, j, row, co + done, left - done, extent, heads[warp])
                        if straight and tensor_runs.keeps_runs(tile, WARPS) and not (steady and round_ > 0):
                            prepare(own, 0, out, staging, place, thread)
                        next_head = (store_runs if straight else store_any)(own, out, staging, place, thread)
                    heads[warp] = next_head
    every = p.batch * out_channels * p.out_length
    assert state.written == Counter(range(every)), "each output once, and nothing else"
    for index, value in y.items():
        rest, o = divmod(index, p.out_length)
        sample, channel = divmod(rest, out_channels)
        assert value == expected(problem, first, sample, channel, o) + bias[channel]


def output_of(p, y, config, alignment, has_bias=False):
    """The output of ``p`` as the stores take it. Without a bias, none is read."""
    first, columns = k6_config.sample_columns(p, config)
    return Output(y, None, has_bias, p.batch, columns, first, p.out_channels, p.out_length, p.padding, alignment)


def sums_of(tile, problem, config, column_tile, row, co, m0, count, warp, lane):
    """A lane's sums of ``count`` rows from ``m0``, in wgmma's order (make_stage_rows)."""
    columns, start = k6_config.sample_columns(problem, config)[1], column_tile * tile.advance - tile.overlap
    values = np.zeros(count)
    for r in range(count // 4):
        m = m0 + r // 2 * 8 + (lane & 3) * 2 + r % 2
        channel, phase = divmod(m, tile.phases)
        for q in range(4):
            column = 32 * warp + lane // 4 * 4 + q
            sample, j = divmod(start + column, columns)
            values[4 * r + q] = code(sample, j, co + channel, row + phase)
    return values


def expected(problem, first, sample, channel, o):
    """The sum that reaches an output: zero without a tap (formula/taps.py)."""
    t, u = problem.taps, o + problem.padding
    if u % t.gap:
        return 0
    a = next(a for a in range(t.rows) if (u - a * problem.dilation) % problem.stride == 0)
    if a >= problem.kernel_size:
        return 0
    return code(sample, (u - a * problem.dilation) // problem.stride - first, channel, a)


def test_alignment_of_an_output():
    problem = Problem(1, 8, 8, 4, 100, stride=2, padding=1)
    tile = in_runs(problem, "tf32").tile
    assert problem.out_length % 4 == 0
    assert tensor_store.alignment_of(0, problem, tile) == Alignment(0, 4, 3, 1)
    assert tensor_store.alignment_of(0, problem, tile, in_fours=True) == Alignment(0, 1, 0, 1)
    anywhere = in_runs(problem, "tf32", aligned=False).tile
    assert tensor_store.alignment_of(0, problem, anywhere) == Alignment(0, 1, 0, 1)
    assert tensor_store.alignment_of(4, problem, anywhere) == Alignment(1, 4, 0, 0)
