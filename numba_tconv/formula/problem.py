"""A problem: one transposed convolution's validated sizes and costs."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from .taps import Taps

# An H200's dense operations/s by datasheet ("tf32x3": three fp16 products), and bytes/s copied (read + write).
PEAK_FLOPS = {"fp64": 67e12, "ieee": 67e12, "tf32": 495e12, "tf32x3": 330e12, "fp16": 990e12, "bf16": 990e12}
COPY_BANDWIDTH = 4.29e12


class Parameters(NamedTuple):
    """A layer's parameters, in the operators' order."""

    stride: int
    padding: int
    output_padding: int
    groups: int
    dilation: int


@dataclass(frozen=True)
class Problem:
    """Sizes and parameters of a transposed 1-D convolution, by torch's argument names.

    Input (batch, in_channels, length), weight (in_channels, out_channels/groups, kernel_size), output (batch,
    out_channels, out_length). ``stride``, ``padding``, ``output_padding`` and ``dilation`` are in samples.

    ``padding`` outputs are cropped left, ``padding - output_padding`` right. ``output_padding`` may be negative, or
    larger than torch's (formula/padding.py).

    Raises RuntimeError for other values that torch refuses, and unless ``output_padding - padding`` is less than
    ``max(stride, dilation)``.

        >>> Problem(batch=1, in_channels=8, out_channels=4, kernel_size=6, length=10, stride=2).out_length
        24
    """

    batch: int
    in_channels: int
    out_channels: int
    kernel_size: int
    length: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    groups: int = 1
    dilation: int = 1
    bias: bool = False

    def __post_init__(self):
        def refuse_unless(condition, message):
            if not condition:
                raise RuntimeError(message)

        refuse_unless(self.groups > 0, f"groups must be positive, got {self.groups}")
        refuse_unless(self.stride > 0, f"stride must be positive, got {self.stride}")
        refuse_unless(self.padding >= 0, f"padding must not be negative, got {self.padding}")
        refuse_unless(self.dilation > 0, f"dilation must be positive, got {self.dilation}")
        refuse_unless(self.kernel_size > 0, f"kernel_size must be positive, got {self.kernel_size}")
        refuse_unless(self.batch >= 0, f"batch must not be negative, got {self.batch}")
        refuse_unless(self.in_channels > 0, f"in_channels must be positive, got {self.in_channels}")
        refuse_unless(self.out_channels > 0, f"out_channels must be positive, got {self.out_channels}")
        refuse_unless(
            self.length > 0 or (self.batch == 0 and self.length == 0),
            f"length must be positive (only an empty batch may have an empty length), got {self.length}",
        )
        refuse_unless(
            self.in_channels % self.groups == 0,
            f"in_channels must be divisible by groups, got {self.in_channels} and {self.groups}",
        )
        refuse_unless(
            self.out_channels % self.groups == 0,
            f"out_channels must be divisible by groups, got {self.out_channels} and {self.groups}",
        )
        refuse_unless(
            self.output_padding - self.padding < max(self.stride, self.dilation),
            "output_padding must exceed padding by less than the larger of stride and dilation, "
            f"got {self.output_padding} and {self.padding} with stride {self.stride} and dilation {self.dilation}",
        )
        refuse_unless(
            self.out_length >= 0,
            f"padding {self.padding} leaves a negative output length ({self.out_length}) of an input of {self.length}",
        )

    def __hash__(self):
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: every call looks its problem up."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def layer(self) -> "Problem":
        """The same layer with one sample of minimal length and no bias."""
        cropped = min(self.output_padding, 0)
        return replace(self, batch=1, length=2 * self.padding - cropped + 1, output_padding=cropped, bias=False)

    @property
    def parameters(self) -> Parameters:
        """Stride, padding, output padding, groups and dilation."""
        return Parameters(self.stride, self.padding, self.output_padding, self.groups, self.dilation)

    @cached_property
    def taps(self) -> Taps:
        """Which tap reaches which output."""
        return Taps(self.kernel_size, self.stride, self.dilation)

    @property  # torch.compile cannot trace cached ones
    def out_length(self) -> int:
        """L_out, in samples."""
        return (
            (self.length - 1) * self.stride
            - 2 * self.padding
            + self.dilation * (self.kernel_size - 1)
            + self.output_padding
            + 1
        )

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """(N, C_in, L)."""
        return self.batch, self.in_channels, self.length

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """(C_in, C_out/groups, K)."""
        return self.in_channels, self.out_channels_per_group, self.kernel_size

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """(N, C_out, L_out)."""
        return self.batch, self.out_channels, self.out_length

    def shape_of(self, of: str) -> tuple[int, ...]:
        """The shape of the output ("forward") or of a gradient."""
        return {
            "forward": self.out_shape,
            "grad_input": self.in_shape,
            "grad_weight": self.weight_shape,
            "grad_bias": (self.out_channels,),
        }[of]

    @property
    def has_torchs_padding(self) -> bool:
        """Whether torch takes both paddings."""
        return 0 <= self.output_padding < max(self.stride, self.dilation)

    @property
    def last_sample(self) -> int:
        """An upper bound of all ``i*stride + k*dilation`` and ``o + padding``."""
        return self.out_length + 2 * self.padding - min(self.output_padding, 0)

    @property
    def in_channels_per_group(self) -> int:
        """C_in/groups."""
        return self.in_channels // self.groups

    @property
    def out_channels_per_group(self) -> int:
        """C_out/groups."""
        return self.out_channels // self.groups

    @cached_property
    def flops(self) -> int:
        """Two for each (input element, output channel of its group, tap), cropped ones included."""
        return 2 * self.batch * self.in_channels * self.out_channels_per_group * self.kernel_size * self.length

    def terms(self, of: str = "forward") -> int:
        """Products in the longest sum of the output or gradient ``of``."""
        return {
            "forward": self.in_channels_per_group * self.taps.taps_per_row,
            "grad_input": self.out_channels_per_group * self.kernel_size,
            "grad_weight": self.batch * self.length,
            "grad_bias": self.batch * self.out_length,
        }[of]

    def min_bytes(self, itemsize: int) -> int:
        """Bytes to read operands and write the output once."""
        elements = sum(map(math.prod, (self.in_shape, self.weight_shape, self.out_shape)))
        return (elements + self.out_channels * self.bias) * itemsize

    def floor_ms(self, itemsize: int, peak: str, bandwidth: float = COPY_BANDWIDTH) -> float:
        """The roofline's ms; ``bandwidth`` in bytes/s, ``peak`` a key of PEAK_FLOPS."""
        return 1e3 * max(self.min_bytes(itemsize) / bandwidth, self.flops / PEAK_FLOPS[peak])

    def __str__(self) -> str:
        optional = (
            ("p", self.padding, 0),
            ("op", self.output_padding, 0),
            ("d", self.dilation, 1),
            ("groups ", self.groups, 1),
        )
        parts = [f"{self.batch}", f"{self.in_channels}->{self.out_channels}", f"k{self.kernel_size}", f"s{self.stride}"]
        parts += [f"{letter}{value}" for letter, value, default in optional if value != default]
        return f"({', '.join([*parts, f'L {self.length}'] + ['bias'] * self.bias)})"
