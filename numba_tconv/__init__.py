"""Transposed 1-D convolution for NVIDIA GPUs, written in Python with Numba's ``@cuda.jit``.

``conv_transpose1d`` and ``ConvTranspose1d`` stand in for torch's; ``convert`` puts the layer into a finished model, and
``routed`` the function; ``warm`` compiles ahead what it launches; ``freeze`` lets a served model pack its weights once.
``explain`` says how a problem is computed; ``rungs`` lists the kernels by name.
"""

from .requirements import misfits

try:
    from .convert import Conversion, convert
    from .explain import Explanation, explain
    from .freeze import Freezing, freeze, unfreeze
    from .functional import conv_transpose1d
    from .kernels import RUNGS
    from .module import ConvTranspose1d
    from .routed import routed
    from .warm import warm
except ImportError as error:
    for line in misfits():
        error.add_note(line)
    raise

__all__ = [
    "ConvTranspose1d",
    "Conversion",
    "Explanation",
    "Freezing",
    "__version__",
    "conv_transpose1d",
    "convert",
    "explain",
    "freeze",
    "routed",
    "rungs",
    "unfreeze",
    "warm",
]
__version__ = "0.1.0"


def rungs() -> dict[str, str]:
    """The idea of every rung of the ladder in a line, by the name that ``variant=`` takes, slowest first."""
    return {name: rung.idea for name, rung in RUNGS.items()}
