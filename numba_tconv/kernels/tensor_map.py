"""Tensor maps as the host makes them: what the copy engine must know to fetch boxes of a tensor (ptx/tensor_maps.py).

A map is encoded without an address, so that calls with tensors laid out alike share it; a kernel writes the address in
and publishes the map where its copies read it.
"""

from __future__ import annotations

import torch
from numba import cuda

from ..ptx import SIMULATOR, device_function, st_shared_b64, tensormap_publish, tensormap_replace_address

if not SIMULATOR:
    from cuda.bindings import driver

MAP_BYTES = 128
MAP_WORDS = MAP_BYTES // 8
ALIGNMENT = 16  # bytes: of a tensor and its strides
LONGEST_STRIDE = 1 << 40  # bytes
LARGEST_BOX = 256  # elements along a dimension
LARGEST_SIZE = (1 << 31) - (1 << 16)  # elements: places along a dimension are int32


def row_bytes(shape: tuple, strides: tuple, itemsize: int) -> tuple[int, int]:
    """Of a tensor (N, C, L) with ``strides`` in elements, bytes from a sample to the next and from a channel to the
    next; any aligned number where there is no next."""
    return tuple(
        stride * itemsize if size > 1 else ALIGNMENT for size, stride in zip(shape[:2], strides[:2], strict=True)
    )


def lies_in_rows(tensor: torch.Tensor) -> bool:
    """Whether one map describes a tensor (N, C, L): rows of adjacent elements at multiples of 16 bytes."""
    distances = row_bytes(tensor.shape, tensor.stride(), tensor.element_size())
    return (
        tensor.data_ptr() % ALIGNMENT == 0
        and (tensor.stride(2) == 1 or tensor.shape[2] == 1)
        and not any(distance % ALIGNMENT for distance in distances)
        and all(0 < distance < LONGEST_STRIDE for distance in distances)
        and max(tensor.shape) < LARGEST_SIZE
    )


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor (N, C, L) itself, or a copy, that one map describes."""
    if lies_in_rows(tensor):
        return tensor
    batch, channels, length = tensor.shape
    vector = ALIGNMENT // tensor.element_size()
    padded = tensor.new_empty((batch, channels, -(-length // vector) * vector))
    return padded[:, :, :length].copy_(tensor)


def encode(precision: str, sizes: tuple, distances: tuple, box: tuple, swizzled: bool = False) -> tuple[int, ...]:
    """The map of a tensor as 64-bit numbers: ``sizes`` and ``box`` in elements, the innermost dimension first, and
    ``distances`` in bytes from the second dimension on.

    In "tf32" the copy engine rounds to TF32 on the way. ``swizzled``: each row of a box is 128 bytes, and its eight
    pieces of 16 bytes change places with the row's number modulo 8, as wgmma reads them.
    """
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
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
def publish(template, address, maps, at, lane):
    """By a whole warp: a map with the tensor's address, made of ``template`` in 128 bytes of shared memory at ``at``,
    to ``maps`` in global memory, where copies read it after an acquire."""
    if lane == 0:
        for z in range(MAP_WORDS):
            st_shared_b64(at + 8 * z, template[z])
        tensormap_replace_address(at, address)
    cuda.syncwarp()
    tensormap_publish(maps, at)
    cuda.syncwarp()
