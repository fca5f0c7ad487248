"""A call's integers, checked as torch's, and ``padding`` as a pair or word."""

import contextlib
import operator

import torch

from numba_tconv.formula.padding import WORDS, Parts, parts_of
from numba_tconv.formula.problem import Parameters

INTEGERS = Parameters._fields


def is_own_padding(padding) -> bool:
    """Whether ``padding`` is a word or a pair, unknown to torch."""
    return isinstance(padding, str) or (isinstance(padding, (tuple, list)) and len(padding) == 2)


def checked_padding(padding) -> str | tuple[int, int]:
    """A word, or a pair as a tuple of ints.

    Raises ValueError for an unknown word, TypeError for non-integers, RuntimeError beyond 64 bits.
    """
    if isinstance(padding, str):
        if padding not in WORDS:
            raise ValueError(f"unknown padding {padding!r}: the words are {', '.join(WORDS)}")
        return padding
    pair = tuple(integer("each item of padding", one) for one in padding)
    if not all(map(fits, pair)):
        raise RuntimeError(f"each item of padding must fit in 64 bits, got {padding}")
    return pair


def own_sizes(input, weight, stride, padding, output_padding, groups, dilation) -> tuple[Parameters, Parts, int]:
    """For a padding that is a pair or word: the Problem's parameters, its parts, how many outputs count.

    Raises as ``checked_padding`` and ``integers``, RuntimeError if no output is left.
    """
    own = checked_padding(padding)
    given = Parameters(*integers(stride, 0, output_padding, groups, dilation))
    stride, output_padding, dilation = given.stride, given.output_padding, given.dilation
    if weight.dim() != 3 or input.dim() not in (2, 3) or stride < 1 or dilation < 1:
        return given, Parts(0, 0, output_padding, 0), 0  # refused later
    check_output_padding(output_padding, stride, dilation)
    length, taps = input.shape[-1], weight.shape[2]
    parts = parts_of(own, taps, stride, output_padding, dilation)
    inside = out_length(length, taps, stride, parts.padding, parts.output_padding, dilation)
    if (left := parts.before + inside + parts.after) < 1:
        raise RuntimeError(
            f"padding {padding!r} must leave at least one output, but leaves {left} of an input of {length}"
        )
    if inside < 1:  # all outputs lie outside the signal
        parts, inside = Parts(left, 0, 0, 0), 0
    return given._replace(padding=parts.padding, output_padding=parts.output_padding), parts, inside


def with_ends(output, bias, parts: Parts, inside: int):
    """The first ``inside`` outputs and, around them, the bias alone."""
    if not (parts.before or parts.after):
        return output

    def end(count):
        shape = *output.shape[:-1], count
        return output.new_zeros(shape) if bias is None else bias.to(output.dtype)[:, None].expand(shape)

    return torch.cat([end(parts.before), output[..., :inside], end(parts.after)], -1)


def out_length(length, kernel_size, stride, padding, output_padding, dilation) -> int:
    return (length - 1) * stride - 2 * padding + dilation * (kernel_size - 1) + output_padding + 1


def check_output_padding(output_padding, stride, dilation) -> None:
    if output_padding < 0:
        raise RuntimeError(f"output_padding must not be negative, got {output_padding}")
    if output_padding >= max(stride, dilation) > 0:
        raise RuntimeError(
            "output_padding must be smaller than the larger of stride and dilation, "
            f"got {output_padding} with stride {stride} and dilation {dilation}"
        )


def integers(*arguments) -> list[int]:
    """The arguments named by INTEGERS as ints; all but groups may be sequences of one.

    Raises torch's first error: first items' types, then 64-bit ranges from the last argument back, then lengths.
    """
    plain = []
    for value in arguments:
        if type(value) is tuple and len(value) == 1:
            value = value[0]
        if type(value) is not int or not fits(value):
            break
        plain.append(value)
    else:
        if type(arguments[INTEGERS.index("groups")]) is int:
            return plain
    given = [
        (name, value, TypeError)
        if isinstance(value, (tuple, list)) and name != "groups"
        else (name, (value,), ValueError)
        for name, value in zip(INTEGERS, arguments, strict=True)
    ]
    for name, values, _ in given:
        for value in values[:1]:
            integer(name, value)
    for name, values, too_large in reversed(given):
        for value in values:
            if not fits(integer(name, value)):
                raise too_large(f"{name} must fit in 64 bits, got {value}")
    for name, values, _ in given:
        if len(values) != 1:
            raise RuntimeError(f"{name} must be one integer or a tuple of one, got {values}")
    return [integer(name, value) for name, (value,), _ in given]


def fits(number: int) -> bool:
    return -(2**63) <= number < 2**63


def is_zero(size: int) -> bool:
    """False where a trace leaves ``size`` open."""
    if torch.compiler.is_dynamo_compiling() or isinstance(size, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow

        return guard_or_false(size == 0)
    return size == 0


def integer(name: str, value) -> int:
    """``value`` as an int, also from NumPy and tensors. Raises TypeError, for a bool too."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
