"""Weights are packed in every call, those of FrozenWeights once for each order; CUDA's part is made up."""

import contextlib
import copy
import ctypes
import gc
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import packed_weights as module
from numba_tconv.kernels.common.packed_weights import FrozenWeights, Packing, after_packing, packed_weights
from numba_tconv.kernels.common.tensor_core import pack as tensor_pack
from numba_tconv.kernels.k6_wgmma.tile import configs
from numba_tconv.runtime.layout import NO_GPU, Layout

SHAPE = (4, 3, 2)
CALLS = 5


class Copying(Packing):
    """Packs in the weights' order, and counts."""

    def __init__(self, index=NO_GPU, dtype=torch.float32):
        self.weights = Layout.contiguous(SHAPE, dtype, index)
        self.size, self.packings = math.prod(SHAPE), 0
        self.room = lambda: torch.empty(self.size, dtype=dtype)  # on the CPU, whatever the index

    def launch(self, w, packed):
        self.packings += 1
        packed.copy_(w.flatten())


def weights():
    return torch.randn(SHAPE)


def packed(w, packing):
    return packed_weights(w, packing)[0]


def assert_packed(w, packing):
    assert torch.equal(packed(w, packing), w.detach().flatten())


# --- weights that may change ------------------------------------------------------------------------------------------


def in_place(w):
    w.mul_(2)


def data(w):
    w.data.mul_(2)


def copied_data(w):
    w.data.copy_(weights())


def one_row(w):
    w.data[1] = weights()[1]


def foreach(w):
    torch._foreach_lerp_([w.data], [weights()], 0.5)


def by_numpy(w):
    w.numpy()[...] = weights().numpy()


def by_dlpack(w):
    torch.from_dlpack(w).copy_(weights())


def by_foreign_memory(w):
    new = weights()
    ctypes.memmove(w.data_ptr(), new.data_ptr(), new.nbytes)


def fused_optimizer(w):
    parameter = torch.nn.Parameter(w)
    parameter.grad = weights()
    torch.optim.AdamW([parameter], lr=0.1, fused=True).step()


UNCOUNTED = (data, copied_data, one_row, foreach, by_numpy, by_dlpack, by_foreign_memory, fused_optimizer)


