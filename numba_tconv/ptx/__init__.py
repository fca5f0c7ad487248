"""PTX instructions that Numba lacks, by name. ``(a, b): ...`` in a docstring says what the device function takes."""

from .arithmetic import larger_magnitude, nearest_integer, redux_max, sine_approx
from .barriers import (
    barrier_sync,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_await_copies,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg,
)
from .convert import (
    bf16_to_f32,
    bits_of,
    f16_to_f32,
    f32_to_bf16,
    float_of,
    pack_bf16,
    pack_f16,
    round_tf32,
    tf32_operand,
)
from .copies import (
    cp_async,
    cp_async_bulk,
    cp_async_bulk_commit,
    cp_async_bulk_store,
    cp_async_bulk_wait_read,
    cp_async_commit,
    cp_async_to,
    cp_async_vector,
    cp_async_wait,
    cp_async_word,
    fence_async,
    global_address,
    ld_shared,
    ld_shared_u16,
    ldmatrix,
    shared_address,
    st_shared,
    st_shared_b32,
    st_shared_f32,
    st_shared_halves,
    st_shared_u16,
    st_shared_v2_b32,
    st_shared_v2_f32,
    take,
)
from .core import OPTIONS, SIMULATOR, device_function, elected, nounroll, recomputed, repeated
from .grids import griddepcontrol_launch_dependents, griddepcontrol_wait
from .memory import ld_global_vector, ld_shared_st_global_if, st_global_if, st_global_vector
from .mma import (
    mma,
    mma_f64,
    opaque,
    prmt,
    swizzled_descriptor,
    wgmma,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_wait,
)
from .tensor_maps import (
    cp_async_bulk_tensor,
    cp_async_bulk_tensor_4d,
    st_shared_b64,
    tensormap_acquire,
    tensormap_publish,
    tensormap_replace_address,
    tensormap_replace_size,
)
from .unrolled.products import multiply_add, multiply_runs
from .unrolled.runs import load_guarded, load_run, store_run, vectors_of
from .unrolled.vectors import add_vectors, load_vector, load_vector_at, shared_base, store_vector, store_vectors
from .unrolled.windows import GRANULE, copy_vectors, multiply_window, spread, store_gathered, store_runs
