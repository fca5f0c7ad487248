"""Contexts for large problems' code paths: several depthwise passes, k5's resident weights, few threads a block."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from numba_tconv.gradients.input import depthwise as grad_input_depthwise
from numba_tconv.kernels.depthwise import kernel as depthwise
from numba_tconv.kernels.depthwise import rows as depthwise_rows
from numba_tconv.kernels.depthwise import tile as depthwise_config
from numba_tconv.kernels.k5_mma import choose as k5_choice
from numba_tconv.kernels.k5_mma import kernel as k5_mma

REMEMBERED = (
    depthwise_config.plan,
    depthwise._prepared,
    grad_input_depthwise._prepared,
    k5_choice.choose,
    k5_mma._plan,
)


@contextlib.contextmanager
def few_blocks_are_enough() -> Iterator[None]:
    """Several passes however few blocks result; weights stay for a tile or two."""
    with mock.patch.object(depthwise_rows, "ENOUGH_BLOCKS", 1), mock.patch.object(k5_choice, "FEWEST_TILES", 1):
        for function in REMEMBERED:
            function.cache_clear()
        try:
            yield
        finally:
            for function in REMEMBERED:
                function.cache_clear()


@contextlib.contextmanager
def few_threads(module, threads: int, *remembered) -> Iterator[None]:
    """Blocks of ``module``'s kernels have ``threads``. Kernels and the caches ``remembered`` are made anew."""
    caches = module.make_kernel, *remembered
    with mock.patch.object(module, "THREADS", threads):
        for function in caches:
            function.cache_clear()
        try:
            yield
        finally:
            for function in caches:
                function.cache_clear()
