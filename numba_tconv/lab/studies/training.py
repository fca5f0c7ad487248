"""A small decoder trained on synthetic waveforms, by torch's layers and ours in turns."""

import contextlib
import math
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from numba_tconv.lab.cli import commands
from numba_tconv.lab.measure import ahead, bench, machine, rows
from numba_tconv.runtime.device import current_device
from numba_tconv.runtime.progress import progress
from numba_tconv.selection.directions import STEP
from numba_tconv.torch_api import compile_ahead
from numba_tconv.torch_api.module import ConvTranspose1d
from numba_tconv.torch_api.noted import computations

SAMPLE_RATE = 16_000  # Hz
HARMONICS = 5
FRAME, COEFFICIENTS = 64, 16  # samples of a frame, coefficients kept
STRIDES = (4, 4, 4)  # product: FRAME
LAYERS = {"torch": nn.ConvTranspose1d, "numba_tconv": ConvTranspose1d}
ARITHMETICS = ("ieee", "tf32", "bf16")
LEARNING_RATE = 2e-3
RECORDED_EVERY = 5  # steps


@dataclass(frozen=True)
class Sizes:
    """``samples`` are whole frames; ``widths``: channels between layers."""

    batch: int = 32
    samples: int = 32_768
    widths: tuple[int, int] = (512, 256)


@dataclass(frozen=True)
class Step(machine.Measured):
    """The loss as a share of the waveforms' power, and median ms of steps since the last row."""

    layers: str
    arithmetic: str
    step: int
    loss: float
    ms: float


def waveforms(count: int, samples: int, generator: torch.Generator) -> torch.Tensor:
    """(count, 1, samples) in [-1, 1]: harmonics of 80 to 400 Hz, a chirp below 2 kHz."""

    def uniform(low, high, channels=1):
        random = torch.rand((count, channels, 1), generator=generator, device=generator.device)
        return low + (high - low) * random

    seconds = torch.arange(samples, device=generator.device) / SAMPLE_RATE
    number = torch.arange(1, HARMONICS + 1, device=generator.device)[:, None]
    harmonics = torch.sin(2 * math.pi * (uniform(80, 400) * number * seconds + uniform(0, 1, HARMONICS)))
    first, last = uniform(100, 2000), uniform(100, 2000)
    chirp = torch.sin(2 * math.pi * (first + (last - first) * seconds / (2 * seconds[-1])) * seconds)
    waves = (harmonics * uniform(0, 1, HARMONICS) / number).sum(1, keepdim=True) + uniform(0, 0.5) * chirp
    return waves / waves.abs().amax(-1, keepdim=True)


def representation(waves: torch.Tensor) -> torch.Tensor:
    """(count, COEFFICIENTS, samples/FRAME): each frame's first DCT-II coefficients."""
    k, n = torch.arange(COEFFICIENTS, device=waves.device), torch.arange(FRAME, device=waves.device)
    basis = torch.cos(math.pi / FRAME * (n + 0.5) * k[:, None]) * math.sqrt(2 / FRAME)
    return basis @ waves.unflatten(-1, (-1, FRAME)).squeeze(1).transpose(1, 2)


class Snake(nn.Module):
    """x + sin(a*x)^2 / a, with a learned ``a`` a channel."""

    def __init__(self, channels: int):
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.frequency * x).square() / self.frequency


def decoder(layer: type[nn.ConvTranspose1d], widths: tuple[int, int]) -> nn.Sequential:
    """(N, COEFFICIENTS, L) to (N, 1, FRAME*L)."""
    channels, modules = (COEFFICIENTS, *widths, 1), []
    for (before, after), stride in zip(pairwise(channels), STRIDES, strict=True):
        modules += [weight_norm(layer(before, after, 2 * stride, stride, stride // 2)), Snake(after)]
    return nn.Sequential(*modules[:-1])


def train(arithmetic: str, steps: int, sizes: Sizes, device: str, seed: int = 0) -> list[Step]:
    """Train each kind of layer from ``seed``; rows for every RECORDED_EVERY steps and the last."""
    where, runs = machine.measured(), {}
    for name, layer in LAYERS.items():
        torch.manual_seed(seed)
        runs[name] = _Run(decoder(layer, sizes.widths).to(device), device, arithmetic)
    generator, recorded = torch.Generator(device).manual_seed(seed), []
    with bench.torch_switches(tf32=arithmetic == "tf32"):
        for step in range(1, steps + 1):
            waves = waveforms(sizes.batch, sizes.samples, generator)
            inputs = representation(waves)
            for run in runs.values():
                run.step(inputs, waves)
            if step % RECORDED_EVERY == 0 or step == steps:
                for name, run in runs.items():
                    made = dict(layers=name, arithmetic=arithmetic, step=step, loss=run.loss.item(), ms=run.median_ms())
                    recorded.append(Step(**where, **made))
    return recorded


def calls_ahead(sizes: Sizes) -> list:
    """Calls of training steps in all arithmetics."""
    model, found = decoder(ConvTranspose1d, sizes.widths), []
    inputs = torch.empty(sizes.batch, COEFFICIENTS, sizes.samples // FRAME)
    for arithmetic in ARITHMETICS:
        with bench.torch_switches(tf32=arithmetic == "tf32"), _autocast("cpu", arithmetic):
            found += compile_ahead.calls_of(computations(model, inputs), current_device(), STEP)
    return found


def _autocast(device: str, arithmetic: str):
    return torch.autocast(device, torch.bfloat16) if arithmetic == "bf16" else contextlib.nullcontext()


class _Run:
    def __init__(self, model: nn.Module, device: str, arithmetic: str):
        self.model, self.device, self.autocast = model, device, _autocast(device, arithmetic)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.loss, self.times = torch.zeros(()), []

    def step(self, inputs: torch.Tensor, waves: torch.Tensor) -> None:
        began = self._now()
        self.optimizer.zero_grad()
        with self.autocast:
            rebuilt = self.model(inputs)
        self.loss = (rebuilt.float() - waves).square().mean() / waves.square().mean()
        self.loss.backward()
        self.optimizer.step()
        self.times.append((began, self._now()))

    def median_ms(self) -> float:
        """Median ms of the steps since the last call."""
        times, self.times = self.times, []
        if self.device != "cuda":
            return 1e3 * statistics.median(ended - began for began, ended in times)
        torch.cuda.synchronize()
        return statistics.median(began.elapsed_time(ended) for began, ended in times)

    def _now(self):
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def run_train(arguments) -> int:
    commands.require_gpu()
    rows.check_writable(arguments.out, Step)
    ahead.compile_all(calls_ahead(Sizes()))
    recorded = []
    for arithmetic in progress(ARITHMETICS, f"train, {arguments.steps} steps in each arithmetic"):
        recorded += train(arithmetic, arguments.steps, Sizes(), "cuda")
        for row in recorded[-len(LAYERS) :]:
            print(f"{row.arithmetic} {row.layers}: loss {row.loss:.4g} after {row.step} steps of {row.ms:.3g} ms")
    rows.replace(arguments.out, recorded, Step)
    print(f"rows written to {arguments.out}")
    return 0
