"""Predicated loads and stores."""

from llvmlite import ir
from numba import types

from .core import ANY, ELEMENT, asm, get, i32, i64, instruction, item, local_of, no_meaning, operation, word


def st_global_if(count):
    """(wanted, target, index, words): st.global of ``count`` (1, 2 or 4) words if ``wanted``.

    ``words`` is a local int32 array; ``target[index]`` is aligned to their size."""
    words_text = "$1" if count == 1 else "{" + ", ".join(f"${1 + z}" for z in range(count)) + "}"
    kind = "b32" if count == 1 else f"v{count}.b32"
    text = f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; @p st.global.{kind} [$0], {words_text}; }}"

    @instruction(no_meaning, types.boolean, ANY, types.intp, ANY)
    def st_global_wanted(context, builder, sig, args):
        slot = builder.ptrtoint(item(context, builder, sig.args[1], args[1], args[2]), i64)
        source = local_of(context, builder, sig, args, 3)
        values = [get(builder, source, z) for z in range(count)]
        constraints = ",".join(["l"] + ["r"] * (count + 1) + ["~{memory}"])
        asm(builder, ir.VoidType(), [slot, *values, builder.zext(args[0], i32)], text, constraints)

    return st_global_wanted


def ld_shared_st_global_if(count):
    """(wanted, target, index, address): ``count`` (1, 2 or 4) words from shared memory, stored if ``wanted``.

    Both addresses are aligned to their size."""
    names = [f"r{z}" for z in range(count)]
    kind, words = ("b32", names[0]) if count == 1 else (f"v{count}.b32", f"{{{', '.join(names)}}}")
    return word(
        f"{{ .reg .pred p; .reg .b32 {', '.join(names)}; setp.ne.b32 p, $2, 0; "
        f"ld.shared.{kind} {words}, [$1]; @p st.global.{kind} [$0], {words}; }}",
        *(types.boolean, ELEMENT, types.int32),
    )


st_global_vector = word(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
    *(types.boolean, ELEMENT, types.UniTuple(types.int32, 4)),
)
st_global_vector.__doc__ = """(wanted, target, index, words): if ``wanted``, stores four int32 to ``target[index:]``,
16-byte aligned."""

ld_global_vector = operation(
    "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
    "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
    types.UniTuple(types.int32, 4),
    *(types.boolean, ELEMENT),
    memory=True,
    early=True,
)
ld_global_vector.__doc__ = """(wanted, source, index): four int32 from ``source[index:]``, 16-byte aligned; zeros unless
``wanted``."""
