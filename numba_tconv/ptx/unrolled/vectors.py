"""Vectors of 16 bytes (n elements) between shared memory and registers."""

from llvmlite import ir
from numba import types

from numba_tconv.ptx.core import SHARED, i16, i32, i64, instruction, item


def _load_vector(local, at, shared, index):
    n = 16 // shared.itemsize
    local[at : at + n] = shared[index : index + n]


@instruction(_load_vector)
def load_vector(typingctx, local, at, shared, index):
    """``local[at:at+n] = shared[index:index+n]``; ``index`` is a multiple of n."""
    element = shared.dtype

    def codegen(context, builder, sig, args):
        value_type = context.get_value_type(element)
        n = 16 * 8 // element.bitwidth
        source = item(context, builder, sig.args[2], args[2], args[3])
        vector = _words(value_type, element)
        value = builder.load(builder.bitcast(source, ir.PointerType(vector)), align=16)
        target = item(context, builder, sig.args[0], args[0], args[1])
        for z in range(n):
            slot = builder.gep(target, [ir.Constant(i64, z)])
            each = builder.extract_element(value, ir.Constant(i32, z * vector.count // n))
            if vector.count < n:
                each = builder.trunc(builder.lshr(each, ir.Constant(i32, 16)) if z % 2 else each, i16)
                each = each if value_type == i16 else builder.bitcast(each, value_type)
            builder.store(each, slot)
        return context.get_dummy_value()

    return types.void(local, types.intp, shared, types.intp), codegen


# In a loop ptxas recomputes an array's address, but keeps this one in a register.
@instruction(lambda shared: 0)
def shared_base(typingctx, shared):
    """The shared address of ``shared[0]``; 0 in the simulator."""

    def codegen(context, builder, sig, args):
        window = ir.PointerType(context.get_value_type(shared.dtype), SHARED)
        first = item(context, builder, sig.args[0], args[0], ir.Constant(i64, 0))
        return builder.ptrtoint(builder.addrspacecast(first, window), i32)

    return types.int32(shared), codegen


@instruction(lambda local, at, shared, address: _load_vector(local, at, shared, address // shared.itemsize))
def load_vector_at(typingctx, local, at, shared, address):
    """``load_vector`` from an int32 address."""
    element = shared.dtype

    def codegen(context, builder, sig, args):
        n = 16 * 8 // element.bitwidth
        vector = ir.VectorType(context.get_value_type(element), n)
        value = builder.load(builder.inttoptr(args[3], ir.PointerType(vector, SHARED)), align=16)
        target = item(context, builder, sig.args[0], args[0], args[1])
        for z in range(n):
            slot = builder.gep(target, [ir.Constant(i64, z)])
            builder.store(builder.extract_element(value, ir.Constant(i32, z)), slot)
        return context.get_dummy_value()

    return types.void(local, types.intp, shared, types.int32), codegen


def _words(value_type, element):
    """The type of 16 bytes. 16-bit elements go as four words, because LLVM splits vectors of eight."""
    return ir.VectorType(i32, 4) if element.bitwidth == 16 else ir.VectorType(value_type, 128 // element.bitwidth)


def _store_vector(context, builder, array_type, array, index, slot):
    n = 16 * 8 // array_type.dtype.bitwidth
    vector = _words(context.get_value_type(array_type.dtype), array_type.dtype)
    value = ir.Constant(vector, ir.Undefined)
    elements = [builder.load(builder.gep(slot, [ir.Constant(i64, z)])) for z in range(n)]
    if vector.count < n:
        halves = [builder.zext(e if e.type == i16 else builder.bitcast(e, i16), i32) for e in elements]
        elements = [
            builder.or_(low, builder.shl(high, ir.Constant(i32, 16)))
            for low, high in zip(halves[::2], halves[1::2], strict=True)
        ]
    for z, element in enumerate(elements):
        value = builder.insert_element(value, element, ir.Constant(i32, z))
    target = item(context, builder, array_type, array, index)
    builder.store(value, builder.bitcast(target, ir.PointerType(vector)), align=16)


@instruction(lambda shared, index, local, at: _load_vector(shared, index, local, at))
def store_vector(typingctx, shared, index, local, at):
    """``shared[index:index+n] = local[at:at+n]``; ``index`` is a multiple of n."""

    def codegen(context, builder, sig, args):
        slot = item(context, builder, sig.args[2], args[2], args[3])
        _store_vector(context, builder, sig.args[0], args[0], args[1], slot)
        return context.get_dummy_value()

    return types.void(shared, types.intp, local, types.intp), codegen


def _add_vectors(local, count, stride, shared, index):
    n = 16 // shared.itemsize
    for q in range(count):
        local[q * n : q * n + n] += shared[index + q * stride : index + q * stride + n]


def add_vectors(count, stride):
    """(local, shared, index): ``local[q*n:q*n+n] += shared[index+q*stride:][:n]`` for q below ``count``."""

    @instruction(lambda local, shared, index: _add_vectors(local, count, stride, shared, index))
    def add_vectors_of(typingctx, local, shared, index):
        def codegen(context, builder, sig, args):
            for slot, value in _vectors(context, builder, sig, args, count, stride):
                for z in range(value.type.count):
                    element = builder.extract_element(value, ir.Constant(i32, z))
                    register = builder.gep(slot, [ir.Constant(i64, z)])
                    builder.store(builder.fadd(builder.load(register), element), register)
            return context.get_dummy_value()

        return types.void(local, shared, types.intp), codegen

    return add_vectors_of


def store_vectors(count, stride):
    """(shared, index, local): ``shared[index+q*stride:][:n] = local[q*n:q*n+n]`` for q below ``count``."""

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
    element = sig.args[1].dtype
    n = 16 * 8 // element.bitwidth
    vector = ir.VectorType(context.get_value_type(element), n)
    local = context.make_array(sig.args[0])(context, builder, args[0]).data
    for q in range(count):
        index = builder.add(args[2], ir.Constant(i64, q * stride))
        source = item(context, builder, sig.args[1], args[1], index)
        value = builder.load(builder.bitcast(source, ir.PointerType(vector)), align=16)
        yield builder.gep(local, [ir.Constant(i64, q * n)]), value
