"""What a lane reads as its window, on the CPU: the device functions of k6_window.py run as they are, in Python."""

from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv import workloads
from numba_tconv.kernels import k6_window
from numba_tconv.kernels.k6_cost import choose
from numba_tconv.kernels.k6_window import ALIGNED

BESIDE = 9999  # stands in memory where a row is not


@pytest.fixture
def memory(monkeypatch):
    """k6_window with Python's meanings; the numbers in shared memory, by element."""
    state = SimpleNamespace(elements=None, itemsize=4)

    def ld_shared(count, kind):
        def load(address):
            assert address % (4 * count) == 0
            first = address // state.itemsize
            if state.itemsize == 2:
                pairs = state.elements[first : first + 2 * count].reshape(count, 2)
                values = tuple(int(low) | int(high) << 16 for low, high in pairs)
            else:
                values = tuple(int(value) for value in state.elements[first : first + count])
            return values if count > 1 else values[0]

        return load

    def prmt(a, b, selector):
        digits = (a | b << 32).to_bytes(8, "little")
        return sum(digits[selector >> 4 * z & 7] << 8 * z for z in range(4))

    def make_put(parts, apart):
        return lambda v, at, value: v.__setitem__(at, value)

    replaced = dict(
        device_function=lambda function: function,
        cuda=SimpleNamespace(syncwarp=lambda: None, any_sync=lambda mask, predicate: predicate),
        ld_shared=ld_shared,
        prmt=prmt,
        make_put=make_put,
        bits_of=lambda value: value,
        float_of=lambda bits: bits,
        recomputed=lambda value: value,
    )
    for name, meaning in replaced.items():
        monkeypatch.setattr(k6_window, name, meaning)
    return state


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("workload", ["kb64", "kb74", "hifigan_u1"])
@pytest.mark.parametrize(("before", "behind"), [(0, 0), (7, 0), (1, 0), (0, 1), (0, 6), (2, 3), (99, 0), (0, 99)])
# Where the rows of a pair of channels begin, in elements; those of 32 bits all like the first.
@pytest.mark.parametrize(
    ("together", "begins"), [(ALIGNED, (0, 4)), (4, (4, 8)), (2, (2, 4)), (1, (1, 2)), (1, (2, 1)), (1, (1, 3))]
)
def test_a_window_is_its_row_and_zeros_around_it(memory, workload, precision, before, behind, together, begins):
    config = choose(workloads.get(workload).problem, precision)
    tile, window = config.tile, 4 + config.tile.halo
    before, behind = min(before, window), min(behind, window)
    if together == ALIGNED:
        before = behind = 0  # the copy engine makes the zeros around rows at multiples of 16 bytes
    memory.itemsize, pitch = tile.itemsize, window + 16
    halves = 2 if tile.itemsize == 2 else 1
    # Row c, from register 0 on; elements that are none of the row's hold what is beside it in memory.
    begins = [begins[c % halves] for c in range(16)]
    own = range(before, window - behind)
    rows = [[1000 * c + 100 + q if q in own else BESIDE for q in range(pitch)] for c in range(16)]
    memory.elements = np.array(
        [[BESIDE] * begin + row[: pitch - begin] for begin, row in zip(begins, rows, strict=True)]
    )
    memory.elements = memory.elements.reshape(-1)
    v = [0] * (2 * window)
    h_step, odd_step = 4 * halves * pitch * tile.itemsize, (pitch + begins[1] - begins[0]) * tile.itemsize
    beyond = before | behind << 8
    k6_window.make_window(config)(v, 0, begins[0] * tile.itemsize, h_step, odd_step, beyond, together, True)
    for h in range(2):
        for q in range(tile.halo - tile.reach, window):
            values = [rows[4 * halves * h + c][q] if q in own else 0 for c in range(halves)]
            assert v[h * window + q] == sum(value << 16 * c for c, value in enumerate(values))
