"""Upper halves: sums put aside in 16 bits each, and nothing is lost.

The upper 16 bits of a float32 are a number (a bfloat16) of its sign, its exponent and its first seven mantissa bits.
What is left of the sum without that number is a float32, too, and at most 2^-7 of it: the sum goes on from there, and
its next additions round what is that much smaller. Later what was put aside is added, and the whole taken apart again:
so any number of partial sums takes half the room of one.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from .core import i32, i64, instruction, item

UPPER = -65536  # the mask of the upper half
WORDS = 4  # in 16 bytes
SUMS = 2 * WORDS  # whose upper halves are in 16 bytes


def _upper_bits(sums):
    return np.asarray(sums, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)


def store_upper_halves(count, stride):
    """``shared[index+q*stride:][:4]`` = the upper halves of ``local[8*q:8*q+8]``, two a word, for q below ``count``;
    ``local`` keeps the rest: zero, where nothing or an infinity is all there is.

    ``local``, ``shared``: float32; ``index``, ``stride``: multiples of 4.
    """

    def meaning(shared, index, local):
        for q in range(count):
            sums = local[q * SUMS : (q + 1) * SUMS]
            upper = _upper_bits(sums)
            shared[index + q * stride :][:WORDS] = (upper[::2] >> np.uint32(16) | upper[1::2]).view(np.float32)
            with np.errstate(invalid="ignore"):
                rest = sums - upper.view(np.float32)
            sums[:] = np.where(np.isnan(rest), np.float32(0), rest)

    @instruction(meaning)
    def store_upper_halves_of(typingctx, shared, index, local):
        def codegen(context, builder, sig, args):
            registers = context.make_array(sig.args[2])(context, builder, args[2]).data
            zero = ir.Constant(ir.FloatType(), 0.0)

            def upper_of(e):
                slot = builder.gep(registers, [ir.Constant(i64, e)])
                value = builder.load(slot)
                upper = builder.and_(builder.bitcast(value, i32), ir.Constant(i32, UPPER))
                rest = builder.fsub(value, builder.bitcast(upper, ir.FloatType()))
                builder.store(builder.select(builder.fcmp_unordered("uno", rest, rest), zero, rest), slot)
                return upper

            for q in range(count):
                words = ir.Constant(ir.VectorType(i32, WORDS), ir.Undefined)
                for z in range(WORDS):
                    low, high = upper_of(q * SUMS + 2 * z), upper_of(q * SUMS + 2 * z + 1)
                    word = builder.or_(builder.lshr(low, ir.Constant(i32, 16)), high)
                    words = builder.insert_element(words, word, ir.Constant(i32, z))
                builder.store(words, _vector(context, builder, sig.args[0], args[0], args[1], q * stride), align=16)
            return context.get_dummy_value()

        return types.void(shared, types.intp, local), codegen

    return store_upper_halves_of


def add_upper_halves(count, stride):
    """``local[8*q:8*q+8] +=`` the upper halves in ``shared[index+q*stride:][:4]``, for q below ``count``."""

    def meaning(local, shared, index):
        for q in range(count):
            words = np.asarray(shared[index + q * stride :][:WORDS], np.float32).view(np.uint32)
            local[q * SUMS : (q + 1) * SUMS : 2] += (words << np.uint32(16)).view(np.float32)
            local[q * SUMS + 1 : (q + 1) * SUMS : 2] += _upper_bits(words.view(np.float32)).view(np.float32)

    @instruction(meaning)
    def add_upper_halves_of(typingctx, local, shared, index):
        def codegen(context, builder, sig, args):
            registers = context.make_array(sig.args[0])(context, builder, args[0]).data
            for q in range(count):
                source = _vector(context, builder, sig.args[1], args[1], args[2], q * stride)
                words = builder.load(source, align=16)
                for z in range(WORDS):
                    word = builder.extract_element(words, ir.Constant(i32, z))
                    low = builder.shl(word, ir.Constant(i32, 16))
                    high = builder.and_(word, ir.Constant(i32, UPPER))
                    for half, bits in enumerate((low, high)):
                        slot = builder.gep(registers, [ir.Constant(i64, q * SUMS + 2 * z + half)])
                        upper = builder.bitcast(bits, ir.FloatType())
                        builder.store(builder.fadd(builder.load(slot), upper), slot)
            return context.get_dummy_value()

        return types.void(local, shared, types.intp), codegen

    return add_upper_halves_of


def _vector(context, builder, array_type, array, index, offset):
    """Pointer to four words of a shared array."""
    at = item(context, builder, array_type, array, builder.add(index, ir.Constant(i64, offset)))
    return builder.bitcast(at, ir.PointerType(ir.VectorType(i32, WORDS)))
