"""Tensor maps for the copy engine (ptx/tensor_maps.py).

Equal layouts share a map; kernels write the address into a copy."""

import math

import torch
from numba import cuda, int32

from numba_tconv.ptx import (
    SIMULATOR,
    device_function,
    recomputed,
    st_shared_b64,
    tensormap_acquire,
    tensormap_publish,
    tensormap_replace_address,
    tensormap_replace_size,
)
from numba_tconv.runtime.kernel import enter_context
from numba_tconv.runtime.layout import Layout

if not SIMULATOR:
    from cuda.bindings import driver

MAP_BYTES = 128
MAP_WORDS = MAP_BYTES // 8
ALIGNMENT = 16  # bytes
LONGEST_STRIDE = 1 << 40  # bytes
LARGEST_BOX = 256  # elements
LARGEST_SIZE = (1 << 31) - (1 << 16)  # elements: coordinates are int32


def row_bytes(shape: tuple, strides: tuple, itemsize: int) -> tuple[int, int]:
    """Bytes between samples and channels of (N, C, L); ``strides`` in elements. ALIGNMENT for size 1."""
    return tuple(
        stride * itemsize if size > 1 else ALIGNMENT for size, stride in zip(shape[:2], strides[:2], strict=True)
    )


def rows_alike(shape: tuple, strides: tuple, itemsize: int) -> int:
    """Channels, a power of two, after which rows of (N, C, L) begin alike modulo 16 bytes; 0 if no map describes them.

    One sheared map has all rows (k6_wgmma/boxes.py), or each set of alike rows its own (``make_publish``)."""
    n_bytes, c_bytes = row_bytes(shape, strides, itemsize)
    every = ALIGNMENT // math.gcd(ALIGNMENT, c_bytes)
    if (shape[2] > 1 and strides[2] != 1) or n_bytes % ALIGNMENT or every > shape[1] or max(shape) >= LARGEST_SIZE:
        return 0
    return every if 0 < n_bytes < LONGEST_STRIDE and 0 < c_bytes * every < LONGEST_STRIDE else 0


def lies_in_rows(tensor: Layout) -> bool:
    """Whether one map describes (N, C, L): contiguous, aligned rows."""
    distances = row_bytes(tensor.shape, tensor.strides, tensor.dtype.itemsize)
    return (
        tensor.offset % ALIGNMENT == 0
        and (tensor.strides[2] == 1 or tensor.shape[2] == 1)
        and not any(distance % ALIGNMENT for distance in distances)
        and all(0 < distance < LONGEST_STRIDE for distance in distances)
        and max(tensor.shape) < LARGEST_SIZE
    )


def row_pitch(length: int, itemsize: int) -> int:
    vector = ALIGNMENT // itemsize
    return -(-length // vector) * vector


def encode(precision: str, sizes: tuple, distances: tuple, box: tuple, swizzled: bool = False) -> tuple[int, ...]:
    """Encode a map as 64-bit numbers. Raises RuntimeError if the driver refuses.

    ``sizes``, ``box``: elements, innermost first. ``distances``: bytes, from the second dimension on. "tf32" rounds.
    ``swizzled``: row r of 128 bytes permutes its 16-byte pieces by r modulo 8."""
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    enter_context(torch._C._cuda_getDevice())
    kinds = {"tf32": types.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, "tf32x3": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32}
    error, encoded = driver.cuTensorMapEncodeTiled(
        kinds.get(precision, types.CU_TENSOR_MAP_DATA_TYPE_UINT16),
        len(sizes),
        0,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(distance) for distance in distances],
        [driver.cuuint32_t(size) for size in box],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error):
        raise RuntimeError(f"the CUDA driver makes no tensor map of {sizes}, distances {distances}: {error.name}")
    return tuple(word - (1 << 64) if word >> 63 else word for word in map(int, encoded.opaque))


@device_function
def _stage(template, at, lane):
    if lane == 0:
        for z in range(MAP_WORDS):
            st_shared_b64(at + 8 * z, template[z])


@device_function
def _hand_over(maps, at):
    cuda.syncwarp()
    tensormap_publish(maps, at)
    cuda.syncwarp()


@device_function
def publish(template, address, maps, at, lane):
    """Publish ``template`` with ``address`` to global ``maps``, by a warp; ``at``: 128 shared bytes.

    A lane that copies by the map calls ``tensormap_acquire`` first."""
    _stage(template, at, lane)
    if lane == 0:
        tensormap_replace_address(at, address)
    _hand_over(maps, at)


def make_publish(itemsize: int):
    """Build ``publish_sets`` and ``acquire_sets``, by a warp: map b of ``boxes`` has the channels b, b + boxes, ...

    A map begins at the 16-byte boundary before its first row. ``maps``: global address; ``at``: 128 shared bytes;
    ``early``: elements from a 16-byte boundary to the tensor."""
    vector = ALIGNMENT // itemsize
    replace_length, replace_channels = tensormap_replace_size(0), tensormap_replace_size(1)

    @device_function
    def publish_sets(template, maps, at, boxes, address, early, stride_c, length, channels, lane):
        _stage(template, at, lane)
        box = int32(0)
        while box < boxes:
            if lane == 0:
                own = int32(early + box * stride_c) & (vector - 1)
                tensormap_replace_address(at, address + (box * stride_c - own) * itemsize)
                replace_length(at, int32(length) + own)
                replace_channels(at, int32((channels - box + boxes - 1) // boxes))
            _hand_over(maps + box * MAP_BYTES, at)
            box = recomputed(int32(box + 1))  # no unrolling

    @device_function
    def acquire_sets(maps, boxes, lane):
        box = int32(0)
        while box < boxes and lane == 0:
            tensormap_acquire(maps + box * MAP_BYTES)
            box = recomputed(int32(box + 1))

    return publish_sets, acquire_sets
