"""What ``padding`` means: an int, a pair of crops, or a word, as the numbers of one Problem.

With ``k = dilation*(kernel_size - 1) + 1``, ``left`` and ``right`` outputs are cropped:

* "valid" crops none.
* "same" gives ``length*stride`` outputs: ``k - stride`` are cropped, half of them on the left, rounded down.
* "causal" gives ``length*stride`` outputs, and no output depends on a later input: all are cropped on the right.

Where ``k < stride``, "same" and "causal" add ``stride - k`` outputs on the right instead, which no tap reaches.
"""

from __future__ import annotations

from typing import NamedTuple

WORDS = ("valid", "same", "causal")


class Parts(NamedTuple):
    """A call with any ``padding``: a Problem's ``padding`` and ``output_padding``, and what lies around its outputs."""

    before: int  # outputs before the first tap's first one, which are bias
    padding: int
    output_padding: int
    after: int  # likewise after all that a Problem computes


class Cover(NamedTuple):
    """torch's ``padding`` and ``output_padding`` that give at least a Problem's outputs, and the outputs to drop."""

    padding: int
    output_padding: int
    left: int
    right: int


def ends_of(padding: int | str | tuple[int, int], kernel_size: int, stride: int, dilation: int) -> tuple[int, int]:
    """The outputs cropped at the left and at the right end; negative where outputs are added."""
    if isinstance(padding, int):
        return padding, padding
    if not isinstance(padding, str):
        return padding
    total = dilation * (kernel_size - 1) + 1 - stride
    left = max(total, 0) // 2 if padding == "same" else 0
    return left, 0 if padding == "valid" else total - left


def parts_of(
    padding: int | str | tuple[int, int], kernel_size: int, stride: int, output_padding: int, dilation: int
) -> Parts:
    """The parts of a call. ``output_padding`` is torch's, in ``range(max(stride, dilation))``."""
    left, right = ends_of(padding, kernel_size, stride, dilation)
    after = max(output_padding - right - max(stride, dilation) + 1, 0)
    inside = max(left, 0)
    return Parts(inside - left, inside, output_padding + inside - right - after, after)


def cover_of(padding: int, output_padding: int, stride: int, dilation: int) -> Cover:
    """The cover of a Problem's ``padding`` and ``output_padding``."""
    if 0 <= output_padding < max(stride, dilation):
        return Cover(padding, output_padding, 0, 0)
    right = padding - output_padding
    both, added = max(0, min(padding, right)), max(0, -right)
    return Cover(both, added, padding - both, right - both + added)