@pytest.mark.parametrize("write", [in_place, *UNCOUNTED], ids=lambda write: write.__name__)
def test_every_call_packs_the_weights_of_now(write):
    w, packing = weights(), Copying()
    for _ in range(3):
        before, version = w.clone(), w._version
        for _ in range(CALLS):
            assert_packed(w, packing)
        write(w)
        assert not torch.equal(w, before)
        assert (w._version == version) == (write in UNCOUNTED)
        assert_packed(w, packing)
    assert packing.packings == 3 * (CALLS + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_every_call_packs_in_every_dtype_and_mode(dtype, mode):
    packing = Copying(dtype=dtype)
    with mode():
        w = weights().to(dtype)
        for _ in range(CALLS):
            w.data.add_(1)
            assert_packed(w, packing)
    assert packing.packings == CALLS


def test_a_parameter_is_packed_in_every_call():
    w, packing = torch.nn.Parameter(weights()), Copying()
    for _ in range(CALLS):
        w.data.add_(1)
        assert_packed(w, packing)
    assert packing.packings == CALLS


def test_other_weights_on_the_same_memory():
    """Memory that an allocator hands out again: the same address, and as many counted writes."""
    memory, packing = weights().numpy(), Copying()
    for number in range(CALLS):
        w = torch.from_numpy(memory)
        for _ in range(2):
            assert_packed(w, packing)
        del w
        memory[...] = number
    assert packing.packings == 2 * CALLS


def test_calls_share_no_memory():
    w, packing = weights(), Copying()
    first, second = packed(w, packing), packed(w, packing)
    first.zero_()
    assert torch.equal(second, w.flatten())


def test_nothing_is_kept_of_weights():
    w, packing = weights(), Copying()
    references = [weakref.ref(packed(w, packing)) for _ in range(CALLS)]
    assert [one() for one in references] == [None] * CALLS
    gone = weakref.ref(w)
    del w
    assert gone() is None


def test_packings_that_are_equal_are_one_whatever_the_length_and_batch():
    problem = Problem(2, 64, 64, 8, 100, stride=4)
    tile = configs(problem, "tf32")[0].tile

    def packing(order="mma", strides=None, offset=0, **changes):
        p = replace(problem, **changes)
        weights = Layout.contiguous(p.weight_shape, torch.float32, 0)
        weights = weights._replace(strides=strides or weights.strides, offset=offset)
        return tensor_pack.packing_of(p, tile, order, 1, weights)

    assert packing() is packing(length=7, batch=1, padding=2) is packing(offset=4)
    others = packing("wgmma"), packing(groups=2), packing(in_channels=128), packing(strides=(8, 512, 1))
    assert len({packing(), *others}) == 5


# --- frozen weights ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's answers, and what was asked."""
    cuda = SimpleNamespace(capturing=False, stream=1, events=[], waited=[], recorded=[])

    def event(*arguments, **choice):
        cuda.events.append(MagicMock())
        return cuda.events[-1]

    def current_stream(device=None):
        return SimpleNamespace(cuda_stream=cuda.stream, wait_event=cuda.waited.append)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: cuda.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(module, "capture_ignored", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: cuda.recorded.append(stream.cuda_stream))
    return cuda


def test_frozen_weights_are_packed_once_for_each_order():
    """Without a GPU, as in the simulator."""
    frozen, orders = FrozenWeights(weights()), [Copying() for _ in range(3)]
    assert frozen.packed_bytes == 0
    first = [packed(frozen.tensor, packing) for packing in orders]
    assert all(torch.equal(one, frozen.tensor.flatten()) for one in first)
    for _ in range(CALLS):
        for packing, before in zip(orders, first, strict=True):
            assert packed(frozen.tensor, packing) is before
    assert [packing.packings for packing in orders] == [1, 1, 1]
    assert frozen.packed_bytes == 3 * frozen.tensor.nbytes


def test_frozen_weights_are_packed_once_on_a_gpu(cuda):
    frozen, packing = FrozenWeights(weights()), Copying(index=0)
    found = [packed(frozen.tensor, packing) for _ in range(CALLS)]
    assert packing.packings == 1
    assert all(one is found[0] for one in found)
    assert cuda.waited == cuda.recorded == [], "on the stream that packed, the order of work is enough"


OTHERS = {
    "the tensor that was frozen": lambda frozen, w: w,
    "an alias": lambda frozen, w: frozen.tensor.detach(),
    "a view": lambda frozen, w: frozen.tensor.view(SHAPE),
    "a clone": lambda frozen, w: frozen.tensor.clone(),
    "a cast": lambda frozen, w: frozen.tensor.double(),
    "a parameter": lambda frozen, w: torch.nn.Parameter(frozen.tensor),
    "data": lambda frozen, w: frozen.tensor.data,
    "a shallow copy": lambda frozen, w: copy.copy(w),
    "a product": lambda frozen, w: frozen.tensor * 1,
}


@pytest.mark.parametrize("of", OTHERS.values(), ids=OTHERS)
def test_other_tensors_are_packed_in_the_call(of):
    w = weights()
    frozen = FrozenWeights(w)
    kept, packing = Copying(), Copying(dtype=of(frozen, w).dtype)
    packed(frozen.tensor, kept)
    for number in range(1, CALLS):
        other = of(frozen, w)
        assert_packed(other, packing)
        other.data.add_(1)
        assert_packed(other, packing)
        assert packing.packings == 2 * number
    assert frozen.packed_bytes == frozen.tensor.nbytes
    packed(frozen.tensor, kept)
    assert kept.packings == 1


def test_two_frozen_weights_of_one_tensor_are_packed_apart():
    w, packing = weights(), Copying()
    one, other = FrozenWeights(w), FrozenWeights(w)
    packed(one.tensor, packing)
    w.mul_(2)
    assert torch.equal(packed(other.tensor, packing), w.flatten())
    assert torch.equal(2 * packed(one.tensor, packing), w.flatten()), "a write is not seen"
    assert packing.packings == 2


def test_another_stream_waits_for_the_packing_and_keeps_its_memory(cuda):
    frozen, packing = FrozenWeights(weights()), Copying(index=0)
    first = packed(frozen.tensor, packing)
    assert len(cuda.events) == 1
    cuda.events[0].record.assert_called_once()
    cuda.stream = 2
    assert packed(frozen.tensor, packing) is first
    assert cuda.waited == cuda.events
    assert cuda.recorded == [2]
    cuda.stream = 1
    assert packed(frozen.tensor, packing) is first
    assert (len(cuda.waited), packing.packings) == (1, 1)


def test_what_a_capture_packs_is_not_kept(cuda):
    """Every replay packs into the graph's memory; no event of a capture is waited for outside."""
    frozen, packing = FrozenWeights(weights()), Copying(index=0)
    cuda.capturing = True
    captured = [packed(frozen.tensor, packing) for _ in range(3)]
    assert all(torch.equal(one, frozen.tensor.flatten()) for one in captured)
    assert (packing.packings, frozen.packed_bytes, cuda.events) == (3, 0, [])
    cuda.capturing = False
    kept = [packed(frozen.tensor, packing) for _ in range(3)]
    assert packing.packings == 4
    assert all(one is kept[0] for one in kept)
    assert not any(one is kept[0] for one in captured)


@pytest.mark.parametrize("there", [True, False], ids=["done", "under way"])
def test_a_capture_takes_what_was_packed_before_and_waits_for_nothing(cuda, there):
    """A graph cannot wait for outside events: it packs what is not done."""
    frozen, packing = FrozenWeights(weights()), Copying(index=0)
    kept = packed(frozen.tensor, packing)
    cuda.events[0].query.return_value = there
    cuda.capturing, cuda.stream = True, 2
    captured = [packed(frozen.tensor, packing) for _ in range(2)]
    assert [one is kept for one in captured] == [there, there]
    assert all(torch.equal(one, kept) for one in captured)
    assert packing.packings == (1 if there else 3)
    cuda.capturing = False
    assert packed(frozen.tensor, packing) is kept
    assert len(cuda.waited) == 1, "outside of the capture another stream waits"


def test_tensors_that_are_not_frozen_are_packed_in_a_capture_too(cuda):
    w, packing = weights(), Copying(index=0)
    for number, cuda.capturing in enumerate((False, True, True, False), 1):
        w.data.add_(1)
        assert_packed(w, packing)
        assert packing.packings == number


def test_threads_that_come_first_together_pack_once():
    frozen, together = FrozenWeights(weights()), threading.Barrier(4)

    class Slow(Copying):
        def launch(self, w, packed):
            threading.Event().wait(0.05)
            super().launch(w, packed)

    packing = Slow()

    def call(_):
        together.wait(10)
        return packed(frozen.tensor, packing)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(4)))
    assert packing.packings == 1
    assert all(one is found[0] for one in found)
    assert torch.equal(found[0], frozen.tensor.flatten())


