"""A thread's products: a filter between zeros (``Up``) or with steps (``Down``)."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Up:
    """A filter between zeros: up-sample ``m`` takes taps ``k`` of samples ``j`` with ``j*ratio + k = m + shift``.

    A thread has ``run`` positions; up-sample ``m`` belongs to position ``m // ratio``. ``vector``: samples of a load.
    """

    taps: int
    ratio: int
    shift: int
    run: int
    vector: int
    spare: int = 0  # samples before the needed ones

    @cached_property
    def needed(self) -> int:
        """Earlier samples that a position needs."""
        return -((self.shift - self.taps + 1) // self.ratio)

    @property
    def before(self) -> int:
        return self.needed + self.spare

    @cached_property
    def after(self) -> int:
        return (self.ratio - 1 + self.shift) // self.ratio

    @cached_property
    def window(self) -> int:
        """Samples of a thread, in whole vectors."""
        return whole(self.run + self.before + self.after, self.vector)

    @cached_property
    def products(self) -> tuple:
        """(value, tap, place in the window); values by phase, then by position."""
        return tuple(
            (p * self.run + z, k, z + (p + self.shift - k) // self.ratio + self.before)
            for k in range(self.taps)
            for z in range(self.run)
            for p in range(self.ratio)
            if (p + self.shift - k) % self.ratio == 0
        )


@dataclass(frozen=True)
class Down:
    """A filter with steps: output ``o`` takes taps ``k`` of up-samples ``o*ratio + k - shift``.

    Up-sample ``n`` of a tile is entry ``n // ratio`` of plane ``n % ratio``. The tile's output ``o`` begins at
    up-sample ``o*ratio + lead``. A thread has ``run`` outputs."""

    taps: int
    ratio: int
    lead: int
    run: int
    vector: int

    @cached_property
    def reach(self) -> int:
        """Later entries that an output needs."""
        return (self.taps - 1 + self.lead) // self.ratio

    @cached_property
    def window(self) -> int:
        """Entries of each plane for a thread, in whole vectors."""
        return whole(self.run + self.reach, self.vector)

    @cached_property
    def products(self) -> tuple:
        """(output, tap, place in the windows of all planes)."""
        return tuple(
            (z, k, (k + self.lead) % self.ratio * self.window + z + (k + self.lead) // self.ratio)
            for k in range(self.taps)
            for z in range(self.run)
        )

    def own(self) -> tuple:
        """Those of the thread's own entries: (output, tap, place among them)."""
        return tuple(
            (z, k, place // self.window * self.run + place % self.window)
            for z, k, place in self.products
            if place % self.window < self.run
        )

    def others(self) -> tuple:
        return tuple(product for product in self.products if product[2] % self.window >= self.run)


def whole(count: int, vector: int) -> int:
    return -(-count // vector) * vector
