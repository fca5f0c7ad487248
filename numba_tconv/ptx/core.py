"""How an instruction that plain Numba has no word for becomes a function: the only place that knows llvmlite's asm.

Each is named after its PTX instruction. Beside each stands its meaning in Python: in the CUDA simulator
(NUMBA_ENABLE_CUDASIM=1) the kernels run on the meanings, so that what a kernel does is checked without a GPU.
"""

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
    """Decorator: on a GPU the decorated Numba intrinsic, in the simulator ``meaning``."""

    def choose(typed):
        if SIMULATOR:
            return meaning
        from numba.cuda.extending import intrinsic

        return intrinsic(typed)

    return choose


def no_meaning(*arguments):
    """The meaning of an instruction of a whole warp or of the copy engine: the simulator's threads cannot play it."""
    raise NotImplementedError("the CUDA simulator has no tensor cores, no asynchronous barriers and no copy engine")


def item(context, builder, array_type, array, index):
    """Pointer to the item ``index`` of a contiguous one-dimensional array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def asm(builder, result, arguments, text, constraints):
    """A call of inline assembly; ``$0``, ``$1``, ... in ``text`` are the results and then the arguments."""
    function = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), arguments)


LETTERS = {types.int32: "r", types.int64: "l", types.float32: "f"}


def word(text, *kinds, meaning=no_meaning):
    """An instruction without a result whose operands ``$0``, ``$1``, ... have the Numba types ``kinds``."""
    constraints = ",".join([LETTERS[kind] for kind in kinds] + ["~{memory}"])

    def typed(*operands):
        def codegen(context, builder, sig, args):
            asm(builder, ir.VoidType(), args, text, constraints)
            return context.get_dummy_value()

        return types.void(*kinds), codegen

    # Numba counts an intrinsic's parameters, so each number of operands needs a function of its own.
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
    """Decorator: a device function that the compiler inlines. Numba's inlining (``inline="always"``) copies the code
    for every call, before it has types, which takes twice as long to compile."""
    return cuda.jit(device=True)(function) if SIMULATOR else cuda.jit(device=True, forceinline=True)(function)


def repeated(function, count):
    """A device function that calls the device function ``function(k, state)`` for ``count`` numbers k from its own on,
    as straight-line code. LLVM leaves a long loop a loop, and an array indexed by a loop's variable lies in slow local
    memory instead of registers. It writes the calls itself: as functions that call functions they were more than a
    third of all that Numba compiled for a kernel of k6 (62 of 170, kb64 in bfloat16)."""

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
    """elect.sync: true in one lane of the warp. Of what that lane alone does, the compiler knows that no two lanes have
    other operands: an instruction of the copy engine needs no loop over the lanes then."""

    def codegen(context, builder, sig, args):
        text = "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        return builder.trunc(asm(builder, i32, args, text, "=r"), ir.IntType(1))

    return types.boolean(), codegen


nounroll = word(r".pragma \22nounroll\22;", meaning=lambda: None)
nounroll.__doc__ = """(): what the loop whose body begins so stays, a loop."""


@instruction(lambda value: value)
def recomputed(typingctx, value):
    """An int32 as it is, opaque to the compiler: what is computed from it is not kept in registers between loops."""

    def codegen(context, builder, sig, args):
        return asm(builder, i32, args, "mov.b32 $0, $1;", "=r,r")

    return types.int32(types.int32), codegen
