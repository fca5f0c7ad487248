"""The alias-free activation: validated sizes and index formula.

For x (N, C, L), up-samples u (``up_ratio * L``), their activations v, and outputs y:

    u[m] = up_ratio * sum of up_filter[k] * x[j]   over j*up_ratio + k = m + up_shift
    y[o] = sum of down_filter[k] * v[m]            over m = o*down_ratio + k - down_shift

x repeats its ends for ``-pad <= j < L + pad`` and is zero beyond; v repeats its ends without limit.
"""

from typing import NamedTuple

MOST_RATIO = 4
MOST_TAPS = 32
ACTIVATIONS = ("snake", "silu", "leaky_relu", "elu", "gelu", "identity")


class AliasFree(NamedTuple):
    """Sizes, validated by ``alias_free``."""

    batch: int
    channels: int
    length: int
    up_taps: int
    down_taps: int
    up_ratio: int = 2
    down_ratio: int = 2

    @property
    def pad(self) -> int:
        """Times that each end of x is repeated."""
        return self.up_taps // self.up_ratio - 1

    @property
    def up_shift(self) -> int:
        return (self.up_taps - self.up_ratio) // 2

    @property
    def down_shift(self) -> int:
        """Times that v's first sample is repeated; its last: ``down_taps // 2``."""
        return (self.down_taps - 1) // 2

    @property
    def crop_left(self) -> int:
        """Samples cropped from the transposed convolution's start."""
        return self.pad * self.up_ratio + self.up_shift

    @property
    def crop_right(self) -> int:
        return self.pad * self.up_ratio + (self.up_taps - self.up_ratio + 1) // 2

    @property
    def up_length(self) -> int:
        return self.length * self.up_ratio

    @property
    def out_length(self) -> int:
        return -(-self.up_length // self.down_ratio)

    @property
    def rows(self) -> int:
        return self.batch * self.channels

    @property
    def flops(self) -> int:
        """Two a product, without the activation."""
        return 2 * self.rows * (self.length * self.up_taps + self.out_length * self.down_taps)

    def min_bytes(self, itemsize: int) -> int:
        """Bytes to read x and write y once."""
        return self.rows * (self.length + self.out_length) * itemsize


def alias_free(shape, up_taps: int, down_taps: int, up_ratio: int, down_ratio: int) -> AliasFree:
    """The sizes for x of ``shape`` (N, C, L). Raises RuntimeError, which names the wrong argument."""
    if len(shape) != 3:
        raise RuntimeError(f"x must be (N, C, L), got shape {tuple(shape)}")
    for name, ratio in (("up_ratio", up_ratio), ("down_ratio", down_ratio)):
        if not 1 <= ratio <= MOST_RATIO:
            raise RuntimeError(f"{name} must be from 1 to {MOST_RATIO}, got {ratio}")
    for name, taps, least in (("up_filter", up_taps, up_ratio), ("down_filter", down_taps, 1)):
        if not least <= taps <= MOST_TAPS:
            raise RuntimeError(f"{name} must have from {least} to {MOST_TAPS} taps, got {taps}")
    if shape[2] < 1:
        raise RuntimeError(f"x must have at least one sample, got shape {tuple(shape)}")
    return AliasFree(*shape, up_taps, down_taps, up_ratio, down_ratio)
