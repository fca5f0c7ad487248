"""Predicated stores reach the whole of a tensor."""

import re

import pytest

from numba_tconv.ptx import SIMULATOR, ld_shared_st_global_if, st_global_if

if SIMULATOR:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba import cuda, int32, types

from numba_tconv.runtime.kernel import Kernel, contiguous


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_an_index_has_64_bits(count, shared):
    store = (ld_shared_st_global_if if shared else st_global_if)(count)

    def from_registers(target, index):
        words = cuda.local.array(4, dtype=int32)
        store(True, target, index, words)

    def from_shared(target, index):
        store(True, target, index, int32(64))

    kernel, signature = from_shared if shared else from_registers, (contiguous(types.int32, 1), types.int64)
    ptx = Kernel("stores", kernel, signature, 32).ptx((9, 0))
    assert "st.global" in ptx
    assert re.search(r"shl\.b64\s+%rd\d+, %rd\d+, 2;", ptx), "the whole index counts words"
