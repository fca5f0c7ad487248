"""``routed``: a dispatch key in the thread's set routes one operator here; others pass at no cost."""

import threading

import torch
import torch.compiler.config
from torch.overrides import TorchFunctionMode

from . import fast_path as direct
from . import sharding
from .functional import conv_transpose1d
from .sizes import is_own_padding

# Keeps torch's compiled graphs apart.
CACHE_TAG = "numba_tconv.routed"


def routed():
    """Context in which this package computes ``torch.nn.functional.conv_transpose1d``, for torch's layers too.

        >>> vocoder, spectrogram = torch.nn.ConvTranspose1d(80, 1, 8, stride=4), torch.ones(1, 80, 10)
        >>> with routed():
        ...     waveform = vocoder(spectrogram)

    Arguments and errors are ``numba_tconv.conv_transpose1d``'s. Tensor subclasses that compute the function themselves
    still do, except DTensor. The context holds in its thread and in backward passes started there; it may be nested and
    entered again. Code that torch.compile compiled inside is not used outside, nor the reverse.
    """
    return _Traced() if torch.compiler.is_dynamo_compiling() else _Routed()


class _Routed(threading.local):
    """Sets the key, which compiled code checks and backward passes inherit."""

    def __init__(self):
        self.before = []  # per entry: key set, cache tag

    def __enter__(self):
        _register()
        was, tag = direct.is_routed(), torch.compiler.config.cache_key_tag
        self.before.append((was, tag))
        if not was:
            direct.set_routed(True)
            torch.compiler.config.cache_key_tag = f"{tag}{CACHE_TAG}"
        return self

    def __exit__(self, *error):
        was, tag = self.before.pop()
        if not was:
            direct.set_routed(False)
            torch.compiler.config.cache_key_tag = tag


class _Traced(TorchFunctionMode):
    """``routed`` under torch.compile."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        ours = func is torch.conv_transpose1d and all(one in direct.PLAIN for one in types)
        ours = ours and not is_own_padding((kwargs or {}).get("padding", args[4] if len(args) > 4 else 0))
        return (conv_transpose1d if ours else func)(*args, **(kwargs or {}))


_lock, _libraries = threading.Lock(), []


def _register() -> None:
    if _libraries:
        return
    with _lock:
        if not _libraries:
            direct.pass_routed_key()
            every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
            every.fallback(torch.library.fallthrough_kernel, direct.ROUTED_NAME)
            aten.impl("conv_transpose1d", _compute, direct.ROUTED_NAME)
            _libraries.extend((every, aten))  # freeing one undoes its registrations


def _compute(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """The kernel at the key, removed meanwhile: torch's calls must not return here."""
    ours = not sharding.compute_themselves(input, weight, bias)
    ours = ours and not is_own_padding(padding)  # which torch refuses
    stride, padding, output_padding = _number(stride), _number(padding), _number(output_padding)
    direct.set_routed(False)
    try:
        function = conv_transpose1d if ours else torch.conv_transpose1d
        return function(input, weight, bias, stride, padding, output_padding, groups, _number(dilation))
    finally:
        direct.set_routed(True)


def _number(value):
    return value[0] if type(value) is list and len(value) == 1 else value
