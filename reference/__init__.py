"""The definition of transposed convolution, as plain loops: what everything else is judged by."""

from .scatter import conv_transpose1d, grad_bias, grad_input, grad_weight

__all__ = ["conv_transpose1d", "grad_bias", "grad_input", "grad_weight"]
