"""Transposed 1-D convolution for NVIDIA GPUs, written in Python with Numba's ``@cuda.jit``.

* ``conv_transpose1d``, ``ConvTranspose1d``: torch's function and layer
* ``alias_free_activation``, ``AliasFreeActivation``: BigVGAN's activation
* ``convert``, ``routed``: let existing models use them
* ``streaming``: a causal layer step by step
* ``warm``, ``freeze``: compile ahead; pack weights once
* ``explain``, ``rungs``: how a problem is computed; the kernels
"""

import importlib

from .requirements import misfits

try:
    from .selection.registry import RUNGS
    from .torch_api import streaming
    from .torch_api.alias_free import AliasFreeActivation, alias_free_activation
    from .torch_api.convert import Conversion, convert
    from .torch_api.freeze import Freezing, freeze, unfreeze
    from .torch_api.functional import conv_transpose1d
    from .torch_api.module import ConvTranspose1d
    from .torch_api.routed import routed
except ImportError as error:
    for line in misfits():
        error.add_note(line)
    raise

__all__ = [
    "AliasFreeActivation",
    "ConvTranspose1d",
    "Conversion",
    "Explanation",
    "Freezing",
    "__version__",
    "alias_free_activation",
    "conv_transpose1d",
    "convert",
    "explain",
    "freeze",
    "routed",
    "rungs",
    "streaming",
    "unfreeze",
    "warm",
]
__version__ = "0.1.0"


def rungs() -> dict[str, str]:
    """A line about each rung, by the name that ``variant`` takes, slowest first.

    >>> list(rungs())[:3]
    ['k1_gather', 'k2_polyphase', 'k3_shared_tile']
    """
    return {name: rung.idea for name, rung in RUNGS.items()}


# Imported on first use.
_LATER = {
    "explain": ".lab.explain.explain",
    "Explanation": ".lab.explain.explain",
    "warm": ".torch_api.warm",
}


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
