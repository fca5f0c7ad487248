"""Which lane holds which element of a tensor-core operand, as PTX defines it.

``i``: register of the operand; ``h``: half of a register with 16-bit elements. ``lane = 4*g + t``."""


def wgmma_b(n, k, rows, elements):
    """Offset in shared memory, in elements, of (k, n) of B: K-major, not swizzled.

    Core matrices of 8 columns by 16 bytes (``elements``) follow one another, along n first."""
    return ((k // elements * (rows // 8) + n // 8) * 8 + n % 8) * elements + k % elements


def wgmma_b_at(e, rows, elements):
    """(n, k) at offset ``e``: the inverse of ``wgmma_b``."""
    core, inside = e // (8 * elements), e % (8 * elements)
    return core % (rows // 8) * 8 + inside // elements, core // (rows // 8) * elements + inside % elements


def mma_a(lane, i, h, halves):
    """(row, k) of A of m16n8k8 (``halves`` = 1) and m16n8k16 (``halves`` = 2), register i of 4."""
    return lane // 4 + 8 * (i % 2), lane % 4 * halves + h + 4 * halves * (i // 2)


def mma_b(lane, i, h, halves):
    """(k, n) of B, register i of 2."""
    return lane % 4 * halves + h + 4 * halves * i, lane // 4


def mma_d(lane, i):
    """(row, n) of D, register i of 4."""
    return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2


def wgmma_a(warp, lane, i, h, halves):
    """(row, k) of A of m64 from registers: four warps hold 16 rows each, laid out as mma.sync's."""
    row, k = mma_a(lane, i, h, halves)
    return 16 * warp + row, k


def split_channel(k):
    """The channel that element k of an fp16 product means for split operands.

    A lane with k of 2*t, 2*t + 1, 2*t + 8 and 2*t + 9 holds channels t, t + 4, t + 8 and t + 12."""
    return k // 8 * 8 + k % 2 * 4 + k % 8 // 2


def wgmma_d(warp, lane, i):
    """(row, n) of D of m64, register i of n/2."""
    return 16 * warp + lane // 4 + 8 * (i % 4 // 2), i // 4 * 8 + lane % 4 * 2 + i % 2


def column_of(warp, lane, block, half):
    """The column of a lane's row g (``half`` 0) or g + 8 (1) of its warp's 16 of A.

    k6 computes 128 columns as two m64 blocks; a lane owns four consecutive ones."""
    return (warp << 5) + (lane >> 2 << 2) + 2 * block + half
