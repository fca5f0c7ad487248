"""Sums put aside by their upper halves: what is put aside and what is left are together what they were."""

import numpy as np
import pytest

from numba_tconv.ptx import SIMULATOR, add_upper_halves, store_upper_halves
from numba_tconv.ptx.halves import SUMS, WORDS

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")

COUNT, STRIDE, AT = 3, 8, 4  # vectors of 16 bytes, from one to the next, and where they begin
RANDOM = np.random.default_rng(0).standard_normal(COUNT * SUMS).astype(np.float32)


def put_aside(sums):
    shared = np.full(AT + COUNT * STRIDE, np.nan, dtype=np.float32)
    store_upper_halves(COUNT, STRIDE)(shared, AT, sums)
    return shared


@pytest.mark.parametrize("scale", [1, 1e-37, 1e37])
def test_nothing_is_lost(scale):
    whole = RANDOM * np.float32(scale)
    sums = whole.copy()
    shared = put_aside(sums)
    assert (abs(sums) < abs(whole) * 2.0**-7).all()
    add_upper_halves(COUNT, STRIDE)(sums, shared, AT)
    assert (sums == whole).all()


def test_what_comes_after_is_added():
    sums = RANDOM.copy()
    shared = put_aside(sums)
    sums += np.float32(1)
    add_upper_halves(COUNT, STRIDE)(sums, shared, AT)
    assert np.allclose(sums, RANDOM + 1, rtol=0, atol=1e-6)


def test_many_parts_lose_what_one_addition_loses():
    """Put aside again and again, with what was put aside before: as exact as parts added up, and no less."""
    parts = np.random.default_rng(1).standard_normal((20, COUNT * SUMS)).astype(np.float32)
    sums = parts[0].copy()
    shared = put_aside(sums)
    for part in parts[1:]:
        sums += part
        add_upper_halves(COUNT, STRIDE)(sums, shared, AT)
        store_upper_halves(COUNT, STRIDE)(shared, AT, sums)
    add_upper_halves(COUNT, STRIDE)(sums, shared, AT)
    exact, one_by_one = parts.sum(0, dtype=np.float64), np.add.reduce(parts)
    assert np.abs(sums - exact).max() <= 2 * np.abs(one_by_one - exact).max()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 0.0, -2.0])
def test_special_values_stay(value):
    sums = np.full(COUNT * SUMS, value, dtype=np.float32)
    shared = put_aside(sums)
    assert (sums == 0).all()  # so that later products are added to it, and not to a NaN
    add_upper_halves(COUNT, STRIDE)(sums, shared, AT)
    assert np.array_equal(sums, np.full(COUNT * SUMS, value, np.float32), equal_nan=True)


def test_other_memory_is_left_alone():
    shared = put_aside(RANDOM.copy())
    places = (AT + np.arange(COUNT)[:, None] * STRIDE + np.arange(WORDS)).flatten()
    assert np.isnan(np.delete(shared, places)).all()
    assert not np.isnan(shared[places]).any()
