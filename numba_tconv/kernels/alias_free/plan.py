"""The launch of the alias-free activation."""

from collections.abc import Callable
from functools import lru_cache

import torch

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.kernels.common.arguments import Signal
from numba_tconv.kernels.rung import Step
from numba_tconv.runtime.kernel import alike

from .kernel import Sizes, make_kernel
from .tile import Config, choose, tiles_of

MOST_LENGTH = 2**28  # with all up-samples in 32 bits
MOST_BLOCKS = 2**31 - 1


def refusal(sizes: AliasFree) -> str | None:
    """Why no launch computes ``sizes``."""
    if sizes.length > MOST_LENGTH:
        return f"it takes rows of up to {MOST_LENGTH} samples"
    if sizes.rows > MOST_BLOCKS:
        return f"it takes up to {MOST_BLOCKS} rows"
    return None


def steps(sizes: AliasFree, dtype: torch.dtype, activation: str, log_scale: bool = True) -> list[Step]:
    return [Step("main", make_kernel(choose(sizes, dtype, activation, log_scale)))]


@lru_cache(maxsize=1024)
def prepare(sizes: AliasFree, strides: tuple, config: Config) -> Callable[..., None]:
    """A launch of (x, up_filter, down_filter, alpha, beta, y).

    x (N, C, L) has ``strides``; filters, alpha and beta are contiguous, for none any tensor of the dtype; y is
    contiguous and 32-byte aligned."""
    passes, blocks = tiles_of(sizes, config)
    dtype, channels = config.dtype, sizes.channels
    return make_kernel(config).prepare(
        (sizes.rows, blocks, 1),
        Signal(alike((sizes.batch, channels, sizes.length), dtype, strides), *strides),
        *(alike((count,), dtype) for count in (sizes.up_taps, sizes.down_taps, channels, channels)),
        alike((sizes.rows * sizes.out_length,), dtype),
        Sizes(sizes.length, sizes.out_length, channels, passes),
    )
