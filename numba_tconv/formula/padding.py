"""``padding`` as ``conv_transpose1d`` takes it (an int, a pair of crops, a word), translated for a Problem."""

from typing import NamedTuple

WORDS = ("valid", "same", "causal")


class Parts(NamedTuple):
    """A Problem's paddings, and numbers of outputs ``before`` and ``after`` its own, the bias alone."""

    before: int
    padding: int
    output_padding: int
    after: int


class Cover(NamedTuple):
    """torch's paddings that cover a Problem's outputs, and the outputs to drop."""

    padding: int
    output_padding: int
    left: int
    right: int


def ends_of(padding: int | str | tuple[int, int], kernel_size: int, stride: int, dilation: int) -> tuple[int, int]:
    """The numbers of outputs cropped left and right; negative where outputs are added."""
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
    """Translate for a Problem; ``output_padding`` is torch's, smaller than stride or dilation."""
    left, right = ends_of(padding, kernel_size, stride, dilation)
    after = max(output_padding - right - max(stride, dilation) + 1, 0)
    inside = max(left, 0)
    return Parts(inside - left, inside, output_padding + inside - right - after, after)


def cover_of(padding: int, output_padding: int, stride: int, dilation: int) -> Cover:
    """Translate a Problem's paddings for torch."""
    if 0 <= output_padding < max(stride, dilation):
        return Cover(padding, output_padding, 0, 0)
    right = padding - output_padding
    both, added = max(0, min(padding, right)), max(0, -right)
    return Cover(both, added, padding - both, right - both + added)
