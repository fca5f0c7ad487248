"""Predicated stores reach the whole of a tensor, guarded loads begin before a row, and copies are whole."""

import re

import pytest
import torch

import numba_tconv.ptx as words

if words.SIMULATOR:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba import cuda, int32, types

from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, contiguous


def ptx_of(kernel, *kinds):
    return Kernel("words", kernel, (contiguous(types.int32, 1), *kinds), 32).ptx((9, 0))


def stores(count, shared):
    store = (words.ld_shared_st_global_if if shared else words.st_global_if)(count)

    def from_registers(target, index):
        store(True, target, index, cuda.local.array(4, dtype=int32))

    def from_shared(target, index):
        store(True, target, index, int32(64))

    return ptx_of(from_shared if shared else from_registers, types.int64)


both = pytest.mark.parametrize("shared", [False, True])
counts = pytest.mark.parametrize("count", [1, 2, 4])


@counts
@both
def test_an_index_has_64_bits(count, shared):
    ptx = stores(count, shared)
    assert "st.global" in ptx
    assert re.search(r"shl\.b64\s+%rd\d+, %rd\d+, 2;", ptx), "the whole index counts words"


@counts
@both
def test_every_word_is_stored(count, shared):
    ptx, kind = stores(count, shared), "b32" if count == 1 else f"v{count}.b32"
    (stored,) = re.findall(rf"@p st\.global\.{kind} \[%rd\d+\], ([^;]+);", ptx)
    assert len(re.findall(r"%?r\d+", stored)) == count
    if shared:
        (loaded,) = re.findall(rf"ld\.shared\.{kind} ([^;]+), \[%r\d+\];", ptx)
        assert loaded == stored
        assert len(set(re.findall(r"r\d+", loaded))) == count


def test_a_run_begins_at_a_negative_position():
    load = words.load_guarded(ELEMENTS[torch.float32], 2)

    def loads(source, stride, begin, length):
        load(cuda.local.array(2, dtype=types.float32), source, stride, stride, begin, length)

    assert re.search(r"(cvt\.s64|mul\.wide)\.s32\s", ptx_of(loads, types.int64, types.int32, types.int32))


@pytest.mark.parametrize(("name", "size"), [("cp_async_vector", 16), ("cp_async_word", 4)])
def test_a_copy_is_of_a_whole_vector_or_word(name, size):
    copy = getattr(words, name)

    def copies(source, address):
        copy(address, words.global_address(source, 0))

    ptx = ptx_of(copies, types.int32)
    assert re.search(rf"cp\.async\.c[ag]\.shared\.global \[%r\d+\], \[%rd\d+\], {size};", ptx)
