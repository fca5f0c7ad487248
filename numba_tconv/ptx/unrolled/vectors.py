"""Vectors of 16 bytes (n elements) between shared memory and registers."""

from llvmlite import ir
from numba import types

from numba_tconv.ptx.core import ANY, SHARED, get, i16, i32, i64, instruction, item, local_of, put, shared_item

from .runs import load_as, store_as


def _load_vector(local, at, shared, index):
    n = 16 // shared.itemsize
    local[at : at + n] = shared[index : index + n]


@instruction(_load_vector, ANY, types.intp, ANY, types.intp)
def load_vector(context, builder, sig, args):
    """``local[at:at+n] = shared[index:index+n]``; ``index`` is a multiple of n."""
    element = sig.args[2].dtype
    value_type, n = context.get_value_type(element), 16 * 8 // element.bitwidth
    vector = _words(value_type, element)
    value = load_as(builder, item(context, builder, sig.args[2], args[2], args[3]), vector)
    target = item(context, builder, sig.args[0], args[0], args[1])
    for z in range(n):
        each = builder.extract_element(value, ir.Constant(i32, z * vector.count // n))
        if vector.count < n:
            each = builder.trunc(builder.lshr(each, ir.Constant(i32, 16)) if z % 2 else each, i16)
            each = each if value_type == i16 else builder.bitcast(each, value_type)
        put(builder, target, z, each)


# In a loop ptxas recomputes an array's address, but keeps this one in a register.
@instruction(lambda shared: 0, ANY, result=types.int32)
def shared_base(context, builder, sig, args):
    """The shared address of ``shared[0]``; 0 in the simulator."""
    return shared_item(context, builder, sig.args[0], args[0], ir.Constant(i64, 0))


def _load_vector_at(local, at, shared, address):
    _load_vector(local, at, shared, address // shared.itemsize)


@instruction(_load_vector_at, ANY, types.intp, ANY, types.int32)
def load_vector_at(context, builder, sig, args):
    """``load_vector`` from an int32 address."""
    element = sig.args[2].dtype
    vector = ir.VectorType(context.get_value_type(element), 16 * 8 // element.bitwidth)
    value = builder.load(builder.inttoptr(args[3], ir.PointerType(vector, SHARED)), align=16)
    target = item(context, builder, sig.args[0], args[0], args[1])
    for z in range(vector.count):
        put(builder, target, z, builder.extract_element(value, ir.Constant(i32, z)))


def _words(value_type, element):
    """The type of 16 bytes. 16-bit elements go as four words, because LLVM splits vectors of eight."""
    return ir.VectorType(i32, 4) if element.bitwidth == 16 else ir.VectorType(value_type, 128 // element.bitwidth)


def _store(context, builder, array_type, array, index, slot):
    n = 16 * 8 // array_type.dtype.bitwidth
    vector = _words(context.get_value_type(array_type.dtype), array_type.dtype)
    value, elements = ir.Constant(vector, ir.Undefined), [get(builder, slot, z) for z in range(n)]
    if vector.count < n:
        halves = [builder.zext(e if e.type == i16 else builder.bitcast(e, i16), i32) for e in elements]
        pairs = zip(halves[::2], halves[1::2], strict=True)
        elements = [builder.or_(low, builder.shl(high, ir.Constant(i32, 16))) for low, high in pairs]
    for z, element in enumerate(elements):
        value = builder.insert_element(value, element, ir.Constant(i32, z))
    store_as(builder, value, item(context, builder, array_type, array, index))


@instruction(_load_vector, ANY, types.intp, ANY, types.intp)
def store_vector(context, builder, sig, args):
    """``shared[index:index+n] = local[at:at+n]``; ``index`` is a multiple of n."""
    slot = item(context, builder, sig.args[2], args[2], args[3])
    _store(context, builder, sig.args[0], args[0], args[1], slot)


def _add_vectors(local, count, stride, shared, index):
    n = 16 // shared.itemsize
    for q in range(count):
        local[q * n : q * n + n] += shared[index + q * stride : index + q * stride + n]


def add_vectors(count, stride):
    """(local, shared, index): ``local[q*n:q*n+n] += shared[index+q*stride:][:n]`` for q below ``count``."""

    @instruction(lambda local, shared, index: _add_vectors(local, count, stride, shared, index), ANY, ANY, types.intp)
    def add_vectors_of(context, builder, sig, args):
        element = sig.args[1].dtype
        vector = ir.VectorType(context.get_value_type(element), 16 * 8 // element.bitwidth)
        local = local_of(context, builder, sig, args, 0)
        for q in range(count):
            index = builder.add(args[2], ir.Constant(i64, q * stride))
            value = load_as(builder, item(context, builder, sig.args[1], args[1], index), vector)
            slot = builder.gep(local, [ir.Constant(i64, q * vector.count)])
            for z in range(vector.count):
                added = builder.extract_element(value, ir.Constant(i32, z))
                put(builder, slot, z, builder.fadd(get(builder, slot, z), added))

    return add_vectors_of


def store_vectors(count, stride):
    """(shared, index, local): ``shared[index+q*stride:][:n] = local[q*n:q*n+n]`` for q below ``count``."""

    def meaning(shared, index, local):
        n = 16 // shared.itemsize
        for q in range(count):
            shared[index + q * stride : index + q * stride + n] = local[q * n : q * n + n]

    @instruction(meaning, ANY, types.intp, ANY)
    def store_vectors_of(context, builder, sig, args):
        local, n = local_of(context, builder, sig, args, 2), 16 * 8 // sig.args[0].dtype.bitwidth
        for q in range(count):
            index = builder.add(args[1], ir.Constant(i64, q * stride))
            _store(context, builder, sig.args[0], args[0], index, builder.gep(local, [ir.Constant(i64, q * n)]))

    return store_vectors_of
