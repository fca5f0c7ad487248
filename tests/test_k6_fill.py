"""Windows of k6 that are filled row by row: every element is written, with what its sample has there or with zero."""

import numpy as np
import pytest

from numba_tconv.kernels import k6_boxes, k6_config, k6_load
from numba_tconv.problem import Problem

LANES = 32


@pytest.fixture
def memory(monkeypatch):
    """Shared memory, by the byte, as the instructions fill it."""
    found = {}

    def cp_async_bulk(address, x, source, size, barrier):
        assert address % 16 == source * x.itemsize % 16 == size % 16 == 0
        for e in range(size // x.itemsize):
            found[int(address + e * x.itemsize)] = float(x[source + e])

    def st_shared(address, *values):
        assert address % 16 == 0
        assert values == (0, 0, 0, 0)
        found.update((int(address + byte), 0.0) for byte in range(16))

    for module in (k6_load, k6_boxes):
        monkeypatch.setattr(module, "device_function", lambda function: function)
    monkeypatch.setattr(k6_load, "recomputed", lambda value: value)
    monkeypatch.setattr(k6_load, "cp_async_bulk", cp_async_bulk)
    monkeypatch.setattr(k6_load, "st_shared", st_shared)
    monkeypatch.setattr(k6_load, "mbarrier_expect_tx", lambda barrier, size: None)
    arrived = []
    monkeypatch.setattr(k6_load, "mbarrier_await_copies", lambda barrier: arrived.append((barrier, len(found))))
    return found, arrived


# Element of the sample at which the window begins: before the sample, in it, behind it; in units of a column.
@pytest.mark.parametrize("begin", [-16, -8, 0, 24, 40, 64])
@pytest.mark.parametrize("channels_left", [0, 3, 100])
@pytest.mark.parametrize(("precision", "dtype"), [("tf32", np.float32), ("fp16", np.float16)])
def test_in_bulk(memory, precision, dtype, channels_left, begin):
    memory, arrived = memory
    problem = Problem(3, 24, 16, 7, 48, stride=3, dilation=2, padding=3)
    config = k6_config.configs(problem, precision)[0]
    tile, (first, columns) = config.tile, config.tile.columns(problem)
    geometry = k6_boxes.geometry(config, 1)
    x = np.arange(1, 1 + problem.batch * problem.in_channels * problem.length).astype(dtype)
    strides = problem.in_channels * problem.length, problem.length
    fill_in_bulk, _ = k6_load.make_fill(config)
    for sample in range(-1, problem.batch):
        memory.clear()
        arrived.clear()
        for lane in range(LANES):
            in_stage = 0, geometry.pitch, geometry.spacing, 0, geometry.slot, 1
            fill_in_bulk(x, *strides, sample, begin, 0, channels_left, 0, in_stage, problem.batch, problem.length,
                         columns, first, lane, 0)  # fmt: skip
            # Each lane arrives once, behind what it has written.
            assert len(arrived) == lane + 1
            assert arrived[-1] == (0, len(memory))
        for channel in range(tile.depth):
            for column in range(config.width):
                n, i = sample, begin + column
                while i >= first + columns:
                    n, i = n + 1, i - columns
                exists = channel < channels_left and 0 <= n < problem.batch and 0 <= i < problem.length
                expected = float(x[n * strides[0] + channel * strides[1] + i]) if exists else 0.0
                assert memory[channel * geometry.pitch + column * tile.itemsize] == expected, (channel, column)
