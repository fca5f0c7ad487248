"""What a lane reads as its window: kernels/k6_wgmma/operands.py's device functions in Python."""

import numpy as np
import pytest

from numba_tconv.kernels.k6_wgmma import operands as k6_operands
from numba_tconv.kernels.k6_wgmma.arguments import Lane, View
from numba_tconv.kernels.k6_wgmma.choose import choose_whole
from numba_tconv.kernels.k6_wgmma.operands import ALIGNED
from numba_tconv.lab.measure import workloads
from tests.shared_memory import shared_memory
from tests.thorough import thorough

BESIDE = 9999  # stands in memory where a row is not
ROUNDED = 1 << 20  # is added to what is rounded to TF32


@pytest.fixture
def memory(monkeypatch):
    state = shared_memory(monkeypatch, k6_operands)
    monkeypatch.setattr(k6_operands, "put_tf32", lambda v, at, value: v.__setitem__(at, value + ROUNDED))
    return state


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16"])
@pytest.mark.parametrize("workload", thorough(["kb64", "kb74", "hifigan_u1"], always=["kb74"]))
@pytest.mark.parametrize(("before", "behind"), [(0, 0), (7, 0), (1, 0), (0, 1), (0, 6), (2, 3), (99, 0), (0, 99)])
# Where a pair of channels' rows begin, in elements; 32-bit ones all like the first.
@pytest.mark.parametrize(
    ("together", "begins"), [(ALIGNED, (0, 4)), (4, (4, 8)), (2, (2, 4)), (1, (1, 2)), (1, (2, 1)), (1, (1, 3))]
)
def test_a_window_is_its_row_and_zeros_around_it(memory, workload, precision, before, behind, together, begins):
    config = choose_whole(workloads.get(workload).problem, precision)
    tile, window = config.tile, 4 + config.tile.halo
    before, behind = min(before, window), min(behind, window)
    if together == ALIGNED:
        before = behind = 0  # the copy engine makes the zeros around rows at multiples of 16 bytes
    memory.itemsize, pitch = tile.itemsize, window + 16
    halves = 2 if tile.itemsize == 2 else 1
    # Row c; elements beyond the row hold its neighbours in memory.
    begins = [begins[c % halves] for c in range(16)]
    own = range(before, window - behind)
    rows = [[1000 * c + 100 + q if q in own else BESIDE for q in range(pitch)] for c in range(16)]
    memory.elements = np.array(
        [[BESIDE] * begin + row[: pitch - begin] for begin, row in zip(begins, rows, strict=True)]
    )
    slot = 32 // tile.itemsize  # elements from the first slot to the window's
    memory.elements = np.concatenate([np.full(slot, BESIDE), memory.elements.reshape(-1)])
    lane_rows = k6_operands.lane_rows_of(tile)
    assert lane_rows == (4 if precision == "tf32x3" else 2)
    v, first = [0] * (8 + lane_rows * window), 8
    h_step, odd_step = 4 * halves * pitch * tile.itemsize, (pitch + begins[1] - begins[0]) * tile.itemsize
    rounded = together != 2  # by the copy engine
    view = View(begins[0] * tile.itemsize, rounded, before + behind > 0, before | behind << 8, together)
    lane, offset = Lane(h_step, odd_step, None, None, None, None), slot * tile.itemsize
    ahead = precision == "tf32x3" and workload == "kb74"
    for piece in ((8,), (0, 8)) if ahead else ((),):  # half of its columns, the others; or all
        k6_operands.make_window(config, *piece)(v, first, offset, view, lane)
    assert config.split_ahead == ahead
    around = BESIDE if ahead else 0  # zeros are in the stage already
    added = 0 if rounded or precision != "tf32" else ROUNDED
    register_rows = (0, 2, 1, 3) if ahead else range(lane_rows)  # larger parts, then smaller ones
    for h, register_row in enumerate(register_rows):
        for q in range(tile.halo - tile.reach, window):
            values = [rows[4 * halves * h + c][q] if q in own else around for c in range(halves)]
            word = added + sum(value << 16 * c for c, value in enumerate(values))
            assert v[first + register_row * window + q] == word
