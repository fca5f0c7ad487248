"""``routed``: calls of torch's functional transposed convolution, computed by this package for a while.

torch's dispatcher keeps, for each thread, a set of keys that it looks at before those of the tensors. A key of our own
in that set takes the one operator to this package and lets every other pass, at no cost; where the key is not in the
set, torch is as it was. A kernel at the device's own keys would be in the way of every call, of all threads, and of
torch's decompositions; and names of torch that are replaced do not reach who imported the function.
"""

from __future__ import annotations

import threading

import torch
import torch.compiler.config
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from . import fast_path as direct
from . import sharding
from .functional import conv_transpose1d

# Compiled graphs are found again on the disk by torch's graph, which does not say what computes the operator.
CACHE_TAG = "numba_tconv.routed"
TRACED = (FakeTensor, FunctionalTensor)  # what torch.compile puts in the place of tensors


def routed():
    """While it is active, this package computes what calls ``torch.nn.functional.conv_transpose1d``.

    For models that call the function themselves, as on one filter that is expanded over all channels; and, since
    torch's layers call it too, for any model without changing it. ``torch.conv_transpose1d`` is the same function, by
    whatever name it was imported. Arguments and errors are those of ``numba_tconv.conv_transpose1d``, which hands to
    torch what it does not compute; calls with tensor subclasses that compute it themselves stay theirs, but for
    DTensor. Other functions of torch cost what they cost otherwise. It holds in the thread that entered it, and in the
    backward passes that start there; it may be nested and entered again. What torch.compile compiled within it is not
    used outside, and the other way round:

        with routed():
            waveform = vocoder(spectrogram)
    """
    return _Traced() if torch.compiler.is_dynamo_compiling() else _Routed()


class _Routed(threading.local):
    """The key in the thread's set, which torch.compile's guards compare and threads of a backward pass inherit."""

    def __init__(self):
        self.before = []  # of each entry that has not ended: whether the key was there, and the tag of torch's caches

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
    """The same where torch.compile traces the entry itself: it knows function modes, which then cost nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        ours = func is torch.conv_transpose1d and all(one in direct.PLAIN for one in types)
        return (conv_transpose1d if ours else func)(*args, **(kwargs or {}))


_lock, _libraries = threading.Lock(), []


def _register() -> None:
    """Register the operator's kernel at the key, once; until then a plain import has changed nothing of torch's."""
    if _libraries:
        return
    with _lock:
        if not _libraries:
            direct.pass_routed_key()
            every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
            every.fallback(torch.library.fallthrough_kernel, direct.ROUTED_NAME)
            aten.impl("conv_transpose1d", _compute, direct.ROUTED_NAME)
            _libraries.extend((every, aten))  # which take back what they registered when they go


def _compute(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """The kernel, which is given lists. The key is out of the set meanwhile, so what we hand to torch is torch's."""
    ours = _is_ours(input) and _is_ours(weight) and (bias is None or _is_ours(bias))
    stride, padding, output_padding = _number(stride), _number(padding), _number(output_padding)
    direct.set_routed(False)
    try:
        function = conv_transpose1d if ours else torch.conv_transpose1d
        return function(input, weight, bias, stride, padding, output_padding, groups, _number(dilation))
    finally:
        direct.set_routed(True)


def _number(value):
    """The one number of a list, which is the sooner looked at; else the value, for an error of its own."""
    return value[0] if type(value) is list and len(value) == 1 else value


def _is_ours(tensor: torch.Tensor) -> bool:
    """Whether it computes as a plain tensor does: a subclass that sees operators may know torch's only."""
    return (
        type(tensor) in direct.PLAIN
        or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        or isinstance(tensor, TRACED)
        or sharding.is_sharded(tensor)
    )
