"""The products of split operands, in Python: each once, small ones first, few of them summed without CUDA cores."""

import pytest

from numba_tconv.kernels import k6_config, k6_multiply
from numba_tconv.kernels.k6_config import BLOCKS
from numba_tconv.kernels.tensor_operand import MOST_SPLIT_TAPS
from numba_tconv.problem import Problem
from numba_tconv.ptx import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
LARGE, SMALL = 0, 1  # parts of an operand


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
def test_split_operands(monkeypatch, taps):
    config = k6_config.configs(Problem(2, 16, 64, taps, 256), "tf32x3")[0]
    tile = config.tile
    sums, window = tile.rows // 2, 4 + tile.halo
    assert tile.tap_chunk == taps
    groups = []  # of each sum from zero on, the products: first register of x, lower half of the descriptor

    def multiply_all(acc, at, x0, x1, x2, x3, descriptor, add):
        # The columns of a block, and of the row of the next four channels.
        assert (x1, x2, x3) == (x0 + 1, x0 + window, x0 + window + 1)
        if not add:
            groups.append([])
            acc[at : at + sums] = [0] * sums
        groups[-1].append((at // sums, x0, descriptor & 0xFFFFFFFF))
        for e in range(sums):
            acc[at + e] += 1

    for name in ("wgmma_fence", "wgmma_commit", "mbarrier_wait", "mbarrier_arrive"):
        monkeypatch.setattr(k6_multiply, name, lambda *_: None)
    monkeypatch.setattr(k6_multiply, "device_function", lambda function: function)
    monkeypatch.setattr(k6_multiply, "wgmma", lambda kind, rows: multiply_all)
    monkeypatch.setattr(k6_multiply, "wgmma_wait", lambda count: lambda: None)
    monkeypatch.setattr(k6_multiply, "make_window", lambda config: lambda *_: None)
    monkeypatch.setattr(k6_multiply, "make_hand_over", lambda config: (lambda *_: None, None))
    acc, total = [7] * (BLOCKS * sums), [0] * (BLOCKS * sums)
    v = range(tile.parts * 2 * window)  # each register holds its own number
    in_stage = 0, 0, 0, 0, 1 << 12, config.stages
    k6_multiply.make_stages(config)(
        acc, total, None, None, None, v, 0, 0, 0, 0, 4, False, in_stage, 0, 0, 0, 0, 0, 0, 0, 0, 1
    )

    tap_bytes, expected = tile.rows * tile.depth * tile.itemsize >> 4, []
    for block in range(BLOCKS):
        for b in range(taps):
            x = tile.halo - b * tile.taps.step + 2 * block
            for x_part, w_part in ((SMALL, LARGE), (LARGE, SMALL), (LARGE, LARGE)):
                expected.append((block, x + 2 * x_part * window, (w_part * taps + b) * tap_bytes))
    assert sorted(product for group in groups for product in group) == sorted(expected)
    assert total == [3 * taps] * len(total), "every product is added up, once"
    for group in groups:
        assert len({block for block, _, _ in group}) == 1
        assert len(group) <= 3 * MOST_SPLIT_TAPS
        small = [x >= 2 * window or w >= taps * tap_bytes for _, x, w in group]
        assert small == sorted(small, reverse=True), "the small ones come first"
