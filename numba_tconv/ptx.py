"""Instructions that plain Numba has no word for, and the only place that knows llvmlite.

Each is named after its PTX instruction. Beside each stands its meaning in Python: in the CUDA simulator
(NUMBA_ENABLE_CUDASIM=1) the kernels run on the meanings, so that what a kernel does is checked without a GPU.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import cuda, types  # noqa: F401  (numba-cuda must be imported before numba.cuda.extending)
from numba.core import config

SIMULATOR = bool(config.ENABLE_CUDASIM)
SHARED = 3  # LLVM's address space
i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def instruction(meaning):
    """Decorator: on a GPU the decorated Numba intrinsic, in the simulator ``meaning``."""

    def choose(typed):
        if SIMULATOR:
            return meaning
        from numba.cuda.extending import intrinsic

        return intrinsic(typed)

    return choose


def _item(context, builder, array_type, array, index):
    """Pointer to the item ``index`` of a contiguous one-dimensional array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _asm(builder, result, arguments, text, constraints):
    function = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), arguments)


# ld.shared.v4.b32 / v2.b64: 16 bytes by one instruction, into as many consecutive elements of a local array.
def _load_vector(local, at, shared, index):
    n = 16 // shared.itemsize
    local[at : at + n] = shared[index : index + n]


@instruction(_load_vector)
def load_vector(typingctx, local, at, shared, index):
    """``local[at:at+n] = shared[index:index+n]``, n = 16 bytes / itemsize; ``index`` a multiple of n."""
    element = shared.dtype

    def codegen(context, builder, sig, args):
        value_type = context.get_value_type(element)
        n = 16 * 8 // element.bitwidth
        source = _item(context, builder, sig.args[2], args[2], args[3])
        vector = ir.VectorType(value_type, n)
        value = builder.load(builder.bitcast(source, ir.PointerType(vector)), align=16)
        target = _item(context, builder, sig.args[0], args[0], args[1])
        for z in range(n):
            slot = builder.gep(target, [ir.Constant(i64, z)])
            builder.store(builder.extract_element(value, ir.Constant(i32, z)), slot)
        return context.get_dummy_value()

    return types.void(local, types.intp, shared, types.intp), codegen


def _store_vector(context, builder, array_type, array, index, slot):
    """16 bytes from the local array at ``slot`` to an item of a shared array."""
    n = 16 * 8 // array_type.dtype.bitwidth
    vector = ir.VectorType(context.get_value_type(array_type.dtype), n)
    value = ir.Constant(vector, ir.Undefined)
    for z in range(n):
        item = builder.load(builder.gep(slot, [ir.Constant(i64, z)]))
        value = builder.insert_element(value, item, ir.Constant(i32, z))
    target = _item(context, builder, array_type, array, index)
    builder.store(value, builder.bitcast(target, ir.PointerType(vector)), align=16)


@instruction(lambda shared, index, local, at: _load_vector(shared, index, local, at))
def store_vector(typingctx, shared, index, local, at):
    """``shared[index:index+n] = local[at:at+n]``: st.shared.v4.b32 or v2.b64; ``index`` a multiple of n."""

    def codegen(context, builder, sig, args):
        slot = _item(context, builder, sig.args[2], args[2], args[3])
        _store_vector(context, builder, sig.args[0], args[0], args[1], slot)
        return context.get_dummy_value()

    return types.void(shared, types.intp, local, types.intp), codegen


# The same for a whole local array, vector by vector, as straight-line code: LLVM leaves a loop of that size a loop, and
# an array indexed by a loop variable lies in slow local memory instead of registers.
def _add_vectors(local, count, stride, shared, index):
    n = 16 // shared.itemsize
    for q in range(count):
        local[q * n : q * n + n] += shared[index + q * stride : index + q * stride + n]


def add_vectors(count, stride):
    """``local[q*n:q*n+n] += shared[index+q*stride:][:n]`` for q below ``count``, n = 16 bytes / itemsize."""

    @instruction(lambda local, shared, index: _add_vectors(local, count, stride, shared, index))
    def add_vectors_of(typingctx, local, shared, index):
        def codegen(context, builder, sig, args):
            for slot, value in _vectors(context, builder, sig, args, count, stride):
                for z in range(value.type.count):
                    item = builder.extract_element(value, ir.Constant(i32, z))
                    register = builder.gep(slot, [ir.Constant(i64, z)])
                    builder.store(builder.fadd(builder.load(register), item), register)
            return context.get_dummy_value()

        return types.void(local, shared, types.intp), codegen

    return add_vectors_of


