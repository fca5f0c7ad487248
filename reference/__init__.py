"""The definitions as plain loops. Every kernel is tested against them."""

from .alias_free import alias_free_activation
from .scatter import conv_transpose1d, grad_bias, grad_input, grad_weight

__all__ = ["alias_free_activation", "conv_transpose1d", "grad_bias", "grad_input", "grad_weight"]
