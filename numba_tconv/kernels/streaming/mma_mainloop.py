"""Products of a stage."""

from numba import cuda, float32, int32

from numba_tconv.kernels.common.tensor_core.split_operand import put_tf32
from numba_tconv.ptx import device_function, float_of, ld_shared, ld_shared_u16, ldmatrix, mma, prmt

from .mma_tile import COLUMNS, KINDS, Config

LOW_HALVES = 0x5410  # prmt's selector
load_number = ld_shared(1, float32)
load_rows, load_few_rows, load_columns = ldmatrix(4), ldmatrix(2), ldmatrix(4, transposed=True)


def make_multiply(config: Config):
    """Build ``multiply``: adds a warp's products of a stage.

    ``weights``, ``frames``: this lane's addresses of the warp's first slice; ``rows``: bytes to the weights of its
    rows; ``shift``: bytes between two frames of a slot."""
    kept, stride, itemsize, halves = config.kept, config.stride, config.itemsize, 4 // config.itemsize
    row_blocks, column_blocks, operands = config.row_blocks, config.column_blocks, 4 * config.row_blocks
    pitch, next_columns, by_matrix = config.weight_pitch, COLUMNS * config.frame_pitch, config.by_matrix
    slices, slice_channels = config.slices, config.channel_warps * config.depth
    product, blocks_at_once = mma(KINDS[config.dtype]), min(2, config.column_blocks)
    load_frames, frame_words = load_rows if blocks_at_once == 2 else load_few_rows, 2 * blocks_at_once

    @device_function
    def load_weights(a, at, address):
        if halves == 1:
            put_tf32(a, at, load_number(address))
        else:
            a[at] = prmt(ld_shared_u16(address), ld_shared_u16(address + pitch), LOW_HALVES)

    @device_function
    def load_block(a, i, rows, weights):
        if by_matrix:
            words = load_columns(int32(weights + rows[i]))
            for z in range(4):
                a[4 * i + z] = words[z]
        else:
            for h in range(2):
                for k in range(2):
                    address = int32(weights + rows[2 * i + h] + k * 4 * halves * pitch)
                    load_weights(a, 4 * i + 2 * k + h, address)

    @device_function
    def multiply_slice(acc, rows, weights, frames, shift):
        a = cuda.local.array(operands, dtype=int32)
        b = cuda.local.array(frame_words, dtype=int32)
        q = int32(0)
        frames += int32(kept * shift)
        while q <= kept:
            for i in range(row_blocks):
                load_block(a, i, rows, weights)
            for j in range(0, column_blocks, blocks_at_once):
                words = load_frames(int32(frames + j * next_columns))
                for z in range(frame_words):
                    if halves == 1:
                        put_tf32(b, z, float_of(words[z]))
                    else:
                        b[z] = words[z]
                for z in range(blocks_at_once):
                    for i in range(row_blocks):
                        product(acc, (i * column_blocks + j + z) * 4, a, 4 * i, b[2 * z], b[2 * z + 1])
            weights = int32(weights + stride * itemsize)
            frames = int32(frames - shift)
            q = int32(q + 1)

    @device_function
    def multiply(acc, rows, weights, frames, shift):
        for z in range(slices):
            along_w, along_f = z * (slice_channels * pitch), z * (slice_channels * itemsize)
            multiply_slice(acc, rows, int32(weights + along_w), int32(frames + along_f), shift)

    return multiply
