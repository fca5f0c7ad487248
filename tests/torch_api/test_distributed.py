"""Data parallel training: two processes (gloo on the CPU, NCCL on two GPUs) have one process's gradients and, after
some optimizer steps, its parameters; the optimizer's state may be spread."""

import faulthandler
import os
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from numba_tconv import ConvTranspose1d

PROCESSES = 2
STEPS, RATE = 4, 1e-2
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two GPUs")


def decoder():
    torch.manual_seed(0)
    return nn.Sequential(
        ConvTranspose1d(8, 6, 8, stride=4, padding=2), nn.LeakyReLU(0.1), ConvTranspose1d(6, 2, 4, stride=2, padding=1)
    ).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2 * PROCESSES, channels, length, generator=generator, dtype=torch.float64)
            for channels, length in ((8, 10), (2, 80)))  # fmt: skip


def gradients_of(model, x, wanted):
    nn.functional.mse_loss(model(x), wanted).backward()
    return [parameter.grad for parameter in model.parameters()]


def replicated(model, device):
    return DistributedDataParallel(model)


def sharded(model, device):
    from torch.distributed.fsdp import fully_shard  # takes seconds

    mesh = dist.device_mesh.init_device_mesh(device, (PROCESSES,))
    for layer in model:
        if isinstance(layer, ConvTranspose1d):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPS = {"replicated": replicated, "sharded": sharded}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def adamw_shared_out(model):
    """Each process steps the parameters whose state it has, and sends them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE)


TRAININGS = {
    "DDP": (replicated, adamw),
    "DDP with ZeRO": (replicated, adamw_shared_out),
    "FSDP": (sharded, adamw),
}


def trained(model, optimizer, x, wanted):
    """The parameters after STEPS steps."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        gradients_of(model, x, wanted)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def whole(tensors):
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).cpu() for t in tensors]


def work(rank, device, folder):
    faulthandler.enable()  # a process that torch's threads abort prints its stack
    if device == "cuda":
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(BACKENDS[device], init_method=meeting, rank=rank, world_size=PROCESSES)
    try:
        x, wanted = (tensor.chunk(PROCESSES)[rank].to(device) for tensor in batch())
        for name, wrap in WRAPS.items():
            gradients = gradients_of(wrap(decoder().to(device), device), x, wanted)
            torch.save(whole(gradients), Path(folder) / f"{name}{rank}")
        for name, (wrap, optimizer) in TRAININGS.items():
            model = wrap(decoder().to(device), device)
            torch.save(whole(trained(model, optimizer(model), x, wanted)), Path(folder) / f"{name}{rank}")
    finally:
        dist.destroy_process_group()
    # At Python's own exit torch's threads sometimes abort the process.
    os._exit(0)


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=pytest.mark.thorough), pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])],
)
def of_processes(request):
    """Each process's results, by name and rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(request.param, folder), nprocs=PROCESSES)
        yield {
            key: torch.load(Path(folder) / f"{key[0]}{key[1]}") for key in product(WRAPS | TRAININGS, range(PROCESSES))
        }


def assert_same(of_processes, name, expected):
    for rank in range(PROCESSES):
        for ours, one in zip(of_processes[name, rank], expected, strict=True):
            torch.testing.assert_close(ours, one)


@pytest.mark.parametrize("name", WRAPS)
def test_two_processes_have_the_gradients_of_one(of_processes, name):
    assert_same(of_processes, name, gradients_of(decoder(), *batch()))


@pytest.mark.parametrize("name", TRAININGS)
def test_two_processes_train_as_one(of_processes, name):
    model = decoder()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    after = trained(model, adamw(model), *batch())
    assert not any(torch.allclose(*pair) for pair in zip(before, after, strict=True))
    assert_same(of_processes, name, after)
