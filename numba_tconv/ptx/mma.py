"""Tensor-core products: mma.sync of a warp (from sm_80), wgmma of four (sm_90a).

common/tensor_core/fragments.py says which lane holds what. An operand register is an int32: a tf32 number, or two
16-bit elements, smaller k in the lower half."""

from llvmlite import ir
from numba import types

from .core import ANY, asm, f32, f64, i64, instruction, local_of, no_meaning, operation, word

# k of a product.
DEPTH = {"tf32": 8, "f16": 16, "bf16": 16}


opaque = operation("mov.f32 $0, $1;", types.float32, types.float32)
opaque.__doc__ = """(value): the same, by an opaque mov.f32; ptxas serialises wgmma if it can trace accumulators."""


def _slots(context, builder, sig, args, k, count):
    """Pointers to elements of operand ``k``, from the next operand on."""
    data = local_of(context, builder, sig, args, k)
    return [builder.gep(data, [builder.add(args[k + 1], ir.Constant(i64, z))]) for z in range(count)]


def _accumulate(builder, slots, text, constraints, operands, kind=f32):
    struct = ir.LiteralStructType([kind] * len(slots))
    result = asm(builder, struct, [*map(builder.load, slots), *operands], text, constraints)
    for z, slot in enumerate(slots):
        builder.store(builder.extract_value(result, z), slot)


def mma(kind):
    """m16n8 in ``kind`` (tf32, f16, bf16): (acc, at, a, a_at, b0, b1) adds A B to acc[at:at+4].

    The local int32 array ``a`` holds the lane's A from ``a_at`` on."""
    k = DEPTH[kind]
    text = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 "
    text += "{$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};"
    constraints = "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r"

    @instruction(no_meaning, ANY, types.intp, ANY, types.intp, types.int32, types.int32)
    def mma_sync(context, builder, sig, args):
        loads = [builder.load(slot) for slot in _slots(context, builder, sig, args, 2, 4)]
        _accumulate(builder, _slots(context, builder, sig, args, 0, 4), text, constraints, [*loads, *args[4:]])

    return mma_sync


def mma_f64(depth):
    """m16n8k``depth`` in float64: (acc, at, a, a_at, b, b_at) adds A B to acc[at:at+4].

    ``depth`` is 4 or 8 (from sm_90), or 0: m16n8k4 as two m8n8k4 (from sm_80). Local arrays hold registers: ``a`` two
    for every four of k, ``b`` one."""
    fours = max(1, depth // 4)
    if depth:
        c, a = "{$0,$1,$2,$3}", ",".join(f"${8 + z}" for z in range(2 * fours))
        b = ",".join(f"${8 + 2 * fours + z}" for z in range(fours))
        text = f"mma.sync.aligned.m16n8k{depth}.row.col.f64.f64.f64.f64 {c}, {{{a}}}, {{{b}}}, {{$4,$5,$6,$7}};"
    else:
        half = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 "
        text = half + "{$0,$1}, {$8}, {$10}, {$4,$5}; " + half + "{$2,$3}, {$9}, {$10}, {$6,$7};"
    early = "=d" if depth else "=&d"  # the first instruction writes before the second reads
    constraints = ",".join([early] * 4 + ["d"] * (4 + 3 * fours))

    @instruction(no_meaning, *(ANY, types.intp) * 3)
    def mma_of(context, builder, sig, args):
        loads = []
        for k, count in ((2, 2 * fours), (4, fours)):
            loads += [builder.load(slot) for slot in _slots(context, builder, sig, args, k, count)]
        _accumulate(builder, _slots(context, builder, sig, args, 0, 4), text, constraints, loads, f64)

    return mma_of


def wgmma(kind, n):
    """m64 n``n`` in ``kind``, A from registers, B from shared memory.

    (acc, at, a0, a1, a2, a3, descriptor, add) adds A B to acc[at:at+n/2], or overwrites it if ``add`` is 0. Leave
    accumulators and operands alone between ``wgmma_fence`` and ``wgmma_wait``."""
    count, k = n // 2, DEPTH[kind]
    d = ",".join(f"${z}" for z in range(count))
    a = ",".join(f"${2 * count + z}" for z in range(4))
    flags = "1, 1" if kind == "tf32" else "1, 1, 0"  # signs of A and B; B K-major
    text = f"{{\n.reg .pred add;\nsetp.ne.b32 add, ${2 * count + 5}, 0;\n"
    text += (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{d}}}, {{{a}}}, ${2 * count + 4}, add, {flags};"
    )
    text += "\n}"
    constraints = ",".join(["=f"] * count + [str(z) for z in range(count)] + ["r"] * 4 + ["l", "r"])

    @instruction(no_meaning, ANY, types.intp, *[types.int32] * 4, types.int64, types.int32)
    def wgmma_async(context, builder, sig, args):
        _accumulate(builder, _slots(context, builder, sig, args, 0, count), text, constraints, args[2:])

    return wgmma_async


wgmma_fence = word("wgmma.fence.sync.aligned;")
wgmma_fence.__doc__ = """(): registers written before may be read by the wgmma that follow."""

wgmma_commit = word("wgmma.commit_group.sync.aligned;")
wgmma_commit.__doc__ = """(): the wgmma issued since the last commit form a group."""


def wgmma_wait(pending):
    """(): waits until all but the ``pending`` newest groups are done."""
    return word(f"wgmma.wait_group.sync.aligned {pending};")


def wgmma_descriptor(address, leading, stride):
    """Descriptor of an unswizzled K-major operand.

    ``leading``, ``stride``: bytes between core matrices (8 rows of 16 bytes) along k, and along n. All are multiples of
    16."""
    return (address >> 4 & 0x3FFF) | (leading >> 4) << 16 | (stride >> 4) << 32


def swizzled_descriptor(address):
    """Descriptor of a K-major operand of rows of 128 bytes in the copy engine's swizzle.

    ``address``: a multiple of 1,024, plus 32 for each earlier product."""
    return (address >> 4 & 0x3FFF) | 1 << 16 | (1024 >> 4) << 32 | 1 << 62


prmt = operation("prmt.b32 $0, $1, $2, $3;", *[types.int32] * 4)
prmt.__doc__ = """(a, b, selector): bytes 0 to 3 are ``a``, 4 to 7 ``b``; each hex digit of ``selector`` picks one,
plus 8 repeats its top bit."""
