"""PTX instructions as functions, with a meaning for the simulator (NUMBA_ENABLE_CUDASIM=1)."""

from __future__ import annotations

from llvmlite import ir
from numba import cuda, int32, types
from numba.core import config

SIMULATOR = bool(config.ENABLE_CUDASIM)
if SIMULATOR:
    from .simulator.blocks import mend

    mend()
SHARED = 3  # LLVM's address space
i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
f32, f64 = ir.FloatType(), ir.DoubleType()


def instruction(meaning):
    """Decorator: the Numba intrinsic on a GPU, ``meaning`` in the simulator."""

    def choose(typed):
        if SIMULATOR:
            return meaning
        from numba.cuda.extending import intrinsic

        return intrinsic(typed)

    return choose


def no_meaning(*arguments):
    raise NotImplementedError("the CUDA simulator has no tensor cores, no asynchronous barriers and no copy engine")


def item(context, builder, array_type, array, index):
    """Pointer to ``array[index]``, one-dimensional and contiguous."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def asm(builder, result, arguments, text, constraints):
    """Inline assembly; ``$0``, ``$1``, ... are results, then arguments."""
    function = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), arguments)


LETTERS = {types.int32: "r", types.int64: "l", types.float32: "f"}


def word(text, *kinds, meaning=no_meaning):
    """An instruction without a result; operands ``$0``, ``$1``, ... have Numba's ``kinds``."""
    constraints = ",".join([LETTERS[kind] for kind in kinds] + ["~{memory}"])

    def typed(*operands):
        def codegen(context, builder, sig, args):
            asm(builder, ir.VoidType(), args, text, constraints)
            return context.get_dummy_value()

        return types.void(*kinds), codegen

    # Numba counts an intrinsic's parameters: a function each.
    forms = {
        0: lambda typingctx: typed(),
        1: lambda typingctx, a: typed(a),
        2: lambda typingctx, a, b: typed(a, b),
        3: lambda typingctx, a, b, c: typed(a, b, c),
        5: lambda typingctx, a, b, c, d, e: typed(a, b, c, d, e),
        6: lambda typingctx, a, b, c, d, e, f: typed(a, b, c, d, e, f),
        7: lambda typingctx, a, b, c, d, e, f, g: typed(a, b, c, d, e, f, g),
    }
    return instruction(meaning)(forms[len(kinds)])


def device_function(function):
    """Decorator: an inlined device function. Numba's own inlining compiles more slowly."""
    return cuda.jit(device=True)(function) if SIMULATOR else cuda.jit(device=True, forceinline=True)(function)


def repeated(function, count):
    """(k, state): calls the device function ``function(k + z, state)`` for z below ``count``.

    Straight-line: arrays indexed by a loop variable lie in local memory."""

    def one_by_one(k, state):
        for z in range(count):
            function(int32(k + z), state)

    @instruction(one_by_one)
    def run(typingctx, k, state):
        called = typingctx.resolve_value_type(function)
        signature = called.get_call_type(typingctx, (types.int32, state), {})

        def codegen(context, builder, sig, args):
            call = context.get_function(called, signature)
            context.add_linking_libs(call.libs)
            for z in range(count):
                call(builder, (builder.add(args[0], ir.Constant(i32, z)), args[1]))
            return context.get_dummy_value()

        return types.void(types.int32, state), codegen

    return run


@instruction(no_meaning)
def elected(typingctx):
    """elect.sync: true in one lane. Copy-engine instructions then need no loop over lanes."""

    def codegen(context, builder, sig, args):
        text = "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        return builder.trunc(asm(builder, i32, args, text, "=r"), ir.IntType(1))

    return types.boolean(), codegen


nounroll = word(r".pragma \22nounroll\22;", meaning=lambda: None)
nounroll.__doc__ = """(): as the first statement of a loop's body, keeps the compiler from unrolling the loop."""


@instruction(lambda value: value)
def recomputed(typingctx, value):
    """The int32 ``value`` by an opaque move: what is computed from it is computed anew, not kept in registers."""

    def codegen(context, builder, sig, args):
        return asm(builder, i32, args, "mov.b32 $0, $1;", "=r,r")

    return types.int32(types.int32), codegen
