"""Copies from global to shared memory; shared memory by address."""

from functools import partial

from llvmlite import ir
from numba import types

from .core import (
    ANY,
    ELEMENT,
    asm,
    get,
    i16,
    i32,
    i64,
    instruction,
    intrinsic,
    item,
    local_of,
    no_meaning,
    operation,
    put,
    shared_item,
    switch,
    word,
)
from .simulator.meanings import address


def cp_async(elements):
    """(shared, s, source, g, valid): cp.async of ``elements`` from source[g:] to shared[s:].

    Copies zeros unless ``valid``. Both addresses are multiples of the size: 4, 8 or 16 bytes."""

    def meaning(shared, s, source, g, valid):
        shared[s : s + elements] = source[g : g + elements] if valid else 0

    @intrinsic(meaning)
    def cp_async_elements(typingctx, shared, s, source, g, valid):
        size = elements * shared.dtype.bitwidth // 8
        if size not in (4, 8, 16):
            raise ValueError(f"cp.async copies 4, 8 or 16 bytes, not {size}")
        # .cg, which bypasses L1, needs 16 bytes.
        text = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0], [$1], {size}, $2;"

        def codegen(context, builder, sig, args):
            target = shared_item(context, builder, shared, args[0], args[1])
            origin = builder.ptrtoint(item(context, builder, sig.args[2], args[2], args[3]), i64)
            count = builder.mul(builder.zext(args[4], i32), ir.Constant(i32, size))
            asm(builder, ir.VoidType(), [target, origin, count], text, "r,l,r,~{memory}")
            return context.get_dummy_value()

        return types.void(shared, types.intp, source, types.intp, types.boolean), codegen

    return cp_async_elements


cp_async_commit = word("cp.async.commit_group;", meaning=lambda: None)
cp_async_commit.__doc__ = """(): this thread's copies since the last commit form a group."""


def cp_async_wait(pending):
    """(): waits until all but this thread's ``pending`` newest groups have landed."""
    return word(f"cp.async.wait_group {pending};", meaning=lambda: None)


# Shared addresses are int32, in bytes.
@instruction(no_meaning, ANY, types.intp, result=types.int32)
def shared_address(context, builder, sig, args):
    return shared_item(context, builder, sig.args[0], *args)


@instruction(no_meaning, types.int32, result=types.int32)
def ld_shared_u16(context, builder, sig, args):
    return builder.zext(asm(builder, i16, args, "ld.shared.u16 $0, [$1];", "=h,r,~{memory}"), i32)


def ld_shared(count, kind):
    """(address): ld.shared of ``count`` (1, 2 or 4) values, as a tuple, or one value.

    ``kind``: float32, int32 or, for at most two, float64."""
    result = types.UniTuple(kind, count)
    name = {types.float32: "f32", types.float64: "f64"}.get(kind, "b32")
    text = f"ld.shared.v{count}.{name} {{{', '.join(f'${z}' for z in range(count))}}}, [${count}];"
    if count == 1:
        result, text = kind, f"ld.shared.{name} $0, [$1];"

    return operation(text, result, types.int32, memory=True)


def ldmatrix(count, transposed=False):
    """(address): ldmatrix of ``count`` (2 or 4) matrices of eight rows of 16 bytes, as a tuple of words.

    Lane 8*m + r gives the address of row r of matrix m. Lane 4*r + c gets word c of row r of each; of ``transposed``
    ones (16 bits), elements 2*c and 2*c + 1 of column r."""
    kind = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    text = f"{kind} {{{', '.join(f'${z}' for z in range(count))}}}, [${count}];"
    return operation(text, types.UniTuple(types.int32, count), types.int32, memory=True)


# (address, values): the address is a multiple of the values' size.
st_shared = word("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", types.int32, *[types.float32] * 4)
st_shared_f32 = word("st.shared.f32 [$0], $1;", types.int32, types.float32)
st_shared_v2_f32 = word("st.shared.v2.f32 [$0], {$1, $2};", types.int32, *[types.float32] * 2)
st_shared_b32 = word("st.shared.b32 [$0], $1;", types.int32, types.int32)
st_shared_u16 = word("st.shared.u16 [$0], $1;", types.int32, types.int32)
st_shared_v2_b32 = word("st.shared.v2.b32 [$0], {$1, $2};", *[types.int32] * 3)
# (lower half's address, upper half's, word)
st_shared_halves = word(
    "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\nst.shared.b16 [$0], low;\nst.shared.b16 [$1], high;\n}",
    *[types.int32] * 3,
)


def cp_async_to(size):
    """(address, source, g, used): cp.async of ``size`` (4 or 16) bytes from source[g:], zeros after ``used``.

    Both addresses are multiples of ``size``."""
    kind = "cg" if size == 16 else "ca"
    return word(f"cp.async.{kind}.shared.global [$0], [$1], {size}, $2;", types.int32, ELEMENT, types.int32)


@instruction(address, ANY, types.intp, result=types.int64)
def global_address(context, builder, sig, args):
    return builder.ptrtoint(item(context, builder, sig.args[0], *args), i64)


cp_async_vector = word("cp.async.cg.shared.global [$0], [$1], 16;", types.int32, types.int64)
cp_async_vector.__doc__ = """(address, global_address): cp.async of 16 bytes, all of them; both addresses are multiples
of 16. ``cp_async_to``, with its size told at run time, takes more instructions."""

cp_async_word = word("cp.async.ca.shared.global [$0], [$1], 4;", types.int32, types.int64)


cp_async_bulk = word(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    *(types.int32, ELEMENT, types.int32, types.int32),
)
cp_async_bulk.__doc__ = """(address, source, g, size, barrier): one thread copies ``size`` bytes from ``source[g:]`` to
shared memory; the mbarrier counts them. ``size`` and both addresses are multiples of 16."""

cp_async_bulk_store = word(
    "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", ELEMENT, types.int32, types.int32
)
cp_async_bulk_store.__doc__ = """(target, index, address, size): one thread copies ``size`` bytes from shared memory to
``target[index:]``, in its next bulk group. ``size`` and both addresses are multiples of 16. Threads that wrote the
bytes first call ``fence_async``, then meet at a barrier."""

cp_async_bulk_commit = word("cp.async.bulk.commit_group;")
cp_async_bulk_commit.__doc__ = """(): this thread's bulk stores since the last commit form a group, maybe empty."""

fence_async = word("fence.proxy.async.shared::cta;")
fence_async.__doc__ = """(): what this thread has written to shared memory is seen by copies that begin later."""


def cp_async_bulk_wait_read(pending):
    """(): waits until all but the ``pending`` newest bulk groups have read shared memory."""
    return word(f"cp.async.bulk.wait_group.read {pending};")


def take(offsets, stride, cases):
    """(values, local, case): ``values[z] = local[offsets[z] + case * stride]``, for ``case`` below ``cases``.

    A switch keeps ``local`` in registers."""

    def meaning(values, local, case):
        for z, offset in enumerate(offsets):
            values[z] = local[offset + case * stride]

    @instruction(meaning, ANY, ANY, types.int32)
    def take_of(context, builder, sig, args):
        source, target = (local_of(context, builder, sig, args, k) for k in (1, 0))

        def code(number):
            for z, offset in enumerate(offsets):
                put(builder, target, z, get(builder, source, offset + number * stride))

        switch(builder, args[2], [partial(code, number) for number in range(cases)])

    return take_of
