"""Predicated loads and stores."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .core import asm, i32, i64, instruction, item, no_meaning


def st_global_if(count):
    """(wanted, target, index, words): st.global of ``count`` (1, 2 or 4) words if ``wanted``.

    ``words`` is a local int32 array; ``target[index]`` is aligned to their size."""
    words_text = "$1" if count == 1 else "{" + ", ".join(f"${1 + z}" for z in range(count)) + "}"
    kind = "b32" if count == 1 else f"v{count}.b32"
    text = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; @p st.global.{kind} [$0], {words_text}; }}"

    @instruction(no_meaning)
    def st_global_wanted(typingctx, wanted, target, index, words):
        def codegen(context, builder, sig, args):
            slot = builder.ptrtoint(item(context, builder, sig.args[1], args[1], args[2]), i64)
            source = context.make_array(sig.args[3])(context, builder, args[3]).data
            values = [builder.load(builder.gep(source, [ir.Constant(i64, z)])) for z in range(count)]
            constraints = ",".join(["l"] + ["r"] * (count + 1) + ["~{memory}"])
            asm(builder, ir.VoidType(), [slot, *values, builder.zext(args[0], i32)], text, constraints)
            return context.get_dummy_value()

        return types.void(types.boolean, target, types.intp, words), codegen

    return st_global_wanted


def ld_shared_st_global_if(count):
    """(wanted, target, index, address): ``count`` (1, 2 or 4) words from shared memory, stored if ``wanted``.

    Both addresses are aligned to their size."""
    names = [f"r{z}" for z in range(count)]
    kind, words = ("b32", names[0]) if count == 1 else (f"v{count}.b32", f"{{{', '.join(names)}}}")
    text = (
        f"{{ .reg .pred p; .reg .b32 {', '.join(names)}; setp.ne.b32 p, $2, 0; "
        f"ld.shared.{kind} {words}, [$1]; @p st.global.{kind} [$0], {words}; }}"
    )

    @instruction(no_meaning)
    def copy_wanted(typingctx, wanted, target, index, address):
        def codegen(context, builder, sig, args):
            slot = builder.ptrtoint(item(context, builder, sig.args[1], args[1], args[2]), i64)
            asm(builder, ir.VoidType(), [slot, args[3], builder.zext(args[0], i32)], text, "l,r,r,~{memory}")
            return context.get_dummy_value()

        return types.void(types.boolean, target, types.intp, types.int32), codegen

    return copy_wanted


@instruction(no_meaning)
def st_global_vector(typingctx, wanted, target, index, words):
    """If ``wanted``, stores four int32 to ``target[index:]``, 16-byte aligned."""
    text = "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }"

    def codegen(context, builder, sig, args):
        slot = builder.ptrtoint(item(context, builder, sig.args[1], args[1], args[2]), i64)
        values = [builder.extract_value(args[3], z) for z in range(4)]
        asm(builder, ir.VoidType(), [slot, *values, builder.zext(args[0], i32)], text, "l,r,r,r,r,r,~{memory}")
        return context.get_dummy_value()

    return types.void(types.boolean, target, types.intp, types.UniTuple(types.int32, 4)), codegen


@instruction(no_meaning)
def ld_global_vector(typingctx, wanted, source, index):
    """Four int32 from ``source[index:]``, 16-byte aligned; zeros unless ``wanted``."""
    text = "{ .reg .pred p; setp.ne.b32 p, $5, 0; "
    text += "".join(f"mov.b32 ${z}, 0; " for z in range(4)) + "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"

    def codegen(context, builder, sig, args):
        slot = builder.ptrtoint(item(context, builder, sig.args[1], args[1], args[2]), i64)
        words = ir.LiteralStructType([i32] * 4)
        values = asm(builder, words, [slot, builder.zext(args[0], i32)], text, "=&r,=&r,=&r,=&r,l,r,~{memory}")
        return context.make_tuple(builder, sig.return_type, [builder.extract_value(values, z) for z in range(4)])

    return types.UniTuple(types.int32, 4)(types.boolean, source, types.intp), codegen
