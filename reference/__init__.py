"""The definition of transposed convolution, by which everything else is judged."""

from .scatter import conv_transpose1d, grad_bias, grad_input, grad_weight

__all__ = ["conv_transpose1d", "grad_bias", "grad_input", "grad_weight"]
