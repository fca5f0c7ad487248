"""When weights are packed anew and when not, with what CUDA has to say about streams and graphs made up."""

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch._inductor import cudagraph_trees
from torch.multiprocessing.reductions import StorageWeakRef

from numba_tconv.kernels import tensor_pack, weight_cache
from numba_tconv.kernels.k6_config import configs
from numba_tconv.layout import Layout
from numba_tconv.problem import Problem


@pytest.fixture
def cuda():
    """What CUDA has to say, and what was asked of it."""
    return SimpleNamespace(capturing=False, packings=0, stream=0, waited=[])


@pytest.fixture
def packed(monkeypatch, cuda):
    """A function that packs weights, and returns how often they have been packed by then."""

    def pack(w, *_):
        cuda.packings += 1
        return w.clone()

    def packed(w, capturing=False):
        cuda.capturing = capturing
        assert torch.equal(weight_cache.packed_weights(w, packing), w)
        return cuda.packings

    weights = Layout.contiguous((4, 3, 2), torch.float32, 0)
    packing = tensor_pack.TensorPacking(weights, "tile", "mma", *[1] * 4)
    monkeypatch.setattr(weight_cache, "_pack", pack)
    monkeypatch.setattr(weight_cache, "_kept", {})
    monkeypatch.setattr(weight_cache, "_new", OrderedDict())
    monkeypatch.setattr(weight_cache, "_once", {})
    monkeypatch.setattr(weight_cache, "_lasting", set())
    monkeypatch.setattr(weight_cache, "_captured", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: cuda.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=cuda.waited.append))
    monkeypatch.setattr(torch.cuda, "Event", MagicMock)
    return packed


def test_weights_that_come_again_are_packed_no_more_until_torch_changes_them(packed):
    w = torch.randn(4, 3, 2)
    assert [packed(w), packed(w), packed(w), packed(w.view(4, 3, 2))] == [1, 2, 2, 2]
    assert [packed(w[1:]) for _ in range(3)] == [3, 4, 4]
    w.mul_(2)
    assert [packed(w) for _ in range(4)] == [5, 6, 6, 6]


def test_weights_that_are_computed_for_each_call_are_not_kept(packed):
    """Not even where the allocator gives them the memory of those before."""
    g, v = torch.randn(4, 1, 1), torch.randn(4, 3, 2)
    assert [packed(torch._weight_norm(v, g)) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert not weight_cache._kept


def test_other_weights_at_an_address_are_new(packed):
    """As those that the allocator puts where the last were; here two storages share their memory."""
    memory = torch.randn(4, 3, 2).numpy()
    assert [packed(torch.from_numpy(memory)) for _ in range(4)] == [1, 2, 3, 4]
    assert len(weight_cache._new) == 1
    assert not weight_cache._kept


def test_after_many_weights_that_come_once_few_are_remembered(packed, monkeypatch):
    """But those that come to stay are, soon."""
    remembered = []
    monkeypatch.setattr(weight_cache, "StorageWeakRef", lambda s: remembered.append(s) or StorageWeakRef(s))
    many = weight_cache.PATIENCE + 10 * weight_cache.SELDOM
    computed = [torch.randn(4, 3, 2) for _ in range(many)]
    for number, w in enumerate(computed, 1):
        assert packed(w) == number
    assert len(remembered) == weight_cache.PATIENCE + 10
    layers = [torch.randn(4, 3, 2) for _ in range(3)]
    counts = [[packed(w) for w in layers][-1] for _ in range(10)]
    assert counts[7] == counts[8] == counts[9], "all are kept"
    assert packed(torch.randn(4, 3, 2)) == packed(layers[0]) == counts[9] + 1


def test_of_weights_that_have_come_once_the_latest_are_remembered(packed, monkeypatch):
    monkeypatch.setattr(weight_cache, "MOST_NEW", 8)
    old, recent = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    for w in (old, recent):
        packed(w)
    others = [torch.randn(4, 3, 2) for _ in range(weight_cache.MOST_NEW - 1)]
    for w in others:
        packed(w)
    assert len(weight_cache._new) == weight_cache.MOST_NEW
    before = packed(recent)
    assert packed(recent) == before
    before = packed(old)
    assert [packed(old), packed(old)] == [before + 1, before + 1]


def test_weights_at_an_old_address_are_the_latest(packed, monkeypatch):
    monkeypatch.setattr(weight_cache, "MOST_NEW", 3)
    memory, others = torch.randn(4, 3, 2).numpy(), [torch.randn(4, 3, 2) for _ in range(4)]
    packed(torch.from_numpy(memory))
    for w in others[:2]:
        packed(w)
    latest = torch.from_numpy(memory)
    packed(latest)
    before = packed(others[2])  # the first of the others is forgotten
    assert [packed(latest), packed(latest)] == [before + 1, before + 1]


def test_what_was_packed_of_weights_that_torch_changed_is_given_back(packed):
    w = torch.randn(4, 3, 2)
    for _ in range(2):
        packed(w)
    assert len(weight_cache._kept) == 1
    w.mul_(2)
    packed(w)
    assert not weight_cache._kept


def test_weights_of_inference_mode_are_packed_at_every_call(packed):
    with torch.inference_mode():
        w = torch.randn(4, 3, 2)
        assert [packed(w), packed(w)] == [1, 2]


def test_weights_that_a_graph_reads_are_packed_at_every_call_from_then_on(packed):
    """A replay may write them, which torch does not count."""
    w, other = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    assert [packed(w), packed(w), packed(other), packed(other)] == [1, 2, 3, 4]
    assert packed(w, capturing=True) == 5
    assert [packed(w), packed(w.detach())] == [6, 7]
    assert packed(other) == 7


def test_another_stream_waits_for_the_packing_and_keeps_its_memory(packed, cuda, monkeypatch):
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(stream), raising=False)
    w = torch.randn(4, 3, 2)
    assert [packed(w), packed(w), packed(w)] == [1, 2, 2]
    assert cuda.waited == recorded == []
    cuda.stream = 1
    assert packed(w) == 2
    assert len(cuda.waited) == len(recorded) == 1


