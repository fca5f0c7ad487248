"""What the simulator's stand-ins for straight-line code load and store, and what they refuse."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from numba_tconv.ptx.simulator import meanings
from numba_tconv.runtime.elements import ELEMENTS

F32, F16 = ELEMENTS[torch.float32], ELEMENTS[torch.float16]


def aligned(count, dtype=np.float32):
    """Numbers from 0 that begin at a multiple of 16 bytes."""
    memory = np.zeros(count + 16, dtype)
    first = -memory.ctypes.data % 16 // memory.itemsize
    memory[first : first + count] = range(count)
    return memory[first : first + count]


@pytest.mark.parametrize(("element", "dtype", "vector"), [(F32, np.float32, 4), (F16, np.float16, 8)])
def test_a_run_is_read_in_whole_vectors(element, dtype, vector):
    window, source = np.zeros(8, dtype), aligned(4 * vector, dtype)
    meanings.run(element, 5, window, source, vector, 1)
    assert window[:5].tolist() == [*range(vector + 1, vector + 6)]
    last = 4 * vector - 2 * vector  # the run's two vectors are the last
    meanings.run(element, vector + 1, np.zeros(vector + 1, dtype), source, last, 0)
    with pytest.raises(IndexError):
        meanings.run(element, vector + 2, np.zeros(vector + 2, dtype), source, last + vector, 0)
    with pytest.raises(ValueError, match="misaligned"):
        meanings.run(element, 1, window, source, 1, 0)


def test_a_guarded_run_has_zeros_outside_its_row():
    window, source = np.zeros(6, np.float32), aligned(8)
    meanings.guarded_run(F32, 6, window, source, 1, 2, -1, 3)
    assert window.tolist() == [0, 1, 3, 5, 0, 0]


def test_a_run_is_stored_as_an_aligned_vector():
    target, element = aligned(8), SimpleNamespace(store=float, storage=F32.storage)
    meanings.stored_run(element, target, 4, [9, 8, 7, 6, 5], 1)
    assert target.tolist() == [0, 1, 2, 3, 8, 7, 6, 5]
    with pytest.raises(ValueError, match="misaligned"):
        meanings.stored_run(element, target, 2, [9, 8, 7, 6], 0)
    with pytest.raises(IndexError):
        meanings.stored_run(element, target, 8, [9, 8, 7, 6], 0)
