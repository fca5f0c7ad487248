"""What a lane reads as its window: kernels/k5_mma/mainloop.py's device functions in Python."""

from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k5_mma import choose as k5_choice
from numba_tconv.kernels.k5_mma import mainloop as k5_multiply
from numba_tconv.kernels.k5_mma.arguments import RowTile, Weights
from numba_tconv.kernels.k5_mma.choose import choose
from numba_tconv.kernels.k5_mma.mainloop import NEXT, OWN, Selectors
from numba_tconv.kernels.k5_mma.tile import RUN
from numba_tconv.lab.measure import workloads
from tests.shared_memory import shared_memory

BESIDE = 9999  # stands in memory where a row is not


@pytest.fixture
def memory(monkeypatch):
    return shared_memory(monkeypatch, k5_multiply)


def number(row, column):
    return 1000 * row + 100 + column


@pytest.mark.parametrize("workload", ["kb64", "kb74", "hifigan_u1", "patch"])
@pytest.mark.parametrize(
    ("precision", "aligned", "selectors"),
    [
        ("tf32", True, (OWN, OWN)),
        ("tf32", False, (OWN, OWN)),
        ("bf16", True, (OWN, OWN)),
        *[("bf16", False, (even, odd)) for even in (OWN, NEXT) for odd in (OWN, NEXT)],
    ],
)
def test_a_window_is_its_rows(memory, workload, precision, aligned, selectors):
    """Channels that begin within a word have their columns an element further."""
    config = choose(workloads.get(workload).problem, precision, aligned=aligned)
    tile, window, pitch = config.tile, config.window, config.pitch
    assert config.shifted == (precision == "bf16" and not aligned)
    memory.itemsize = tile.itemsize
    rows = np.full((2 * tile.depth, pitch), BESIDE, np.uint16 if tile.itemsize == 2 else np.int64)
    for row in range(2 * tile.depth):
        further = int(selectors[row % 2] == NEXT)
        rows[row, further : further + window] = [number(row, column) for column in range(window)]
    memory.elements = rows.ravel()
    first = 2 if tile.itemsize == 2 else 1  # a lane's first row, t = 1
    lane_rows = 4 if precision == "tf32x3" else 2
    v = [None] * (lane_rows * window)
    k5_multiply.make_window(config)(v, first * pitch * tile.itemsize, Selectors(*selectors), None)
    for h in range(lane_rows):
        for q in range(config.halo - tile.reach, window):
            found, row = v[h * window + q], first + h * tile.depth // lane_rows
            if tile.itemsize == 4:
                assert found == number(row, q)
            else:
                assert (found & 0xFFFF, found >> 16) == (number(row, q), number(row + 1, q)), (h, q)


@pytest.mark.parametrize(("workload", "precision"), [("kb64", "tf32"), ("hifigan_u1", "tf32"), ("dac_u1", "tf32x3")])
def test_sums_begin_as_the_biases_of_their_rows(monkeypatch, workload, precision):
    config = choose(workloads.get(workload).problem, precision)
    assert not config.tile.has_gaps
    phases, existing = config.tile.phases, config.tile.channels - 1  # the last channel is missing
    monkeypatch.setattr(k5_multiply, "ELEMENTS", {config.tile.dtype: SimpleNamespace(load=float)})
    load_biases, start = (function.py_func for function in k5_multiply.make_start(config))
    bias = np.arange(100, 100 + 2 * config.tile.channels, dtype=np.float32)
    for lane_row in range(8):
        for has_bias in (0, 1):
            biases = np.full(2 * config.fragments, np.nan, np.float32)
            load_biases(biases, Weights(None, bias, has_bias), lane_row, RowTile(0, 0, 3, existing))
            channels = [(lane_row + 8 * r) // phases for r in range(2 * config.fragments)]
            assert list(biases) == [103 + c if has_bias and c < existing else 0 for c in channels]
            sums = np.full(config.fragments * k5_multiply.RUN * 4, np.nan, np.float32)
            start(sums, biases)
            fragments = sums.reshape(config.fragments, k5_multiply.RUN, 2, 2)  # rows g and g + 8, of two columns
            assert np.array_equal(fragments, np.broadcast_to(biases.reshape(-1, 1, 2, 1), fragments.shape))


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16"])
def test_a_window_has_a_whole_row_of_taps_if_it_fits(precision, fragments):
    whole = 0
    for taps in range(1, 30):
        p = Problem(1, 64, 64, taps, 100)
        tile = k5_choice.make_tile(p, precision)
        parts, vector = tile.operand_halves, 16 // tile.itemsize
        width = RUN + -(-(taps - 1) // vector) * vector
        fits = taps * fragments * RUN * (2 * parts - 1) <= k5_choice.MOST_PRODUCTS[parts]
        fits = fits and width <= k5_choice.WINDOW_LIMIT[parts] and (parts == 1 or taps <= k5_choice.MOST_SPLIT_TAPS)
        assert fits <= (k5_choice._tap_chunk(p, tile, fragments) == taps)
        whole += fits
    assert whole >= 3