def test_float64_is_packed_at_every_call(packed):
    """Gradcheck writes through ``data``."""
    w = torch.randn(4, 3, 2, dtype=torch.float64)
    assert [packed(w) for _ in range(3)] == [1, 2, 3]


def test_a_change_drops_every_packing_and_no_more_than_a_few_are_kept(monkeypatch, packed):
    def packing(rows):
        return tensor_pack.TensorPacking(weights, "tile", "mma", 1, rows, 1, 1)

    weights, w = Layout.contiguous((4, 3, 2), torch.float32, 0), torch.randn(4, 3, 2)
    many = [packing(rows) for rows in range(weight_cache.MOST_PACKINGS + 3)]
    for one in many:
        for _ in range(2):
            weight_cache.packed_weights(w, one)
    (kept,) = weight_cache._kept.values()
    assert list(kept.packed) == many[-weight_cache.MOST_PACKINGS :]
    w.mul_(2)
    for _ in range(2):
        weight_cache.packed_weights(w, many[0])
    (kept,) = weight_cache._kept.values()
    assert list(kept.packed) == many[:1]


def test_nothing_is_kept_in_the_memory_of_a_graph_that_torch_compile_warms_up(packed, monkeypatch):
    warm = SimpleNamespace(in_warmup=True)
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda device, create_if_none_exists: warm)
    w = torch.randn(4, 3, 2)
    assert [packed(w), packed(w), packed(w)] == [1, 2, 3]
    assert not weight_cache._kept
    warm.in_warmup = False
    assert [packed(w), packed(w), packed(w)] == [4, 4, 4]


def test_torch_compile_warms_nothing_up_where_it_was_not_called(monkeypatch):
    assert not weight_cache._warming_up(0)
    assert hasattr(cudagraph_trees.CUDAGraphTreeManager, "in_warmup")
    # Another thread has no managers, and some versions of torch fail when they are asked for one.
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda *_, **__: pytest.fail("asked"))
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(weight_cache._warming_up, 0).result()


def test_nothing_is_remembered_of_weights_that_are_gone(packed):
    for capturing, memory in ((False, weight_cache._kept), (True, weight_cache._captured)):
        for _ in range(5):
            w = torch.randn(4, 3, 2)
            for _ in range(2):
                packed(w, capturing)
            del w
        assert len(memory) == 1


def test_packings_that_are_equal_are_one_whatever_the_length_and_batch():
    problem = Problem(2, 64, 64, 8, 100, stride=4)
    tile = configs(problem, "tf32")[0].tile

    def packing(order="mma", strides=None, offset=0, **changes):
        p = replace(problem, **changes)
        weights = Layout.contiguous((p.in_channels, p.out_channels_per_group, p.kernel_size), torch.float32, 0)
        weights = weights._replace(strides=strides or weights.strides, offset=offset)
        return tensor_pack.packing_of(p, tile, order, 1, weights)

    assert packing() is packing(length=7, batch=1, padding=2) is packing(offset=4)
    others = packing("wgmma"), packing(groups=2), packing(in_channels=128), packing(strides=(8, 512, 1))
    assert len({packing(), *others}) == 5