def store_vectors(count, stride):
    """``shared[index+q*stride:][:n] = local[q*n:q*n+n]`` for q below ``count``, n = 16 bytes / itemsize."""

    def meaning(shared, index, local):
        n = 16 // shared.itemsize
        for q in range(count):
            shared[index + q * stride : index + q * stride + n] = local[q * n : q * n + n]

    @instruction(meaning)
    def store_vectors_of(typingctx, shared, index, local):
        def codegen(context, builder, sig, args):
            local_array = context.make_array(sig.args[2])(context, builder, args[2]).data
            n = 16 * 8 // shared.dtype.bitwidth
            for q in range(count):
                index = builder.add(args[1], ir.Constant(i64, q * stride))
                slot = builder.gep(local_array, [ir.Constant(i64, q * n)])
                _store_vector(context, builder, sig.args[0], args[0], index, slot)
            return context.get_dummy_value()

        return types.void(shared, types.intp, local), codegen

    return store_vectors_of


def _vectors(context, builder, sig, args, count, stride):
    """For each q: where the vector goes in the local array, and its value in shared memory."""
    element = sig.args[1].dtype
    n = 16 * 8 // element.bitwidth
    vector = ir.VectorType(context.get_value_type(element), n)
    local = context.make_array(sig.args[0])(context, builder, args[0]).data
    for q in range(count):
        index = builder.add(args[2], ir.Constant(i64, q * stride))
        source = _item(context, builder, sig.args[1], args[1], index)
        value = builder.load(builder.bitcast(source, ir.PointerType(vector)), align=16)
        yield builder.gep(local, [ir.Constant(i64, q * n)]), value


# cp.async: global to shared memory without passing through registers; what is not valid is written as zeros.
def cp_async(elements):
    """cp.async of ``elements`` items: ``(shared, s, source, g, valid)`` copies source[g:] to shared[s:], or zeros.

    Both addresses must be multiples of the size copied, which must be 4, 8 or 16 bytes. ``source`` is a flat array.
    """

    def meaning(shared, s, source, g, valid):
        shared[s : s + elements] = source[g : g + elements] if valid else 0

    @instruction(meaning)
    def cp_async_elements(typingctx, shared, s, source, g, valid):
        size = elements * shared.dtype.bitwidth // 8
        if size not in (4, 8, 16):
            raise ValueError(f"cp.async copies 4, 8 or 16 bytes, not {size}")
        # .cg bypasses L1 and exists for 16 bytes only.
        text = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0], [$1], {size}, $2;"

        def codegen(context, builder, sig, args):
            target = _item(context, builder, sig.args[0], args[0], args[1])
            window = ir.PointerType(context.get_value_type(shared.dtype), SHARED)
            target = builder.ptrtoint(builder.addrspacecast(target, window), i32)
            origin = builder.ptrtoint(_item(context, builder, sig.args[2], args[2], args[3]), i64)
            count = builder.mul(builder.zext(args[4], i32), ir.Constant(i32, size))
            _asm(builder, ir.VoidType(), [target, origin, count], text, "r,l,r,~{memory}")
            return context.get_dummy_value()

        return types.void(shared, types.intp, source, types.intp, types.boolean), codegen

    return cp_async_elements


@instruction(lambda: None)
def cp_async_commit(typingctx):
    """cp.async.commit_group: the copies issued since the last commit form a group."""

    def codegen(context, builder, sig, args):
        _asm(builder, ir.VoidType(), [], "cp.async.commit_group;", "~{memory}")
        return context.get_dummy_value()

    return types.void(), codegen


def cp_async_wait(pending):
    """cp.async.wait_group: returns when at most ``pending`` of this thread's newest groups are still under way."""

    @instruction(lambda: None)
    def cp_async_wait_group(typingctx):
        def codegen(context, builder, sig, args):
            _asm(builder, ir.VoidType(), [], f"cp.async.wait_group {pending};", "~{memory}")
            return context.get_dummy_value()

        return types.void(), codegen

    return cp_async_wait_group


# bfloat16 is the upper half of a float32. Numba sees torch's bfloat16 as uint16.
def _bf16_to_f32(bits):
    return np.uint32(int(bits) << 16).view(np.float32)


@instruction(_bf16_to_f32)
def bf16_to_f32(typingctx, bits):
    """The float32 whose upper half is ``bits``: exact."""

    def codegen(context, builder, sig, args):
        wide = builder.shl(builder.zext(args[0], i32), ir.Constant(i32, 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), codegen


def _f32_to_bf16(value):
    bits = int(np.float32(value).view(np.uint32))
    if value != value:
        return np.uint16(0x7FFF)
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


@instruction(_f32_to_bf16)
def f32_to_bf16(typingctx, value):
    """cvt.rn.bf16.f32: rounded to nearest even, NaN kept (from sm_80)."""

    def codegen(context, builder, sig, args):
        return _asm(builder, i16, [args[0]], "cvt.rn.bf16.f32 $0, $1;", "=h,f")

    return types.uint16(types.float32), codegen
