"""Data parallel training: two processes (on the CPU by gloo, on two GPUs by NCCL) have the gradients of one."""

import faulthandler
import os
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from numba_tconv import ConvTranspose1d

PROCESSES = 2
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
    mesh = dist.device_mesh.init_device_mesh(device, (PROCESSES,))
    for layer in model:
        if isinstance(layer, ConvTranspose1d):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPS = {"replicated": replicated, "sharded": sharded}


def work(rank, device, folder):
    faulthandler.enable()  # a process that torch's threads abort says where
    if device == "cuda":
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(BACKENDS[device], init_method=meeting, rank=rank, world_size=PROCESSES)
    try:
        x, wanted = (tensor.chunk(PROCESSES)[rank].to(device) for tensor in batch())
        for name, wrap in WRAPS.items():
            gradients = gradients_of(wrap(decoder().to(device), device), x, wanted)
            whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
            torch.save([gradient.cpu() for gradient in whole], Path(folder) / f"{name}{rank}")
    finally:
        dist.destroy_process_group()
    # Without Python's own end, in which, all of this done, threads of torch's abort the process every now and then.
    os._exit(0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def test_two_processes_have_the_gradients_of_one(device):
    alone = gradients_of(decoder(), *batch())
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(device, folder), nprocs=PROCESSES)
        for name, rank in product(WRAPS, range(PROCESSES)):
            for ours, expected in zip(torch.load(Path(folder) / f"{name}{rank}"), alone, strict=True):
                torch.testing.assert_close(ours, expected)
