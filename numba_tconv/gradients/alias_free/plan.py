"""Launches of the gradients."""

from collections.abc import Callable
from functools import lru_cache

import torch

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.gradients.sum import accumulator_of
from numba_tconv.kernels.alias_free.plan import MOST_BLOCKS, MOST_LENGTH
from numba_tconv.kernels.common.arguments import Signal
from numba_tconv.kernels.rung import Step
from numba_tconv.runtime.kernel import Prepared, alike

from . import parameters
from .arguments import Sizes
from .kernel import make_kernel
from .tile import Config, choose, tiles_of

LEAST_OUTPUTS = 64  # of a tile


def refusal(sizes: AliasFree) -> str | None:
    """Why no launch computes the gradients."""
    if sizes.length > MOST_LENGTH:
        return f"they take rows of up to {MOST_LENGTH} samples"
    if sizes.rows * (sizes.length // LEAST_OUTPUTS + 2) > MOST_BLOCKS:
        return f"they take up to {MOST_BLOCKS} tiles"
    return None


def steps(
    sizes: AliasFree, dtype: torch.dtype, activation: str, log_scale: bool, parameters_too: bool, tied: bool
) -> list[Step]:
    main = Step("main", make_kernel(choose(sizes, dtype, activation, log_scale, parameters_too)))
    return [main, Step("add up", parameters.make_kernel(dtype, log_scale, tied))] if parameters_too else [main]


def partials_of(sizes: AliasFree, config: Config) -> int:
    """Partial sums of alpha and beta, for each channel, sample and block of a row."""
    return 2 * sizes.rows * tiles_of(sizes, config)[1] if config.parameters else 1


@lru_cache(maxsize=1024)
def prepare(sizes: AliasFree, strides: tuple, grad_strides: tuple, config: Config) -> Callable[..., None]:
    """A launch of (x, dy, up_filter, down_filter, alpha, beta, dx, partials).

    x and dy (N, C, L) have ``strides`` and ``grad_strides``; filters, alpha and beta are contiguous (for none any
    tensor of the dtype); dx is contiguous and 32-byte aligned; partials are accumulators."""
    passes, blocks = tiles_of(sizes, config)
    dtype, batch, channels = config.dtype, sizes.batch, sizes.channels
    return make_kernel(config).prepare(
        sizes.rows * blocks,
        Signal(alike((batch, channels, sizes.length), dtype, strides), *strides),
        Signal(alike((batch, channels, sizes.out_length), dtype, grad_strides), *grad_strides),
        *(alike((count,), dtype) for count in (sizes.up_taps, sizes.down_taps, channels, channels)),
        alike((sizes.rows * sizes.length,), dtype),
        alike((partials_of(sizes, config),), accumulator_of(dtype)),
        Sizes(sizes.length, sizes.out_length, channels, passes, blocks, batch * blocks),
    )


@lru_cache(maxsize=1024)
def prepare_parameters(sizes: AliasFree, config: Config, tied: bool) -> Prepared:
    """A launch of (partials, alpha, beta, grad_alpha, grad_beta); ``tied`` leaves the last alone."""
    count, dtype, channels = partials_of(sizes, config), config.dtype, sizes.channels
    return parameters.make_kernel(dtype, config.log_scale, tied).prepare(
        channels,
        alike((count,), accumulator_of(dtype)),
        *(alike((channels,), dtype) for _ in range(4)),
        count // (2 * channels),
    )
