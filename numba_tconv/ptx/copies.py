"""Copies from global to shared memory; shared memory by address."""

from llvmlite import ir
from numba import types

from .core import ELEMENT, SHARED, asm, i32, i64, instruction, item, no_meaning, operation, word
from .simulator.meanings import address


def cp_async(elements):
    """(shared, s, source, g, valid): cp.async of ``elements`` from source[g:] to shared[s:].

    Copies zeros unless ``valid``. Both addresses are multiples of the size: 4, 8 or 16 bytes."""

    def meaning(shared, s, source, g, valid):
        shared[s : s + elements] = source[g : g + elements] if valid else 0

    @instruction(meaning)
    def cp_async_elements(typingctx, shared, s, source, g, valid):
        size = elements * shared.dtype.bitwidth // 8
        if size not in (4, 8, 16):
            raise ValueError(f"cp.async copies 4, 8 or 16 bytes, not {size}")
        # .cg, which bypasses L1, needs 16 bytes.
        text = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0], [$1], {size}, $2;"

        def codegen(context, builder, sig, args):
            target = item(context, builder, sig.args[0], args[0], args[1])
            window = ir.PointerType(context.get_value_type(shared.dtype), SHARED)
            target = builder.ptrtoint(builder.addrspacecast(target, window), i32)
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
@instruction(no_meaning)
def shared_address(typingctx, shared, index):
    def codegen(context, builder, sig, args):
        window = ir.PointerType(context.get_value_type(shared.dtype), SHARED)
        return builder.ptrtoint(builder.addrspacecast(item(context, builder, sig.args[0], *args), window), i32)

    return types.int32(shared, types.intp), codegen


@instruction(no_meaning)
def ld_shared_u16(typingctx, address):
    def codegen(context, builder, sig, args):
        return builder.zext(asm(builder, ir.IntType(16), args, "ld.shared.u16 $0, [$1];", "=h,r,~{memory}"), i32)

    return types.int32(types.int32), codegen


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


@instruction(address)
def global_address(typingctx, source, g):
    def codegen(context, builder, sig, args):
        return builder.ptrtoint(item(context, builder, sig.args[0], *args), i64)

    return types.int64(source, types.intp), codegen


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
cp_async_bulk_commit.__doc__ = (
    """(): this thread's bulk stores since the last commit form a group, perhaps an empty one."""
)

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

    @instruction(meaning)
    def take_of(typingctx, values, local, case):
        def codegen(context, builder, sig, args):
            source, target = (context.make_array(sig.args[1 - z])(context, builder, args[1 - z]).data for z in range(2))
            after = builder.append_basic_block("taken")
            blocks = [builder.append_basic_block(f"case{number}") for number in range(cases)]
            switch = builder.switch(args[2], blocks[-1])
            for number, block in enumerate(blocks):
                if number < cases - 1:
                    switch.add_case(ir.Constant(i32, number), block)
                builder.position_at_end(block)
                for z, offset in enumerate(offsets):
                    value = builder.load(builder.gep(source, [ir.Constant(i64, offset + number * stride)]))
                    builder.store(value, builder.gep(target, [ir.Constant(i64, z)]))
                builder.branch(after)
            builder.position_at_end(after)
            return context.get_dummy_value()

        return types.void(values, local, types.int32), codegen

    return take_of
