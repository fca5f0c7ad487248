"""The index formula of transposed convolution: which tap reaches which output. Written nowhere else.

Input position ``i`` and tap ``k`` meet at ``u = i*stride + k*dilation``; the output index is ``o = u - padding``.

* **Phases** (gather). Output ``u`` has phase ``u mod stride``; tap ``k`` has phase ``k*dilation mod stride`` and
  shift ``k*dilation div stride``. It reaches the outputs ``u`` of its phase, which read ``x[u div stride - shift]``
  for it. A phase's taps are an arithmetic progression.
* **Rows** (matrix product). With ``gap = gcd(stride, dilation)``, row ``a = k mod rows`` of ``rows = stride/gap``
  has the taps ``k = a + b*rows``. Tap ``b`` reads ``x[i - b*step]`` with ``step = dilation/gap``; column ``i`` lands
  at ``u = i*stride + a*dilation``. The next ``gap - 1`` outputs are the bias: every ``u`` is written once.
"""

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Taps:
    """Phases, shifts and rows, in samples.

    >>> taps = Taps(kernel_size=5, stride=2, dilation=1)
    >>> list(taps.of_phase(0)), list(taps.of_phase(1))
    ([0, 2, 4], [1, 3])
    """

    kernel_size: int
    stride: int
    dilation: int

    @cached_property
    def gap(self) -> int:
        """gcd(stride, dilation)."""
        return math.gcd(self.stride, self.dilation)

    @cached_property
    def rows(self) -> int:
        """Rows of taps, as many as phases that can have taps."""
        return self.stride // self.gap

    @cached_property
    def step(self) -> int:
        """Input positions between a row's taps."""
        return self.dilation // self.gap

    @cached_property
    def taps_per_row(self) -> int:
        """Taps of the longest row."""
        return -(-self.kernel_size // self.rows)

    @cached_property
    def dilation_inverse(self) -> int:
        """Inverse of step modulo rows: phase r begins with tap ``(r/gap * inverse) mod rows``."""
        return pow(self.step, -1, self.rows) if self.rows > 1 else 0

    def phase(self, k: int) -> int:
        """The phase of tap ``k``."""
        return k * self.dilation % self.stride

    def shift(self, k: int) -> int:
        """The shift of tap ``k``."""
        return k * self.dilation // self.stride

    def of_phase(self, r: int) -> range:
        """The taps of phase ``r``, ascending; empty if its outputs are the bias alone."""
        if r % self.gap:
            return range(0)
        return range(r // self.gap * self.dilation_inverse % self.rows, self.kernel_size, self.rows)

    def of_row(self, a: int) -> range:
        """The taps of row ``a``."""
        return range(a, self.kernel_size, self.rows)

    def columns(self, length: int, out_length: int, padding: int) -> range:
        """The columns ``i`` of one sample that cover every output.

        At least ``(taps_per_row - 1)*step`` lie beyond the input, so that windows across samples read zeros.
        """
        first = -(-(padding - (self.rows - 1) * self.dilation - (self.gap - 1)) // self.stride)
        last = (padding + out_length - 1) // self.stride
        return range(min(first, 0), max(last + 1, length + (self.taps_per_row - 1) * self.step))
