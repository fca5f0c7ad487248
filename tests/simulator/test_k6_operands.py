"""Windows of k6 that a producer splits, in Python."""

from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.kernels.common.tensor_core.split_operand import MANTISSA, scales_of
from numba_tconv.kernels.k6_wgmma import split_ahead as k6_operands
from numba_tconv.kernels.k6_wgmma.arguments import Split, Window
from numba_tconv.kernels.k6_wgmma.boxes import place

DEPTH, AT, AROUND = 16, 256, 64  # channels; bytes before the window; elements behind it
STALE = np.float32(1e30)
# Rows of a box, in elements: how many begin alike, by how much others begin later, elements of a row.
GEOMETRIES = [(1, 0, 136), (1, 0, 144), (2, 2, 152), (4, 1, 156), (4, 3, 168)]
geometries = pytest.mark.parametrize(("alike", "shear", "pitch"), GEOMETRIES)


def exponent(values):
    values = np.abs(values[np.isfinite(values)]).max(initial=np.float32(0))
    return int(np.float32(values).view(np.int32) >> MANTISSA)


@pytest.fixture
def split(monkeypatch):
    """The high and low halves of x (channels, elements) from the window's column ``early`` on, beside ``STALE``.

    Returns the inverse too. ``first``, ``last``: the window's elements.
    """

    def parts(x, alike, shear, pitch, first=0, last=1 << 20, early=0):
        memory = np.full(AT // 4 + DEPTH * pitch + AROUND, STALE, np.float32)
        begins = [AT // 4 + int(place(c, alike.bit_length() - 1, pitch, shear)) + early for c in range(DEPTH)]
        for begin, row in zip(begins, x, strict=True):
            memory[begin : begin + x.shape[1]] = row
        own = np.zeros(memory.size, bool)  # what counts
        for c in range(DEPTH):
            row = AT // 4 + c * pitch
            sheared = c % alike * shear
            own[row + max(first + sheared, 0) : row + max(min(last + sheared, pitch), 0)] = True
        of_x = np.zeros(memory.size, bool)
        for begin in begins:
            of_x[begin : begin + x.shape[1]] = True
        memory[own & ~of_x] = 0
        before, touched, found = memory.copy(), [], []

        def load(address):
            assert address % 16 == 0
            return tuple(memory[address // 4 : address // 4 + 4])

        def store(address, *values):
            assert address % 16 == 0
            memory[address // 4 : address // 4 + 4] = values
            touched.extend(range(address // 4, address // 4 + 4))

        exact = exponent(before[own])

        def exponent_of_warp(largest):
            """Lanes come one after the other: each is told the warp's when it says its own."""
            found.append(largest)
            return 255 if np.isinf(largest) else exact

        monkeypatch.setattr(k6_operands, "ld_shared", lambda count, kind: load)
        monkeypatch.setattr(k6_operands, "st_shared", store)
        monkeypatch.setattr(k6_operands, "exponent_of_warp", exponent_of_warp)
        window = Window(alike.bit_length() - 1, 4 * pitch, 4 * shear, 0, 0, 0)
        split_window = k6_operands.make_split_window()
        scales = scales_of(np.float32(1))
        with np.errstate(invalid="ignore", over="ignore"):
            inverses = {float(split_window(AT, window, first, last, scales, lane)) for lane in range(32)}
        assert len(inverses) == 1
        assert exponent(np.array(found, np.float32)) == exact, "the largest of all lanes' is that of the window"
        assert set(touched) == set(range(AT // 4, AT // 4 + DEPTH * pitch)), "all of the window, nothing else"
        outside = np.ones(memory.size, bool)
        outside[touched] = False
        assert (memory[outside] == before[outside]).all()
        halves = memory.view(np.float16).reshape(-1, 2)
        larger, smaller = (np.empty(x.shape, np.float64) for _ in range(2))
        for c in range(DEPTH):
            upper, half = c - c % 8 + c % 4, c % 8 // 4  # channels c and c + 4 share words
            there, below = (begins[upper + z] + np.arange(x.shape[1]) for z in (0, 4))
            larger[c], smaller[c] = halves[there, half], halves[below, half]
        window = slice(AT // 4, AT // 4 + DEPTH * pitch)
        assert not memory.view(np.int32)[window][~own[window]].any(), "what does not count is zeros"
        return larger, smaller, inverses.pop()

    return parts


def numbers(columns, scale=1):
    return (np.random.default_rng(0).standard_normal((DEPTH, columns)) * scale).astype(np.float32)


@geometries
@pytest.mark.parametrize("scale", [1e-30, 1, 1e30])
def test_each_number_is_two_parts(split, alike, shear, pitch, scale):
    """Everything beside x is zeros, though it is larger."""
    x, early = numbers(132, scale), 0 if alike == 1 else 3
    larger, smaller, inverse = split(x, alike, shear, pitch, early, early + 132, early)
    assert 2**14 <= abs(larger).max() <= 2**15
    assert (larger == (x.astype(np.float64) / inverse).astype(np.float16)).all()
    error = abs((larger + smaller) * inverse - x)
    assert (error <= np.maximum(2.0**-22 * abs(x.astype(np.float64)), 2.0**-39 * abs(x).max())).all()


@geometries
@pytest.mark.parametrize(
    ("first", "last"), [(-5, 60), (-2, 1 << 20), (7, 1 << 20), (1, 2), (-(1 << 20), 0), (200, 1 << 20)]
)
def test_what_is_not_of_the_row_is_zeros(split, alike, shear, pitch, first, last):
    x = numbers(pitch - 3 * (alike > 1) * shear)
    larger, smaller, inverse = split(x, alike, shear, pitch, first, last)
    own = np.array([first <= e < last for e in range(x.shape[1])])
    assert not larger[:, ~own].any()
    assert not smaller[:, ~own].any()
    assert np.allclose(((larger + smaller) * inverse)[:, own], x[:, own], rtol=2.0**-22, atol=2.0**-36)


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("channel", range(DEPTH))
def test_the_largest_may_be_of_any_channel(split, channel, infinite):
    """Beside an infinity that the same lane reads, too."""
    x = numbers(136)
    x[channel, channel] = 3 << 14
    if infinite:
        x[channel ^ 4, channel + 16] = np.inf
    larger, _, inverse = split(x, 1, 0, 136)
    assert inverse == 2.0 ** (15 - 14)
    assert larger[channel, channel] == 3 << 13


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_beside_what_is_no_number_numbers_keep_their_parts(split, value):
    x = numbers(136, 1e20)
    x[5, 77] = value
    larger, smaller, inverse = split(x, 1, 0, 136)
    together = (larger + smaller) * inverse
    assert np.isnan(together[5, 77])
    numbers_of = np.isfinite(x)
    assert numbers_of.sum() == x.size - 1
    assert np.allclose(together[numbers_of], x[numbers_of], rtol=2.0**-22, atol=1e20 * 2.0**-36)


def test_zeros(split):
    larger, smaller, inverse = split(np.zeros((DEPTH, 136), np.float32), 1, 0, 136)
    assert not larger.any()
    assert not smaller.any()
    assert 0 < inverse < np.inf


def test_each_window_of_a_stage_once_and_then_it_is_ready(monkeypatch):
    """A lane fences its writes before it says so."""
    done = []
    config = SimpleNamespace(regions=2)
    monkeypatch.setattr(k6_operands, "make_split_window", lambda: lambda *window: done.append(window) or len(done))
    for name in ("fence_async", "mbarrier_arrive", "st_shared_f32"):
        monkeypatch.setattr(k6_operands, name, lambda *values, name=name: done.append((name, *map(int, values))))
    split_stage, window = k6_operands.make_split_stage(config), Window(2, 3, 4, 1024, 6, 7)
    ready, inverses = 5000, 6000
    for lane in (0, 3):
        done.clear()
        split_stage(lane, 1 << 14, 16, Split(ready, inverses, "scales"), window, [10, 20], [30, 40])
        first = (1 << 14, window, 10, 30, "scales", lane)
        second = ((1 << 14) + 1024, window, 20, 40, "scales", lane)
        last = [("fence_async",), ("mbarrier_arrive", ready + 16)]
        if lane:
            assert done == [first, second, *last]
        else:
            stored = [("st_shared_f32", inverses + 16 + 4 * z, 2 * z + 1) for z in range(2)]
            assert done == [first, stored[0], second, stored[1], *last]


def test_eight_lanes_read_from_all_banks():
    """128 bytes at a time; a row is 8 or 24 words longer than a multiple of 32."""
    for pitch in (136, 152):
        for quarter in range(0, 32, 8):
            words = [k6_operands.row_of(lane) * pitch + lane % 4 * 4 + z for lane in range(quarter, quarter + 8)
                     for z in range(4)]  # fmt: skip
            assert sorted(word % 32 for word in words) == list(range(32))


def test_pairs_of_channels():
    assert sorted(k6_operands.row_of(lane) for lane in range(0, 32, 4)) == [0, 1, 2, 3, 8, 9, 10, 11]
