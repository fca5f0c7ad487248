"""Runs between global memory and registers, in vectors of 16 bytes.

Straight-line, to keep arrays out of local memory."""

from functools import partial

from llvmlite import ir
from numba import types

from numba_tconv.ptx.core import ANY, asm, get, i16, i32, i64, instruction, item, local_of, put
from numba_tconv.ptx.simulator.meanings import guarded_run, run, stored_run

SHIFT = "shf.r.wrap.b32 $0, $1, $2, $3;"
PACK = {
    "bfloat16": "cvt.rn.bf16x2.f32 $0, $1, $2;",
    # cvt.rn.f16x2 needs sm_80; there ptxas fuses these.
    "float16": "{.reg .b16 b, a; cvt.rn.f16.f32 b, $1; cvt.rn.f16.f32 a, $2; mov.b32 $0, {a, b};}",
}


def pure(builder, result, arguments, text, constraints):
    function = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=False), arguments)


def widened(builder, name, word, upper):
    if name == "bfloat16":
        bits = builder.and_(word, ir.Constant(i32, -65536)) if upper else builder.shl(word, ir.Constant(i32, 16))
        return builder.bitcast(bits, ir.FloatType())
    text = "{{.reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.f32.f16 $0, {};}}".format("high" if upper else "low")
    return pure(builder, ir.FloatType(), [word], text, "=f,r")


def load_as(builder, pointer, kind, align=16):
    return builder.load(builder.bitcast(pointer, ir.PointerType(kind)), align=align)


def store_as(builder, value, pointer, align=16):
    builder.store(value, builder.bitcast(pointer, ir.PointerType(value.type)), align=align)


def load_run(element, count):
    """(window, source, first, skip): ``window[z] = source[first + skip + z]`` for z below ``count``, widened.

    Reads ``vectors_of(element, count)`` vectors from ``first``, 16-byte aligned; ``skip`` is less than a vector."""
    size = element.storage.bitwidth // 8
    vectors = vectors_of(element, count)

    @instruction(partial(run, element, count), ANY, ANY, types.intp, types.int32)
    def load_run_of(context, builder, sig, args):
        lanes, word = (2, i64) if size == 8 else (4, i32)
        kind = ir.VectorType(word, lanes)
        pointer = builder.bitcast(item(context, builder, sig.args[1], args[1], args[2]), ir.PointerType(kind))
        words = []
        for v in range(vectors):
            vector = builder.load(builder.gep(pointer, [ir.Constant(i64, v)]), align=16)
            words += [builder.extract_element(vector, ir.Constant(i32, z)) for z in range(lanes)]
        halves = size == 2
        need = count // 2 + 1 if halves else count
        shift = lanes // 2
        while shift:
            bit = ir.Constant(i32, shift * (1 + halves))
            moved = builder.icmp_signed("!=", builder.and_(args[3], bit), ir.Constant(i32, 0))
            left = min(need + shift - 1, len(words))
            words = [
                builder.select(moved, words[z + shift], words[z]) if z + shift < len(words) else words[z]
                for z in range(left)
            ]
            shift //= 2
        if halves:
            bits = builder.shl(builder.and_(args[3], ir.Constant(i32, 1)), ir.Constant(i32, 4))
            pairs = [
                pure(builder, i32, [words[z], words[min(z + 1, need - 1)], bits], SHIFT, "=r,r,r,r")
                for z in range(-(-count // 2))
            ]
            values = [widened(builder, element.name, pairs[z // 2], z % 2) for z in range(count)]
        else:
            values = [builder.bitcast(word, context.get_value_type(element.storage)) for word in words[:count]]
        local = local_of(context, builder, sig, args, 0)
        for z, value in enumerate(values):
            put(builder, local, z, value)

    return load_run_of


def vectors_of(element, count):
    """Vectors that hold ``count`` elements from any start."""
    vector = 128 // element.storage.bitwidth
    return -(-(count + vector - 1) // vector)


def load_guarded(element, count):
    """(window, source, at, stride, begin, length): ``window[z] = source[at + (begin + z) * stride]``, widened.

    For z below ``count``; zero where ``begin + z`` is not in [0, length)."""
    size = element.storage.bitwidth // 8
    letter, words = {2: ("h", i16), 4: ("r", i32), 8: ("l", i64)}[size]
    text = (
        "{.reg .pred inside; setp.lt.u32 inside, $1, $2; "
        f"mov.b{8 * size} $0, 0; @inside ld.global.b{8 * size} $0, [$3];}}"
    )

    @instruction(partial(guarded_run, element, count), ANY, ANY, *[types.int64] * 2, *[types.int32] * 2)
    def load_guarded_of(context, builder, sig, args):
        local = local_of(context, builder, sig, args, 0)
        kind = context.get_value_type(sig.args[0].dtype)
        # One moving address saves registers.
        index = builder.add(args[2], builder.mul(builder.sext(args[4], i64), args[3]))
        address = builder.ptrtoint(item(context, builder, sig.args[1], args[1], index), i64)
        hop = builder.mul(args[3], ir.Constant(i64, size))
        for z in range(count):
            position = builder.add(args[4], ir.Constant(i32, z))
            value = asm(builder, words, [position, args[5], address], text, f"={letter},r,r,l,~{{memory}}")
            address = builder.add(address, hop)
            if element.name == "bfloat16":
                value = builder.shl(builder.zext(value, i32), ir.Constant(i32, 16))
            elif element.name == "float16":
                value = pure(builder, kind, [value], "cvt.f32.f16 $0, $1;", "=f,h")
            put(builder, local, z, value if value.type == kind else builder.bitcast(value, kind))

    return load_guarded_of


def pack_vector(builder, element, numbers):
    if element.storage.bitwidth == 16:
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        numbers = [pure(builder, i32, [b, a], PACK[element.name], "=r,f,f") for a, b in pairs]
    value = ir.Constant(ir.VectorType(numbers[0].type, len(numbers)), ir.Undefined)
    for z, number in enumerate(numbers):
        value = builder.insert_element(value, number, ir.Constant(i32, z))
    return value


def store_run(element, count=None):
    """(target, index, values, at): ``target[index:] = values[at:at+count]``, narrowed; 16 bytes by default.

    ``target[index]`` is aligned to the size."""
    vector = count or 128 // element.storage.bitwidth
    size = vector * element.storage.bitwidth // 8

    @instruction(lambda *told: stored_run(element, *told, vector), ANY, types.intp, ANY, types.intp)
    def store_run_of(context, builder, sig, args):
        local = builder.gep(local_of(context, builder, sig, args, 2), [args[3]])
        numbers = [get(builder, local, z) for z in range(vector)]
        value = pack_vector(builder, element, numbers)
        store_as(builder, value, item(context, builder, sig.args[0], args[0], args[1]), size)

    return store_run_of
