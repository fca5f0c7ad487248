"""Which lane holds which element of a tensor-core operand in PTX.

``i``: a register; ``h``: a half of it; ``halves``: its number of elements."""


def wgmma_b(n, k, rows, elements):
    """Offset, in elements, of (k, n) in a K-major, unswizzled B.

    Core matrices of 8 columns by ``elements`` (16 bytes) follow one another, along n first."""
    return ((k // elements * (rows // 8) + n // 8) * 8 + n % 8) * elements + k % elements


def wgmma_b_at(e, rows, elements):
    """(n, k) at offset ``e``."""
    core, inside = e // (8 * elements), e % (8 * elements)
    return core % (rows // 8) * 8 + inside // elements, core // (rows // 8) * elements + inside % elements


def mma_a(lane, i, h, halves):
    """(row, k) of A of m16n8k8 or, with two ``halves``, m16n8k16; four registers."""
    return lane // 4 + 8 * (i % 2), lane % 4 * halves + h + 4 * halves * (i // 2)


def mma_b(lane, i, h, halves):
    """(k, n) of B; two registers."""
    return lane % 4 * halves + h + 4 * halves * i, lane // 4


def mma_d(lane, i):
    """(row, n) of D; four registers."""
    return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2


def wgmma_a(warp, lane, i, h, halves):
    """(row, k) of m64's A: 16 rows a warp, laid out like mma.sync's."""
    row, k = mma_a(lane, i, h, halves)
    return 16 * warp + row, k


def split_channel(k):
    """The channel of element k in a product of split operands.

    A lane with 2*t, 2*t + 1, 2*t + 8 and 2*t + 9 has channels t, t + 4, t + 8 and t + 12."""
    return k // 8 * 8 + k % 2 * 4 + k % 8 // 2


def wgmma_d(warp, lane, i):
    """(row, n) of m64's D; n/2 registers."""
    return 16 * warp + lane // 4 + 8 * (i % 4 // 2), i // 4 * 8 + lane % 4 * 2 + i % 2


def column_of(warp, lane, block, half):
    """Column of a lane's upper (``half`` 0) or lower (1) row of A.

    k6's 128 columns are two m64 blocks; a lane owns four neighbours."""
    return (warp << 5) + (lane >> 2 << 2) + 2 * block + half
