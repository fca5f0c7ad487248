"""Small depthwise problems go the ways of large ones."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from numba_tconv.kernels import depthwise, depthwise_config, depthwise_rows, grad_input_depthwise

REMEMBERED = (depthwise_config.plan, depthwise._prepared, grad_input_depthwise._prepared)


@contextlib.contextmanager
def few_blocks_are_enough() -> Iterator[None]:
    """Within, a team takes several passes however few blocks that leaves."""
    with mock.patch.object(depthwise_rows, "ENOUGH_BLOCKS", 1):
        for function in REMEMBERED:
            function.cache_clear()
        try:
            yield
        finally:
            for function in REMEMBERED:
                function.cache_clear()
