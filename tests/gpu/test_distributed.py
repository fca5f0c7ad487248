"""Weights that collectives write: sharded and replicated training beside torch's layer in one process.

Each pass gathers a sharded layer's whole weight into memory whose writes torch does not count.
"""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from numba_tconv.selection.directions import FORWARD

from .weights_now import PROBLEM, arithmetics, assert_close, assert_results, fresh, layer, losses, precision_of

pytestmark = pytest.mark.gpu
PROCESSES = 2
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two GPUs")
RATE = 1e-2


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def zero(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import, as below

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE, fused=True)


def sharded(module):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, reshard_after_forward=True)


def sharded_and_kept(module):
    """The whole weight stays from the forward to the backward pass."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, reshard_after_forward=False)


def sharded_and_cast(module):
    """float32 parameters, gathered in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(module.float(), mp_policy=policy)


def replicated(module):
    return DistributedDataParallel(module)


# How parameters are spread, the optimizer, and the arithmetics.
WAYS = {
    "FSDP2": (sharded, adamw, ("ieee", "tf32", "bf16")),
    "FSDP2, whole weights kept": (sharded_and_kept, adamw, ("ieee", "tf32", "bf16")),
    "FSDP2, mixed precision": (sharded_and_cast, adamw, ("bf16",)),
    "DDP": (replicated, adamw, ("ieee", "tf32", "bf16")),
    "DDP, ZeRO": (replicated, zero, ("ieee", "tf32", "bf16")),
}
CASES = [(way, arithmetic) for way, (_, _, some) in WAYS.items() for arithmetic in some]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def training_losses(way, arithmetic, part=slice(None)):
    """A training loop's losses; afterwards the layer must compute with its present weights."""
    spread, optimizer_of, _ = WAYS[way]
    torch.manual_seed(0)
    model = spread(layer(arithmetic))
    optimizer = optimizer_of(model)
    dtype = torch.bfloat16 if arithmetic == "bf16" else torch.float32
    with precision_of(arithmetic):
        found = losses(model, optimizer, dtype, part)
    x = fresh(dtype).detach()
    with torch.no_grad():
        y = model(x)
        parameters = [whole(parameter).to(dtype) for parameter in model.parameters()]
    assert_results({FORWARD: y}, x, parameters, arithmetic)
    return found


def cast(module, dtype):
    def call(x):
        return torch.func.functional_call(module, {name: p.to(dtype) for name, p in module.named_parameters()}, x)

    return call


def torchs_losses(way, arithmetic):
    torch.manual_seed(0)
    model = layer(arithmetic, nn.ConvTranspose1d)
    dtype = model.weight.dtype
    if WAYS[way][0] is sharded_and_cast:
        model.float()
    with precision_of(arithmetic):
        return losses(cast(model, dtype), adamw(model), dtype)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("way", "arithmetic"), CASES, ids=[", ".join(case) for case in CASES])
def test_one_process_trains_as_torchs_layer(one_process, way, arithmetic):
    assert_close(training_losses(way, arithmetic), torchs_losses(way, arithmetic), arithmetic)


@arithmetics
def test_a_sharded_layer_whose_shards_are_written(one_process, arithmetic):
    """An averaged model writes shards, which each call gathers anew."""
    module = sharded(layer(arithmetic))
    for _ in range(6):
        x = fresh(module.weight.dtype).detach()
        with torch.no_grad():
            y = module(x)
            assert_results({FORWARD: y}, x, [whole(p) for p in module.parameters()], arithmetic)
            for parameter in module.parameters():
                shard = parameter.to_local()
                shard.data.copy_(0.1 * torch.randn_like(shard))


@arithmetics
def test_weights_that_a_collective_writes(one_process, arithmetic):
    module = layer(arithmetic)
    for _ in range(3):
        for _ in range(5):
            x = fresh(module.weight.dtype).detach()
            with torch.no_grad():
                assert_results({FORWARD: module(x)}, x, list(module.parameters()), arithmetic)
        for parameter in module.parameters():
            dist.all_gather_into_tensor(parameter.data, 0.1 * torch.randn_like(parameter))


def work(rank, folder):
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/meeting", PROCESSES)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=PROCESSES)
    each = PROBLEM.batch // PROCESSES
    for way, arithmetic in CASES:
        found = training_losses(way, arithmetic, slice(rank * each, (rank + 1) * each))
        torch.save(found, Path(folder) / f"{way} {arithmetic} {rank}")
    dist.destroy_process_group()
    os._exit(0)  # at Python's own exit torch's threads sometimes abort the process


@two_gpus
def test_two_processes_train_as_torchs_layer_in_one():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(folder,), nprocs=PROCESSES)
        for way, arithmetic in CASES:
            both = [torch.load(Path(folder) / f"{way} {arithmetic} {rank}") for rank in range(PROCESSES)]
            mean = [sum(pair) / PROCESSES for pair in zip(*both, strict=True)]
            assert_close(mean, torchs_losses(way, arithmetic), arithmetic)
