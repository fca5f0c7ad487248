"""Predicated stores reach the whole of a tensor."""

import re

import pytest

from numba_tconv.ptx import SIMULATOR, ld_shared_st_global_if, st_global_if

if SIMULATOR:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba import cuda, int32, types

from numba_tconv.runtime.kernel import Kernel, contiguous


def ptx_of(count, shared):
    store = (ld_shared_st_global_if if shared else st_global_if)(count)

    def from_registers(target, index):
        words = cuda.local.array(4, dtype=int32)
        store(True, target, index, words)

    def from_shared(target, index):
        store(True, target, index, int32(64))

    kernel, signature = from_shared if shared else from_registers, (contiguous(types.int32, 1), types.int64)
    return Kernel("stores", kernel, signature, 32).ptx((9, 0))


both = pytest.mark.parametrize("shared", [False, True])
counts = pytest.mark.parametrize("count", [1, 2, 4])


@counts
@both
def test_an_index_has_64_bits(count, shared):
    ptx = ptx_of(count, shared)
    assert "st.global" in ptx
    assert re.search(r"shl\.b64\s+%rd\d+, %rd\d+, 2;", ptx), "the whole index counts words"


@counts
@both
def test_every_word_is_stored(count, shared):
    ptx, kind = ptx_of(count, shared), "b32" if count == 1 else f"v{count}.b32"
    (stored,) = re.findall(rf"@p st\.global\.{kind} \[%rd\d+\], ([^;]+);", ptx)
    assert len(re.findall(r"%?r\d+", stored)) == count
    if shared:
        (loaded,) = re.findall(rf"ld\.shared\.{kind} ([^;]+), \[%r\d+\];", ptx)
        assert loaded == stored
        assert len(set(re.findall(r"r\d+", loaded))) == count
