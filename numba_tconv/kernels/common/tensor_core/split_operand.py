"""How a float32 of x becomes an operand of products: of one of TF32, or, in tf32x3, of three of fp16.

Split operands: a number is the nearest of eleven significant bits, its larger part, and what that leaves over, its
smaller part, of eleven bits again. Of x * w three products are added up: both with a larger and a smaller part, and the
one of the larger ones; what is left out is 2^-22 of it. Parts of eleven bits are what TF32 has. But fp16 has them, too,
and of those tensor cores multiply twice as many by an instruction, which takes as long and no more power, and power is
what limits three products (kernels/k6_wgmma/mainloop.py). By turns with operands of TF32, in geometric mean of 15
layers, k6 takes 0.75 times as long, k5 0.72 (H200; kb64 3.37 to 2.30 ms). With TF32 for the product of the larger parts
and fp16 for the two others, k6 took 0.94 times as long, k5 0.91 (H100; scripts, no recorded rows).

The exponents of fp16 reach from 2^-24 to 2^15 only. So numbers are scaled, by powers of two, which changes no bit of
theirs: the weights as they are packed, by the largest of them (pack_split.py); x by the largest number of a warp's
windows of a stage, or of the tile's, where the warp that copies it splits it (kernels/k6_wgmma/split_ahead.py); and
sums by the inverse of both, when they are added up on CUDA cores. Of a number that is 2^-17 of the largest or more both
parts are whole; of a smaller one no more is lost than 2^-39 of the largest."""

from __future__ import annotations

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

SPLIT_ROWS = 4  # of x, that a lane has of a product's depth
MOST_SPLIT_TAPS = 3  # whose products are added up on tensor cores, which cut off what an addition cannot hold
INFINITY = float32(math.inf)
MANTISSA, ONE, NO_NUMBER = 23, 127, 255  # bits; the exponents, as the bits of a float32 hold them, of 1 and infinity
LARGEST = ONE + 14  # that of the largest number once it is scaled: its larger part may be rounded up
LEAST = LARGEST - ONE + 1  # of the largest number before: of smaller ones the scale's inverse would not be normal


@device_function
def put_tf32(v, at, value):
    """The operand of ``value`` into ``v[at]``."""
    v[at] = tf32_operand(value)


@device_function
def exponent_of(number):
    """That of a number that is not negative."""
    return int32(bits_of(number) >> MANTISSA)


@device_function
def scale_of(exponent):
    """The power of two by which numbers are multiplied of which the largest has this exponent."""
    return float_of((LARGEST + ONE - exponent) << MANTISSA)


@device_function
def inverse_of(exponent):
    """One divided by ``scale_of`` it."""
    return float_of((exponent + ONE - LARGEST) << MANTISSA)


@device_function
def scales_of(inverse):
    """What ``split`` must know of the scale of the weights, whose inverse is given: the least exponent that it may take
    x to have, so that the inverse of both scales is normal, and what makes of that exponent the inverse's."""
    of_weights = int32(exponent_of(inverse) - LARGEST)
    return max(int32(LEAST), int32(1 - of_weights)), of_weights


@device_function
def exponent_of_warp(largest):
    """That of the largest of the numbers of a warp's lanes, none of them negative."""
    return int32(redux_max(bits_of(largest)) >> MANTISSA)


@device_function
def larger_finite(value, other):
    """The larger one of ``value`` and the magnitude of ``other``, unless that is an infinity or a NaN."""
    magnitude = abs(other)
    return max(value, magnitude) if magnitude < INFINITY else value


@device_function
def inverse_of_sums(exponent, of_weights):
    """What sums of products are to be multiplied by; infinity where that is too large. Both as from ``scales_of``."""
    return float_of(min(int32(exponent + of_weights), int32(NO_NUMBER)) << MANTISSA)


@device_function
def split_pair(low, high):
    """Two numbers, scaled, as two words: of their larger parts, and of their smaller ones."""
    larger = pack_f16(low, high)
    return larger, pack_f16(low - f16_to_f32(larger, False), high - f16_to_f32(larger, True))


@device_function
def _largest_number(v, at, window, first):
    """The largest magnitude in the windows that is no infinity and no NaN."""
    largest = float32(0)
    for q in range(first, window):
        for h in range(SPLIT_ROWS):
            largest = larger_finite(largest, float_of(v[at + h * window + q]))
    return largest


def make_split(window: int, first: int):
    """A device function: the operands of SPLIT_ROWS rows of ``window`` float32 in ``v`` from ``at`` on, which they
    replace; the columns before ``first`` do not count. All lanes of a warp call it with the ``scales_of`` the weights.
    It returns what the sums of products are to be multiplied by, infinity where that is too large.

    Words of two rows each: the larger parts of rows 0 and 1, of rows 2 and 3, then the smaller ones.
    """

    @device_function
    def split(v, at, scales):
        least, of_weights = scales
        largest = cuda.local.array(SPLIT_ROWS, dtype=float32)  # of each row: not every one waits for the one before
        for h in range(SPLIT_ROWS):
            largest[h] = float32(0)
        for q in range(first, window):
            for h in range(SPLIT_ROWS):
                largest[h] = larger_magnitude(largest[h], float_of(v[at + h * window + q]))
        largest[0], largest[2] = larger_magnitude(largest[0], largest[1]), larger_magnitude(largest[2], largest[3])
        exponent = exponent_of_warp(larger_magnitude(largest[0], largest[2]))
        if exponent == NO_NUMBER:  # an infinity has no scale, but numbers beside it have
            exponent = exponent_of_warp(_largest_number(v, at, window, first))
        exponent = max(exponent, least)
        scale = scale_of(exponent)
        for q in range(first, window):
            for h in range(0, SPLIT_ROWS, 2):
                low, high = float_of(v[at + h * window + q]) * scale, float_of(v[at + (h + 1) * window + q]) * scale
                v[at + h * window + q], v[at + (h + 1) * window + q] = split_pair(low, high)
            # Larger parts first: the two words between are in each other's place.
            smaller = v[at + window + q]
            v[at + window + q] = v[at + 2 * window + q]
            v[at + 2 * window + q] = smaller
        return inverse_of_sums(exponent, of_weights)

    return split
