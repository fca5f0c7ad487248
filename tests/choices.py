"""The configurations of drawn problems, of every rung that takes them and of steps, as digests: part of tests.plans."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import depthwise, mma_tile, tile
from numba_tconv.runtime.device import A100, GPUS, H200
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

COUNT = 48
SELDOM = "grad_input_planes", "grad_weight_split"  # look at many tiles
PLAIN = "k1_gather", "k2_polyphase", "k3_shared_tile", "grad_input_gather", "grad_bias"  # nothing to choose


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def up_to(draw: random.Random, most: int) -> int:
    """As many of every magnitude."""
    return int((most + 1) ** draw.random())


def drawn(draw: random.Random) -> Problem:
    groups = draw.choice((1, 1, 1, 2, 3, 8, 64))
    even = draw.choice((1, 8, 8, 16))  # tensor cores' groups of channels
    channels = [even * up_to(draw, 1024 // (even * groups) or 1) * groups for _ in range(2)]
    if draw.random() < 0.2:  # depthwise
        groups, channels = 96, [96 * up_to(draw, 3) for _ in range(2)]
    stride, dilation = draw.choice((1, 2, 3, 4, 5, 7, 8, 10, 32, 129)), draw.choice((1, 1, 1, 2, 3, 5))
    kernel_size = draw.choice((stride, 2 * stride, 2 * stride + 1, up_to(draw, 64)))
    sizes = up_to(draw, 64), *channels, kernel_size, up_to(draw, 20_000), stride
    return Problem(*sizes, padding=draw.choice((0, kernel_size // 2)), groups=groups, dilation=dilation)


def chosen(draw: random.Random, p: Problem) -> Iterator[tuple[str, object]]:
    for name, rung in {**RUNGS, **GRADIENTS}.items():
        if name in PLAIN or (name in SELDOM and draw.random() > 0.15):
            continue
        gpu = draw.choice((H200, H200, A100))
        every = [(dtype, precision) for dtype, known in PRECISIONS.items() for precision in known]
        able = [one for one in every if rung.refusal(p, *one, gpu) is None]
        if able:
            dtype, precision = draw.choice(able)
            yield f"{name} {precision}", rung.config_on(gpu, p, dtype, precision)
    dtype, step = draw.choice([*PRECISIONS]), replace(p, length=up_to(draw, 8), padding=0)
    if depthwise.refusal(step) is None:
        yield "channels", depthwise.choose(step, dtype)
    if tile.refusal(step, dtype) is None:
        yield "columns", tile.choose(step, dtype)
    of_half, shared = draw.choice([(torch.bfloat16, "bf16"), (torch.float32, "tf32")]), H200.shared_per_block
    if mma_tile.refusal(step, *of_half, shared) is None:
        yield "products", mma_tile.choose(step, of_half[0], shared)


def everything() -> dict[str, dict]:
    found = {}
    for number in range(COUNT):
        draw = random.Random(f"choices {number}")
        p = drawn(draw)
        found[str(p)] = ", ".join(f"{name} {digest(str(config))}" for name, config in chosen(draw, p))
    return {"choices": found, "GPUs": {name: str(gpu) for name, gpu in GPUS.items()}}
