"""The depthwise rung's problems for compute-sanitizer (sanitized.py)."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.depthwise import direct as depthwise_direct
from numba_tconv.kernels.depthwise import long_tile as depthwise_long_config
from numba_tconv.kernels.depthwise import tile as depthwise_config
from numba_tconv.selection.registry import RUNGS
from tests.parity import SMALL

from .common import ARITHMETIC, LARGE

_LIKE_LARGE = LARGE["depthwise, 512 groups"]
DEPTHWISE = {
    "depthwise": SMALL["depthwise"],
    "two outputs a channel": SMALL["depthwise, two outputs a channel"],
    "gaps between phases": SMALL["dilation = stride, every tap in one phase"],
    "stride 1, rows at 16 bytes": SMALL["stride 1, dilation"],
    "several passes of a warp": replace(_LIKE_LARGE, in_channels=24, out_channels=24, groups=24, length=250),
    "several passes of a whole block": replace(_LIKE_LARGE, in_channels=3, out_channels=3, groups=3, length=3001),
    "equal taps, two outputs a channel": Problem(2, 3, 6, 4, 61, stride=2, padding=1, groups=3, bias=True),
    "equal taps, many rows": Problem(40, 8, 8, 12, 304, stride=2, padding=3, groups=8),
    "equal taps, stride 1": Problem(1, 3, 3, 5, 333, padding=2, groups=3),
    "equal taps, a vector in a column": Problem(1, 3, 3, 32, 77, stride=16, padding=5, groups=3),
    "weights that stay in memory": replace(LARGE["PQMF: four input channels, long kernel"], length=400),
}
# The form's largest tile for long filters, and the one chosen for so few outputs.
LONG_FILTERS = {
    "four channels, rows at 16 bytes": replace(LARGE["PQMF: four input channels, long kernel"], length=4000),
    "rows anywhere, unequal taps": Problem(2, 6, 4, 37, 401, 3, padding=7, groups=2, bias=True),
    "stride 1, chunks of taps": Problem(1, 2, 2, 101, 3333, padding=50, groups=2),
    "phases without taps": Problem(1, 2, 2, 66, 603, 4, dilation=2, bias=True),
    "sums in parts": Problem(2, 8, 1, 264, 203, 4, padding=5, bias=True),
    "sums in parts, a channel each": Problem(2, 8, 4, 33, 403, 2, padding=20, dilation=3),
}

FLOAT_AND_HALF = (torch.float32, "ieee"), (torch.bfloat16, "bf16")


def depthwise_cases() -> Iterator[dict]:
    """Each case's own fields; call within ``as_if_large``."""
    yield from _of_few_taps()
    yield from _of_long_filters()


def _case(reason, problem, dtype, precision, layout="contiguous", offset=0, config=None):
    return locals()


def _shifted(reason, *case, config=None):
    return _case(f"{reason}, y past 16 bytes", *case, "misaligned", 1, config)


def _able(problem):
    return [pair for pair in ARITHMETIC if RUNGS["depthwise"].supports(problem, *pair) is None]


def _of_few_taps():
    for reason, problem in DEPTHWISE.items():
        halves = [(torch.bfloat16, "bf16")] if depthwise_direct.choose(problem, torch.bfloat16) else []
        for dtype, precision in [(torch.float32, "ieee"), *halves]:
            # Not the form for long filters.
            staged = depthwise_config.choose(problem, dtype)
            config = None if staged.keeps_weights else staged
            yield _case(reason, problem, dtype, precision, config=config)
            yield _shifted(reason, problem, dtype, precision, config=config)
    first = DEPTHWISE["depthwise"]
    for pair in _able(first):
        yield _case("transposed", first, *pair, "transposed")
    for dtype, precision in FLOAT_AND_HALF:
        for config in RUNGS["depthwise"].tiny_configs(first, dtype):
            yield _case("tiny tiles", first, dtype, precision, config=config)
    several = DEPTHWISE["equal taps, many rows"]
    for config in depthwise_direct.tiny(several, torch.bfloat16):
        yield _case("tiny tiles, several passes", several, torch.bfloat16, "bf16", config=config)


def _of_long_filters():
    for reason, problem in LONG_FILTERS.items():
        for dtype, precision in _able(problem):
            largest = depthwise_long_config.tiles(problem, dtype)[0]
            yield _case(reason, problem, dtype, precision)
            yield _shifted(reason, problem, dtype, precision, config=largest)
    several = LONG_FILTERS["rows anywhere, unequal taps"]
    for dtype, precision in FLOAT_AND_HALF:
        yield _case("transposed", several, dtype, precision, "transposed")
        for config in depthwise_long_config.tiny(several, dtype):
            yield _case("tiny tiles", several, dtype, precision, config=config)
