"""PTX instructions as functions, with a meaning for the simulator (NUMBA_ENABLE_CUDASIM=1)."""

from llvmlite import ir
from numba import cuda, int32, types
from numba.core import config

SIMULATOR = bool(config.ENABLE_CUDASIM)
if SIMULATOR:
    from .simulator.blocks import mend

    mend()
OPTIONS = {"debug": False, "opt": True}  # in any environment
SHARED = 3  # LLVM's address space
i16, i32, i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
f32, f64 = ir.FloatType(), ir.DoubleType()


def intrinsic(meaning):
    """Decorator: the Numba intrinsic on a GPU, ``meaning`` in the simulator."""

    def choose(typed):
        if SIMULATOR:
            return meaning
        from numba.cuda.extending import intrinsic

        return intrinsic(typed)

    return choose


# Numba counts an intrinsic's parameters: a function each.
COUNTED = (
    lambda typed: lambda typingctx: typed(),
    lambda typed: lambda typingctx, a: typed(a),
    lambda typed: lambda typingctx, a, b: typed(a, b),
    lambda typed: lambda typingctx, a, b, c: typed(a, b, c),
    lambda typed: lambda typingctx, a, b, c, d: typed(a, b, c, d),
    lambda typed: lambda typingctx, a, b, c, d, e: typed(a, b, c, d, e),
    lambda typed: lambda typingctx, a, b, c, d, e, f: typed(a, b, c, d, e, f),
    lambda typed: lambda typingctx, a, b, c, d, e, f, g: typed(a, b, c, d, e, f, g),
    lambda typed: lambda typingctx, a, b, c, d, e, f, g, h: typed(a, b, c, d, e, f, g, h),
)
ANY = None


def instruction(meaning, *kinds, result=types.void):
    """Decorator of an intrinsic's code; ``kinds``: operands' types, or ANY."""

    def make(code):
        def typed(*given):
            def codegen(context, builder, sig, args):
                value = code(context, builder, sig, args)
                return value if value is not None else context.get_dummy_value()

            return result(*(kind or own for kind, own in zip(kinds, given, strict=True))), codegen

        made = COUNTED[len(kinds)](typed)
        made.__name__, made.__doc__ = code.__name__, code.__doc__
        return intrinsic(meaning)(made)

    return make


def no_meaning(*arguments):
    raise NotImplementedError("the CUDA simulator has no tensor cores, no asynchronous barriers and no copy engine")


def item(context, builder, array_type, array, index):
    """Pointer to ``array[index]``, one-dimensional and contiguous."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def shared_item(context, builder, array_type, array, index):
    """Shared address of ``array[index]``."""
    window = ir.PointerType(context.get_value_type(array_type.dtype), SHARED)
    return builder.ptrtoint(builder.addrspacecast(item(context, builder, array_type, array, index), window), i32)


def local_of(context, builder, sig, args, k):
    return context.make_array(sig.args[k])(context, builder, args[k]).data


def get(builder, local, z):
    return builder.load(builder.gep(local, [ir.Constant(i64, z)]))


def put(builder, local, z, value):
    builder.store(value, builder.gep(local, [ir.Constant(i64, z)]))


def asm(builder, result, arguments, text, constraints):
    """Inline assembly; ``$0``, ``$1``, ... are results, then arguments."""
    function = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), arguments)


def switch(builder, case, codes):
    """Run one of ``codes``; the last for any other ``case``."""
    if len(codes) == 1:
        codes[0]()
        return
    after = builder.append_basic_block("after")
    blocks = [builder.append_basic_block(f"case{number}") for number in range(len(codes))]
    chosen = builder.switch(case, blocks[-1])
    for number, block in enumerate(blocks):
        if number < len(codes) - 1:
            chosen.add_case(ir.Constant(i32, number), block)
        builder.position_at_end(block)
        codes[number]()
        builder.branch(after)
    builder.position_at_end(after)


LETTERS = {types.int32: "r", types.int64: "l", types.uint16: "h", types.float32: "f", types.float64: "d"}
ELEMENT = object()  # an operand's kind: an array and an index, for the element's address


def operation(text, result, *kinds, meaning=no_meaning, memory=False, early=False):
    """An instruction; ``result`` and operands have Numba's types, tuples one register for each item.

    ``$0``, ``$1``, ... are results, then operands, booleans last, as 0 or 1. ``early``: results are written before
    operands are read."""
    several = isinstance(result, types.UniTuple)
    results = list(result) if several else [result] * (result is not None)

    def typed(*given):
        parameters, given = [], iter(given)
        for kind in kinds:
            own = next(given)
            parameters += [own, next(given) and types.intp] if kind is ELEMENT else [kind]

        def codegen(context, builder, sig, args):
            operands, letters, flags, args = [], [], [], zip(sig.args, args, strict=True)
            for kind, value in args:
                if isinstance(kind, types.Array):
                    operands.append(builder.ptrtoint(item(context, builder, kind, value, next(args)[1]), i64))
                    letters.append("l")
                elif isinstance(kind, types.UniTuple):
                    operands += [builder.extract_value(value, z) for z in range(kind.count)]
                    letters += [LETTERS[kind.dtype]] * kind.count
                elif kind == types.boolean:
                    flags.append(builder.zext(value, i32))
                else:
                    operands.append(value)
                    letters.append(LETTERS[kind])
            outputs = [f"={'&' * early}{LETTERS[kind]}" for kind in results]
            constraints = ",".join([*outputs, *letters, *"r" * len(flags), *["~{memory}"] * memory])
            registers = [context.get_value_type(kind) for kind in results] or [ir.VoidType()]
            of_all = ir.LiteralStructType(registers) if several else registers[0]
            found = asm(builder, of_all, [*operands, *flags], text, constraints)
            if several:
                return context.make_tuple(
                    builder, result, [builder.extract_value(found, z) for z in range(len(results))]
                )
            return found if results else context.get_dummy_value()

        return (result or types.void)(*parameters), codegen

    return intrinsic(meaning)(COUNTED[len(kinds) + kinds.count(ELEMENT)](typed))


def word(text, *kinds, meaning=no_meaning):
    """An operation without a result."""
    return operation(text, None, *kinds, meaning=meaning, memory=True)


def device_function(function):
    """Decorator: an inlined device function. Numba's inlining compiles slower."""
    if SIMULATOR:
        return cuda.jit(device=True)(function)
    return cuda.jit(device=True, forceinline=True, **OPTIONS)(function)


def repeated(function, count):
    """(k, state): calls the device function ``function(k + z, state)`` for z below ``count``.

    Straight-line: arrays indexed by a loop variable lie in local memory."""

    def one_by_one(k, state):
        for z in range(count):
            function(int32(k + z), state)

    @intrinsic(one_by_one)
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


@instruction(no_meaning, result=types.boolean)
def elected(context, builder, sig, args):
    """elect.sync: true in one lane. Copy-engine instructions then need no loop over lanes."""
    text = "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    return builder.trunc(asm(builder, i32, args, text, "=r"), ir.IntType(1))


nounroll = word(r".pragma \22nounroll\22;", meaning=lambda: None)
nounroll.__doc__ = """(): as the first statement of a loop's body, keeps the compiler from unrolling the loop."""

recomputed = operation("mov.b32 $0, $1;", types.int32, types.int32, meaning=lambda value: value)
recomputed.__doc__ = (
    """(value): the same, by an opaque move: what is computed from it is computed anew, not kept in registers."""
)
