"""Predicated stores reach the whole of a tensor, guarded loads begin before a row, and copies are whole."""

import re

import pytest
import torch

from numba_tconv.ptx import (
    SIMULATOR,
    cp_async_vector,
    cp_async_word,
    global_address,
    ld_shared_st_global_if,
    load_guarded,
    st_global_if,
)

if SIMULATOR:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba import cuda, float32, int32, types

from numba_tconv.runtime.elements import ELEMENTS
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


def test_a_run_begins_at_a_negative_position():
    load = load_guarded(ELEMENTS[torch.float32], 2)

    def loads(source, stride, begin, length):
        window = cuda.local.array(2, dtype=float32)
        load(window, source, stride, stride, begin, length)
        source[0] = window[0] + window[1]

    signature = contiguous(types.float32, 1), types.int64, types.int32, types.int32
    assert re.search(r"(cvt\.s64|mul\.wide)\.s32\s", Kernel("loads", loads, signature, 32).ptx((9, 0)))


@pytest.mark.parametrize(("copy", "size"), [(cp_async_vector, 16), (cp_async_word, 4)], ids=["vector", "word"])
def test_a_copy_is_of_a_whole_vector_or_word(copy, size):
    def copies(source, address):
        copy(address, global_address(source, 0))

    ptx = Kernel("copies", copies, (contiguous(types.int32, 1), types.int32), 32).ptx((8, 0))
    assert re.search(rf"cp\.async\.c[ag]\.shared\.global \[%r\d+\], \[%rd\d+\], {size};", ptx)
