"""The code of loads, stores and copies by address, computed in Python."""

import numpy as np
import pytest

from numba_tconv.ptx import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator has no addresses", allow_module_level=True)

from numba import types

from numba_tconv import ptx

from .builder_in_python import Builder, computed

WORDS = np.array([3 + 0x0101_0101 * z for z in range(16)], np.int32)
counts = pytest.mark.parametrize("count", [1, 2, 4])
wanted = pytest.mark.parametrize("wanted", [False, True])


def bits(values):
    return [one.number for one in values] if isinstance(values, list) else [values.number]


@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [(types.int32, "i4", n) for n in (1, 2, 4)]
    + [(types.float32, "f4", n) for n in (1, 2, 4)]
    + [(types.float64, "f8", n) for n in (1, 2)],
)
def test_loads_from_shared_memory(kind, dtype, count):
    builder = Builder()
    shared = builder.array(np.arange(16).astype(dtype))
    found = computed(ptx.ld_shared(count, kind), builder, shared.begin + 16)
    first = 16 // shared.view.itemsize
    assert bits(found) == shared.view[first : first + count].tolist()
    assert {z - shared.begin for z in builder.read} == set(range(16, 16 + count * shared.view.itemsize))


def test_a_half_is_loaded_without_a_sign():
    builder = Builder()
    shared = builder.array(np.array([1, 0x8001, 0xFFFE, 4], np.uint16))
    for z, value in enumerate(shared.view):
        found = computed(ptx.ld_shared_u16, builder, shared.begin + 2 * z)
        assert (found.type.width, found.number) == (32, value)
    array = builder.array(WORDS)
    assert computed(ptx.shared_address, builder, array, 5).number == array.begin + 20


@wanted
@counts
def test_words_are_stored_if_wanted(count, wanted):
    builder = Builder()
    target, local = builder.array(WORDS), builder.array(WORDS[::-1].copy())
    computed(ptx.st_global_if(count), builder, wanted, target, 4, local)
    after = WORDS.copy()
    if wanted:
        after[4 : 4 + count] = local.view[:count]
    assert target.view.tolist() == after.tolist()
    target.view[:] = WORDS
    computed(ptx.ld_shared_st_global_if(count), builder, wanted, target, 4, local.begin)
    assert target.view.tolist() == after.tolist()


@wanted
@pytest.mark.parametrize("used", [0, 1, 2, 3, 4])
def test_copies_have_zeros_after_what_is_used(used, wanted):
    for size in (4, 16):
        builder = Builder()
        shared, source = builder.array(WORDS), builder.array(WORDS[::-1].copy())
        count = used * size // 4
        computed(ptx.cp_async_to(size), builder, shared.begin + 16, source, 8, count)
        copied = source.view.view(np.uint8)[32 : 32 + size].tolist()
        assert shared.view.view(np.uint8)[16 : 16 + size].tolist() == copied[:count] + [0] * (size - count)
        assert shared.view[:4].tolist() == WORDS[:4].tolist()
    for elements in (1, 2, 4):
        builder = Builder()
        shared, source = builder.array(WORDS), builder.array(WORDS[::-1].copy())
        computed(ptx.cp_async(elements), builder, shared, 4, source, 8, wanted)
        after = WORDS.copy()
        after[4 : 4 + elements] = source.view[8 : 8 + elements] * wanted
        assert shared.view.tolist() == after.tolist()


@pytest.mark.parametrize("count", [1, 16, 32])
def test_other_sizes_of_copies_are_refused(count):
    shared = Builder().array(WORDS.astype(np.uint16))
    with pytest.raises(ValueError, match=f"copies 4, 8 or 16 bytes, not {2 * count}"):
        ptx.cp_async(count)._defn(None, shared.type, types.intp, shared.type, types.intp, types.boolean)


def test_words_and_vectors_are_copied_whole():
    for copy, size in ((ptx.cp_async_word, 4), (ptx.cp_async_vector, 16)):
        builder = Builder()
        shared, source = builder.array(WORDS), builder.array(WORDS[::-1].copy())
        address = computed(ptx.global_address, builder, source, 8)
        assert (address.type.width, address.number) == (64, source.begin + 32)
        computed(copy, builder, shared.begin + 16, address.number)
        after = WORDS.copy()
        after[4 : 4 + size // 4] = source.view[8 : 8 + size // 4]
        assert shared.view.tolist() == after.tolist()


def test_taking_by_a_switch():
    offsets, stride = (1, 0, 5), 2
    for case in range(3):
        builder = Builder()
        values, local = builder.array(np.zeros(4, np.int32)), builder.array(WORDS)
        computed(ptx.take(offsets, stride, 3), builder, values, local, case)
        assert values.view.tolist() == [*(WORDS[z + case * stride] for z in offsets), 0]


STORES = [
    (ptx.st_shared, [1.5, -2, 3, 4]),
    (ptx.st_shared_f32, [1.5]),
    (ptx.st_shared_v2_f32, [1.5, -2]),
    (ptx.st_shared_b32, [7]),
    (ptx.st_shared_v2_b32, [7, -9]),
    (ptx.st_shared_b64, [1 << 40]),
]


@pytest.mark.parametrize(("store", "values"), STORES, ids=range(len(STORES)))
def test_stores_to_shared_memory(store, values):
    dtype = np.int64 if max(values) > 1 << 32 else np.float32 if isinstance(values[0], float) else np.int32
    builder = Builder()
    shared = builder.array(WORDS)
    computed(store, builder, shared.begin + 16, *values)
    assert shared.view[4:].view(dtype)[: len(values)].tolist() == values
    assert {at - shared.begin for at in builder.written} == set(range(16, 16 + len(values) * dtype().itemsize))


def test_halves_are_stored_one_by_one():
    builder = Builder()
    shared = builder.array(np.zeros(8, np.uint16))
    computed(ptx.st_shared_u16, builder, shared.begin + 2, 0x12345)
    computed(ptx.st_shared_halves, builder, shared.begin + 4, shared.begin + 10, 0x00080007)
    assert shared.view.tolist() == [0, 0x2345, 7, 0, 0, 8, 0, 0]


@wanted
def test_vectors_of_global_memory_if_wanted(wanted):
    builder = Builder()
    target, source = builder.array(WORDS), builder.array(WORDS[::-1].copy())
    words = computed(ptx.ld_global_vector, builder, wanted, source, 8)
    assert bits(words) == ([int(word) for word in source.view[8:12]] if wanted else [0] * 4)
    assert bool(builder.read) == wanted
    computed(ptx.st_global_vector, builder, wanted, target, 4, (5, 6, 7, 8))
    assert target.view[4:8].tolist() == ([5, 6, 7, 8] if wanted else WORDS[4:8].tolist())
