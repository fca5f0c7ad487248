"""Subclasses of other packages' modules, and the test for equality."""

import contextlib
import inspect
from functools import cache

import torch

MOST_ERROR = 1e-10  # of the largest output, in float64
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


@cache
def counterpart(base: type, cls: type) -> type:
    """A subclass of ``cls``, with its name and the ``forward`` of ``base``."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce_ex__": _reduce}
    (argument,) = _arguments(cls)
    if argument != "x":
        names["forward"] = eval(f"lambda self, {argument}: forward(self, {argument})", {"forward": base.forward})
    return type(cls.__name__, (base, cls), names)


def _arguments(cls: type) -> list[str]:
    _, *names = inspect.signature(cls.forward).parameters
    return names


def other_arguments(module: torch.nn.Module) -> str | None:
    """Why the ``forward`` of ``module`` is no function of one tensor."""
    names = _arguments(type(module))
    if len(names) != 1:
        return f"its forward takes {', '.join(names) or 'nothing'}, where this package's takes x"
    return None


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest output or 1; infinite for other shapes and NaN."""
    if y.shape != expected.shape:
        return float("inf")
    largest = ((y - expected).abs().amax() / expected.abs().amax().clamp(min=1)).item()
    return largest if largest == largest else float("inf")


@contextlib.contextmanager
def one_thread():
    """Faster for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _reduce(self, protocol):
    return _new, type(self).__bases__, self.__getstate__()


def _new(base: type, cls: type) -> torch.nn.Module:
    made = counterpart(base, cls)
    return made.__new__(made)
