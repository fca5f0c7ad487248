"""k6's windows filled row by row: every element is the sample's, or zero."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma import boxes as k6_box
from numba_tconv.kernels.k6_wgmma import fill as k6_fill
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.arguments import Fetch, Input, Origin, Samples, Shared
from numba_tconv.kernels.k6_wgmma.boxes import RowAlignment
from tests.kernels.test_tensor_store import cast_quickly
from tests.thorough import thorough

LANES = 32


@pytest.fixture
def memory(monkeypatch):
    """Shared memory, by the byte, as the instructions fill it."""
    found = {}

    def cp_async(address, x, source, size):
        assert address % 16 == source * x.itemsize % 16 == 0
        assert size in (0, 16)
        for e in range(16 // x.itemsize):
            place = int(address + e * x.itemsize)
            assert place not in found, "once"
            found[place] = float(x[source + e]) if size else 0.0

    cast_quickly(monkeypatch, k6_box, k6_fill)
    monkeypatch.setattr(k6_fill, "device_function", lambda function: function)
    monkeypatch.setattr(k6_fill, "place", k6_box.place.py_func)
    monkeypatch.setattr(k6_fill, "recomputed", lambda value: value)
    monkeypatch.setattr(k6_fill, "nounroll", lambda: None)
    monkeypatch.setattr(
        k6_fill, "repeated", lambda step, count: lambda k, state: [step(k + z, state) for z in range(count)]
    )
    local = SimpleNamespace(array=lambda size, dtype: [None] * size)
    monkeypatch.setattr(k6_fill, "cuda", SimpleNamespace(local=local))
    monkeypatch.setattr(k6_fill, "cp_async_to", lambda size: cp_async)
    arrived = []
    monkeypatch.setattr(k6_fill, "mbarrier_await_copies", lambda barrier: arrived.append((barrier, len(found))))
    return found, arrived


# Element of the sample at which the window begins: before, in, or behind it; in units of a column.
@pytest.mark.parametrize("begin", [-16, -8, 0, 24, 40, 64])
@pytest.mark.parametrize("channels_left", [0, 3, 100])
@pytest.mark.parametrize(("precision", "dtype"), [("tf32", np.float32), ("fp16", np.float16)])
def test_in_vectors(memory, precision, dtype, channels_left, begin):
    memory, arrived = memory
    problem = Problem(3, 40, 16, 7, 48, stride=3, dilation=2, padding=3)
    config = k6_config.configs(problem, precision)[0]
    first, columns = config.tile.columns(problem)
    geometry = k6_box.geometry(config, None)
    x = np.arange(1, 1 + problem.batch * problem.in_channels * problem.length).astype(dtype)
    fill_in_vectors, _ = k6_fill.make_fill(config)
    taken = input_of(x, problem, columns, geometry, 0, True)
    for sample in range(-1, problem.batch):
        memory.clear()
        arrived.clear()
        for lane in range(LANES):
            fill_in_vectors(taken, Origin(sample, begin, 0, channels_left), 0, lane, 0)
            # Each lane arrives once, behind what it has written.
            assert len(arrived) == lane + 1
            assert arrived[-1] == (0, len(memory))
        check(memory, config, problem, (first, columns), x, sample, begin, channels_left, None, 0)


# Rows without a map, and as a box would have them; x begins as many elements after a multiple of 16 bytes.
@pytest.mark.parametrize("early", [0, 3])
@pytest.mark.parametrize("begin", [-16, 24, 41])
@pytest.mark.parametrize("channels_left", thorough([0, 3, 11, 100], always=[3, 100]))
@pytest.mark.parametrize(("precision", "dtype"), [("tf32", np.float32), ("fp16", np.float16)])
def test_by_elements(memory, monkeypatch, precision, dtype, channels_left, begin, early):
    memory, arrived = memory
    problem = Problem(3, 40, 16, 7, 47, stride=3, dilation=2, padding=3)
    config = k6_config.configs(problem, precision)[0]
    tile, (first, columns) = config.tile, config.tile.columns(problem)
    every = 16 // tile.itemsize
    rows = RowAlignment(every, problem.length % every, False) if early else None
    geometry = k6_box.geometry(config, rows)
    x = np.arange(1, 1 + problem.batch * problem.in_channels * problem.length).astype(dtype)
    base, region = 1 << 20, 1 << 12

    class Elements:
        def __setitem__(self, index, value):
            assert tile.itemsize == 2
            memory[int(index) * tile.itemsize - region] = float(value)

    def cp_async(address, x, source, size):
        assert tile.itemsize == 4
        memory[int(address) - base - region] = float(x[source]) if size else 0.0

    monkeypatch.setattr(k6_fill, "cp_async_to", lambda size: cp_async)
    _, fill = k6_fill.make_fill(config)
    taken = input_of(x, problem, columns, geometry, early, rows is None)
    for sample in range(-1, problem.batch):
        memory.clear()
        for lane in range(LANES):
            fill(taken, Origin(sample, begin, 0, channels_left), region, Shared(None, Elements(), base), lane, 0)
            assert arrived.pop() == (0, len(memory))
        assert first == 0
        check(memory, config, problem, (first, columns), x, sample, begin, channels_left, rows, early)


def input_of(x, problem, columns, geometry, early, aligned):
    """``x`` as a kernel takes it."""
    strides = problem.in_channels * problem.length, problem.length
    samples = Samples(problem.batch, problem.length, columns, 0)
    return Input(x, None, *strides, early, geometry, Fetch(False, aligned, False, False), samples)


def check(memory, config, problem, columns, x, sample, begin, channels_left, rows, early):
    """Every element of the window stands where a box of ``rows`` would have it."""
    tile, (first, columns), g = config.tile, columns, k6_box.geometry(config, rows)
    written = defaultdict(int)
    for channel in range(config.depth):
        row = k6_box.place.py_func(channel, g.alike_log, g.pitch, g.shear)
        if rows:
            row += (early + begin) % (16 // tile.itemsize) * tile.itemsize
        for column in range(config.width):
            n, i = sample, begin + column
            while i >= first + columns:
                n, i = n + 1, i - columns
            exists = channel < channels_left and 0 <= n < problem.batch and 0 <= i < problem.length
            expected = float(x[(n * problem.in_channels + channel) * problem.length + i]) if exists else 0.0
            at = int(row + column * tile.itemsize)
            assert memory[at] == expected, (channel, column)
            written[at] += 1
    assert set(written.values()) == {1}