def test_packed_weights_go_with_the_frozen_weights():
    frozen, packing = FrozenWeights(weights()), Copying()
    kept = weakref.ref(packed(frozen.tensor, packing))
    assert kept() is not None
    del frozen
    gc.collect()
    assert kept() is None


# The launch that follows

X, BIAS, Y = torch.zeros(1), torch.zeros(1), torch.zeros(1)


def launches(packed):
    """A packing that gives ``packed``, a launch, and what was done, in order."""
    done = []

    def launch(*given):
        done.append(("early", *given))

    launch.ordinary = lambda *given: done.append(("ordinary", *given))

    packing = SimpleNamespace(room=lambda: packed, launch=lambda *given: done.append(("packed", *given)))
    return packing, launch, done


def test_the_launch_after_a_packing_is_early():
    w, packed = torch.zeros(2), torch.zeros(3)
    packing, launch, done = launches(packed)
    after_packing(packing, launch)(X, w, BIAS, Y)
    (packing_name, *given), (how, *operands) = done
    assert (packing_name, how) == ("packed", "early")
    assert all(a is b for a, b in zip(given, (w, packed), strict=True))
    assert all(a is b for a, b in zip(operands, (X, packed, BIAS, Y), strict=True))


def test_the_launch_with_frozen_weights_is_not_early():
    """The work before it on the stream may write x."""
    w, kept = torch.zeros(2), torch.zeros(3)
    packing, launch, done = launches(None)
    w.packings = SimpleNamespace(packed=lambda of, asked: kept if of is w and asked is packing else None)
    after_packing(packing, launch)(X, w, BIAS, Y)
    ((how, *operands),) = done
    assert how == "ordinary"
    assert all(a is b for a, b in zip(operands, (X, kept, BIAS, Y), strict=True))
