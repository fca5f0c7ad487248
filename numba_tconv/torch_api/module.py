"""The layer ``ConvTranspose1d``."""

import torch
from torch import nn

from numba_tconv.formula.padding import ends_of

from . import streaming
from .freezable import Freezable, computing_hooks
from .functional import conv_transpose1d, require_known
from .sizes import checked_padding, is_own_padding


class ConvTranspose1d(Freezable, nn.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d``, with ``variant``, ``precision`` and ``padding`` as in ``conv_transpose1d``.

    Parameters, their names and initialisation are torch's, so checkpoints load either way. Input is (N, C_in, L) or
    (C_in, L). ``variant`` and ``precision`` are attributes that may change. Each call reads the weights anew, unless
    frozen (see ``freeze``).
    """

    variant = precision = None

    def __init__(
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        bias=True,
        dilation=1,
        padding_mode="zeros",
        device=None,
        dtype=None,
        *,
        variant=None,
        precision=None,
    ):
        """Raises as torch's layer; for ``padding``, ``variant`` and ``precision`` as ``conv_transpose1d``."""
        own = checked_padding(padding) if is_own_padding(padding) else None
        super().__init__(
            *(in_channels, out_channels, kernel_size, stride, 0 if own else padding, output_padding),
            *(groups, bias, dilation, padding_mode, device, dtype),
        )
        if own:
            self.padding = own
        require_known(variant, precision)
        self.variant = variant
        self.precision = precision

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """The output (N, C_out, L_out) or (C_out, L_out); ``output_size[-1]``, if given, is L_out.

        Raises as torch's layer and ``conv_transpose1d``; ValueError if stride cannot reach ``output_size``.
        """
        frozen = self._frozen
        if frozen is not None and output_size is None:
            output = frozen.output(self, input)
            if output is not None:
                return output
        self._require_zeros()
        if not isinstance(self.padding, (tuple, str)):
            raise AssertionError(
                f"padding must be a tuple of one integer, a pair of them or a word, got {self.padding!r}"
            )
        output_padding = self.output_padding
        if output_size is not None:
            output_padding = self._padding_for(input, output_size)
        kept = frozen is not None and isinstance(input, torch.Tensor) and frozen.operands(self)
        weight, bias = kept or (self.weight, self.bias)
        return conv_transpose1d(
            *(input, weight, bias),
            *(self.stride, self.padding, output_padding, self.groups, self.dilation),
            variant=self.variant,
            precision=self.precision,
        )

    def initial_state(self, batch_size: int) -> torch.Tensor:
        """The state of new streams: zeros (batch_size, C_in, F)."""
        self._require_zeros()
        weight = self.weight
        like = next(self.parameters(recurse=False), weight)  # a weight that a hook computes moves at the next call
        return streaming.initial_state(
            batch_size, weight, self.stride, self.dilation, dtype=like.dtype, device=like.device
        )

    def step(self, x: torch.Tensor, state: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The next outputs of N streams, (N, C_out, T*stride), from T new frames ``x`` (N, C_in, T).

        ``state`` (N, C_in, F) is updated in place. ``mask`` (N,) bool: False slots keep their state and output zeros.
        ``streaming.step`` states the errors. The layer's variant, padding, output_padding are ignored; ``streaming``
        shows how to apply left padding. Hooks do not run, except torch's own that compute the weight.
        """
        self._require_zeros()
        frozen = self._frozen
        kept = frozen and frozen.operands(self)
        if not kept:
            for hook in computing_hooks(self):  # which run before ``forward`` alone
                hook(self, ())
        weight, bias = kept or (self.weight, self.bias)
        return streaming.step(
            x, state, weight, bias, self.stride, self.groups, self.dilation, mask, precision=self.precision
        )

    def _require_zeros(self) -> None:
        if self.padding_mode != "zeros":
            raise ValueError(f'padding_mode must be "zeros", got {self.padding_mode!r}')

    def _padding_for(self, input: torch.Tensor, output_size: list[int]) -> list[int]:
        sizes = self.padding, self.kernel_size, self.dilation
        if is_own_padding(self.padding):
            (taps,), (stride,), (dilation,) = self.kernel_size, self.stride, self.dilation
            cropped = sum(ends_of(checked_padding(self.padding), taps, stride, dilation))
            # A dense kernel with the same lengths.
            sizes = (0,), (dilation * (taps - 1) + 1 - cropped,), (1,)
        padding, kernel_size, dilation = sizes
        return self._output_padding(
            *(input, output_size, self.stride, padding, kernel_size), num_spatial_dims=1, dilation=dilation
        )

    def extra_repr(self) -> str:
        """torch's text and the choices."""
        chosen = (f"{name}={getattr(self, name)!r}" for name in ("variant", "precision") if getattr(self, name))
        return ", ".join([super().extra_repr(), *chosen])
