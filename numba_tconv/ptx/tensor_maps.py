"""Copies of boxes by tensor map, with zeros beyond the tensor.

A map is 128 bytes, made by the host (kernels/common/tensor_map.py), changed in shared and used from global memory."""

from numba import types

from .core import word

i32, i64 = types.int32, types.int64


def _box(dimensions):
    where = ", ".join(f"${2 + z}" for z in range(dimensions))
    return word(
        f"cp.async.bulk.tensor.{dimensions}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {{{where}}}], [${2 + dimensions}];",
        *(i32, i64, *(i32,) * dimensions, i32),
    )


cp_async_bulk_tensor = _box(3)
cp_async_bulk_tensor.__doc__ = """(address, map, i, j, k, barrier): the copy engine fetches the box that begins at
element i of row j of plane k; it counts as landed at the mbarrier. ``address`` is a multiple of 128."""
cp_async_bulk_tensor_4d = _box(4)
cp_async_bulk_tensor_4d.__doc__ = """(address, map, i, j, k, l, barrier): the same of a map of four dimensions."""

tensormap_replace_address = word("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [$0], $1;", i32, i64)
tensormap_replace_address.__doc__ = """(map in shared memory, address of the tensor): a multiple of 16."""


def tensormap_replace_size(dimension):
    """(map in shared memory, size in ``dimension``)."""
    return word(f"tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [$0], {dimension}, $1;", i32, i32)


tensormap_publish = word(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [$0], [$1], 128;", i64, i32
)
tensormap_publish.__doc__ = """(map in global memory, map in shared memory): copy it there, by a whole warp."""

tensormap_acquire = word("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", i64)
tensormap_acquire.__doc__ = """(map in global memory): what was published is what this thread's copies will use."""

st_shared_b64 = word("st.shared.b64 [$0], $1;", i32, i64)
st_shared_b64.__doc__ = """(address, value): eight bytes, to a multiple of eight."""
