"""Operands of float32 numbers: one TF32 or, in tf32x3, two fp16.

hi is the number rounded to eleven significant bits, lo the remainder. x * w is three products; the fourth, lo * lo, is
2^-22 of it.

Powers of two, from the largest weight and a stage's largest x, scale numbers into fp16's exponents; sums are multiplied
by both inverses. Numbers below 2^-17 of the largest lose at most 2^-39 of the largest."""

import math

from numba import cuda, float32, int32

from numba_tconv.ptx import (
    bits_of,
    device_function,
    f16_to_f32,
    float_of,
    larger_magnitude,
    pack_f16,
    redux_max,
    tf32_operand,
)

SPLIT_ROWS = 4
MOST_SPLIT_TAPS = 3  # added up on tensor cores, which truncate
INFINITY = float32(math.inf)
MANTISSA, ONE, NO_NUMBER = 23, 127, 255  # mantissa bits; biased exponents of 1 and infinity
LARGEST = ONE + 14  # exponent of the largest scaled number, which may be rounded up
LEAST = LARGEST - ONE + 1  # for a smaller one the scale's inverse is not normal


@device_function
def put_tf32(v, at, value):
    v[at] = tf32_operand(value)


@device_function
def exponent_of(number):
    """Biased exponent of a non-negative number."""
    return int32(bits_of(number) >> MANTISSA)


@device_function
def scale_of(exponent):
    return float_of((LARGEST + ONE - exponent) << MANTISSA)


@device_function
def inverse_of(exponent):
    return float_of((exponent + ONE - LARGEST) << MANTISSA)


@device_function
def scales_of(inverse):
    """``scales`` for ``split``, from the weights' inverse.

    The first is x's least exponent for which the inverse of both scales is normal; the second is added to x's exponent
    to get that inverse's."""
    of_weights = int32(exponent_of(inverse) - LARGEST)
    return max(int32(LEAST), int32(1 - of_weights)), of_weights


@device_function
def exponent_of_warp(largest):
    return int32(redux_max(bits_of(largest)) >> MANTISSA)


@device_function
def larger_finite(value, other):
    """The larger of ``value`` and ``other``'s magnitude, if finite."""
    magnitude = abs(other)
    return max(value, magnitude) if magnitude < INFINITY else value


@device_function
def inverse_of_sums(exponent, of_weights):
    return float_of(min(int32(exponent + of_weights), int32(NO_NUMBER)) << MANTISSA)


@device_function
def split_pair(low, high):
    """Two scaled numbers as two words: hi, lo."""
    larger = pack_f16(low, high)
    return larger, pack_f16(low - f16_to_f32(larger, False), high - f16_to_f32(larger, True))


@device_function
def _largest_number(v, at, window, first):
    largest = float32(0)
    for q in range(first, window):
        for h in range(SPLIT_ROWS):
            largest = larger_finite(largest, float_of(v[at + h * window + q]))
    return largest


def make_split(window: int, first: int):
    """Build ``split``: a warp turns SPLIT_ROWS rows of ``window`` float32 in ``v``, from ``at`` on, into operands.

    Columns before ``first`` are ignored. Words hold two rows: hi of 0 and 1, of 2 and 3, then lo. Returns the sums'
    factor."""

    @device_function
    def split(v, at, scales):
        least, of_weights = scales
        largest = cuda.local.array(SPLIT_ROWS, dtype=float32)
        for h in range(SPLIT_ROWS):
            largest[h] = float32(0)
        for q in range(first, window):
            for h in range(SPLIT_ROWS):
                largest[h] = larger_magnitude(largest[h], float_of(v[at + h * window + q]))
        largest[0], largest[2] = larger_magnitude(largest[0], largest[1]), larger_magnitude(largest[2], largest[3])
        exponent = exponent_of_warp(larger_magnitude(largest[0], largest[2]))
        if exponent == NO_NUMBER:
            exponent = exponent_of_warp(_largest_number(v, at, window, first))
        exponent = max(exponent, least)
        scale = scale_of(exponent)
        for q in range(first, window):
            for h in range(0, SPLIT_ROWS, 2):
                low, high = float_of(v[at + h * window + q]) * scale, float_of(v[at + (h + 1) * window + q]) * scale
                v[at + h * window + q], v[at + (h + 1) * window + q] = split_pair(low, high)
            smaller = v[at + window + q]
            v[at + window + q] = v[at + 2 * window + q]
            v[at + 2 * window + q] = smaller
        return inverse_of_sums(exponent, of_weights)

    return split
