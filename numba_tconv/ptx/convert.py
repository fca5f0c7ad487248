"""Conversions between number formats."""

import numpy as np
from llvmlite import ir
from numba import types

from .core import asm, f32, i16, i32, instruction, operation


# Numba sees torch's bfloat16 as uint16.
def _bf16_to_f32(bits):
    return np.uint32(int(bits) << 16).view(np.float32)


@instruction(_bf16_to_f32, types.uint16, result=types.float32)
def bf16_to_f32(context, builder, sig, args):
    wide = builder.shl(builder.zext(args[0], i32), ir.Constant(i32, 16))
    return builder.bitcast(wide, ir.FloatType())


def _f32_to_bf16(value):
    bits = int(np.float32(value).view(np.uint32))
    if value != value:
        return np.uint16(0x7FFF)
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


f32_to_bf16 = operation("cvt.rn.bf16.f32 $0, $1;", types.uint16, types.float32, meaning=_f32_to_bf16)
f32_to_bf16.__doc__ = """(value): nearest even, keep NaN (from sm_80)."""


def _packed_f16(low, high):
    with np.errstate(over="ignore"):
        return np.array([low, high], np.float32).astype(np.float16).view(np.int32)[0]


# (low, high)
_TO_PAIR = types.int32, types.float32, types.float32
pack_f16 = operation("cvt.rn.f16x2.f32 $0, $2, $1;", *_TO_PAIR, meaning=_packed_f16)
pack_bf16 = operation("cvt.rn.bf16x2.f32 $0, $2, $1;", *_TO_PAIR)


def _half_of(word, upper):
    return np.float32(np.array([word], np.int32).view(np.float16)[1 if upper else 0])


@instruction(_half_of, types.int32, types.boolean, result=types.float32)
def f16_to_f32(context, builder, sig, args):
    shift = builder.select(args[1], ir.Constant(i32, 16), ir.Constant(i32, 0))
    bits = builder.trunc(builder.lshr(args[0], shift), i16)
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), f32)


def _round_tf32(value):
    bits = int(np.float32(value).view(np.uint32))
    if value != value:
        return np.float32(value)
    return np.uint32((bits + 0x1000) & 0xFFFFE000).view(np.float32)


@instruction(_round_tf32, types.float32, result=types.float32)
def round_tf32(context, builder, sig, args):
    """cvt.rna.tf32.f32: ten mantissa bits, ties away from zero; keep NaN and infinities."""
    return builder.bitcast(asm(builder, i32, args, "cvt.rna.tf32.f32 $0, $1;", "=r,f"), ir.FloatType())


@instruction(lambda value: np.float32(value).view(np.int32), types.float32, result=types.int32)
def bits_of(context, builder, sig, args):
    return builder.bitcast(args[0], i32)


@instruction(lambda bits: np.int32(bits).view(np.float32), types.int32, result=types.float32)
def float_of(context, builder, sig, args):
    return builder.bitcast(args[0], ir.FloatType())


def _tf32_operand(value):
    """Keeps the last 13 bits, to reveal their use."""
    value = np.float32(value)
    power = (value.view(np.int32) & np.int32(-0x800000)).view(np.float32)
    return np.float32(np.float64(power) * 2.0**-11 + np.float64(value)).view(np.int32)


@instruction(_tf32_operand, types.float32, result=types.int32)
def tf32_operand(context, builder, sig, args):
    """``round_tf32`` for tensor cores, which ignore the last 13 bits: adds half a unit of the tenth mantissa bit."""
    power = builder.bitcast(builder.and_(builder.bitcast(args[0], i32), ir.Constant(i32, -0x800000)), f32)
    return builder.bitcast(builder.fma(power, ir.Constant(f32, 2.0**-11), args[0]), i32)
