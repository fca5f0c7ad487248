"""Tensors sharded over several devices: two processes, by gloo, compute what one computes."""

import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from numba_tconv import ConvTranspose1d, conv_transpose1d, routed
from numba_tconv.torch_api import functional, sharding

PROCESSES = 2
DENSE = dict(stride=2, padding=1)
GROUPS = dict(DENSE, groups=2)
# Placements of input, weight and bias, the parameters, and the output's placement.
CASES = {
    "batch": ((0, "whole", "whole"), DENSE, 0),
    "output channels": (("whole", 1, 0), DENSE, 1),
    "input channels": ((1, 0, "whole"), DENSE, "terms"),
    "all of everything": (("whole", "whole", "whole"), DENSE, "whole"),
    "without a bias": ((1, 0, None), DENSE, "terms"),
    "terms of the input, with groups": (("terms", "whole", "terms"), GROUPS, "terms"),
    "terms of the weight, with groups": (("whole", "terms", "terms"), GROUPS, "terms"),
    "batch, with groups": ((0, "whole", "whole"), GROUPS, 0),
    "channels, with groups": ((1, 0, "whole"), GROUPS, None),  # gathered first
    "batch that does not divide": ((0, "whole", "whole"), dict(DENSE, padding=2), 0),
}
PADDINGS = "causal", (1, 2), (-2, -3)


def placement(how):
    """A placement of CASES: the dimension that is shared out, "whole" or "terms" of a sum."""
    from torch.distributed.tensor import Partial, Replicate, Shard  # takes seconds

    return {"whole": Replicate, "terms": Partial}[how]() if isinstance(how, str) else Shard(how)


def distributed(tensor, mesh, how):
    from torch.distributed.tensor import DTensor, distribute_tensor

    if how == "terms":
        return DTensor.from_local(tensor * (0.25, 0.75)[mesh.get_local_rank()], mesh, [placement(how)])
    return distribute_tensor(tensor, mesh, [placement(how)])


def operands(name):
    generator = torch.Generator().manual_seed(0)
    groups = CASES[name][1].get("groups", 1)
    batch = 5 if "divide" in name else 4
    sizes = (batch, 6, 7), (6, 8 // groups, 4), (8,)
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [None if place is None else tensor for tensor, place in zip(tensors, CASES[name][0], strict=True)]


def outcome(function, tensors, parameters):
    """The output, and the gradients of the given tensors."""
    tensors = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    y = function(*tensors, **parameters)
    y.square().sum().backward()
    return [y, *(tensor.grad for tensor in tensors if tensor is not None)]


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        ConvTranspose1d(6, 8, 4, stride=2, padding=1), nn.LeakyReLU(0.1), ConvTranspose1d(8, 2, 3)
    ).double()


def tensor_parallel(model, mesh):
    """Shard the first layer's output channels, and so the second layer's input channels."""
    from torch.distributed.tensor import distribute_module

    places = {"0": dict(weight=1, bias=0), "2": dict(weight=0, bias="whole")}

    def place(name, module, mesh):
        for key, one in places.get(name, {}).items():
            setattr(module, key, nn.Parameter(distributed(getattr(module, key).detach(), mesh, one)))

    return distribute_module(model, mesh, place)


def trained(model, x):
    model(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def whole(tensors):
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in tensors]


def work(rank, folder):
    functional._ours = lambda *_: True  # tensors count as a GPU's: the operators compute
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
        found = {}
        for name, (places, parameters, _) in CASES.items():
            tensors = [
                tensor if place is None else distributed(tensor, mesh, place)
                for tensor, place in zip(operands(name), places, strict=True)
            ]
            results = outcome(conv_transpose1d, tensors, parameters)
            with routed():
                again = outcome(nn.functional.conv_transpose1d, tensors, parameters)
            found[name] = results[0].placements, whole(results), whole(again)
        for padding in PADDINGS:
            for name in ("batch", "output channels"):
                places = CASES[name][0]
                tensors = [distributed(*one) for one in zip(operands(name), [mesh] * 3, places, strict=True)]
                found[padding, name] = whole(outcome(conv_transpose1d, tensors, dict(stride=2, padding=padding)))
        x = distributed(operands("batch")[0], mesh, "whole").requires_grad_()
        found["model"] = whole(trained(tensor_parallel(model(), mesh), x))
        torch.save(found, Path(folder) / str(rank))
    finally:
        dist.destroy_process_group()
    os._exit(0)  # at Python's own exit torch's threads sometimes abort the process


@pytest.fixture(scope="module")
def found():
    """Each process's results."""
    import torch.distributed.tensor  # takes seconds, which a fork has not to wait again

    with tempfile.TemporaryDirectory() as folder:
        # A fork has imported everything; with a GPU, autograd has threads, which a fork has not.
        method = "spawn" if torch.cuda.is_available() else "fork"
        torch.multiprocessing.start_processes(work, args=(folder,), nprocs=PROCESSES, start_method=method)
        yield [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(PROCESSES)]


def test_the_rules_wait_for_distributed_tensors(monkeypatch):
    registered = []
    monkeypatch.setattr(sharding, "register", lambda: registered.append(True))
    monkeypatch.delitem(sys.modules, sharding.MODULE, raising=False)
    sharding.prepare()
    assert not registered
    monkeypatch.setitem(sys.modules, sharding.MODULE, object())
    sharding.prepare()
    assert registered


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(found, name):
    _, parameters, placed = CASES[name]
    expected = outcome(torch.conv_transpose1d, operands(name), parameters)
    for placements, results, again in (process[name] for process in found):
        assert placed is None or placements == (placement(placed),)
        for some in (results, again):
            torch.testing.assert_close(some, expected)


@pytest.mark.parametrize("name", ["batch", "output channels"])
@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_pairs_and_words_of_two_processes(found, padding, name):
    expected = outcome(conv_transpose1d, operands(name), dict(stride=2, padding=padding))
    for process in found:
        torch.testing.assert_close(process[padding, name], expected)


def test_a_tensor_parallel_model_has_the_gradients_of_one_process(found):
    expected = trained(model(), operands("batch")[0].requires_grad_())
    for process in found:
        torch.testing.assert_close(process["model"], expected)


@pytest.mark.parametrize("channels", [(4, 7), (7, 4), (4, 4)], ids=str)
@pytest.mark.parametrize("places", [("whole", 1, 0), (1, 0, "whole")], ids=str)
def test_a_process_without_a_share_of_the_channels_computes_all(monkeypatch, channels, places):
    """Three processes share four channels by two, two and none; collectives do nothing here."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(functional, "_ours", lambda *_: True)
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        mesh, (inputs, outputs) = dist.device_mesh.init_device_mesh("cpu", (3,)), channels
        tensors = torch.randn(2, inputs, 5), torch.randn(inputs, outputs, 4), torch.randn(outputs)
        shared = [distributed(tensor, mesh, place) for tensor, place in zip(tensors, places, strict=True)]
        assert [one.shape for one in outcome(conv_transpose1d, shared, DENSE)[1:]] == [one.shape for one in tensors]
    finally:
        dist.destroy_process_group()
