"""The code of intrinsics over vectors, computed in Python, is what the simulator's stand-ins say."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from numba_tconv.ptx import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator takes their meanings instead", allow_module_level=True)

from numba_tconv import ptx
from numba_tconv.ptx.simulator import meanings
from numba_tconv.ptx.unrolled import windows
from numba_tconv.runtime.elements import ELEMENTS

from .builder_in_python import Builder, computed

STORED = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
elements = pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda element: element.name)
halves = pytest.mark.parametrize(
    "element", [e for e in ELEMENTS.values() if e.storage.bitwidth == 16], ids=lambda element: element.name
)
VALUES = [3, -2, 5, 1, -7, 4, 2, 9, -6, 8, 11, -1, 13, 7, -3, 6, 10, -5, 12, -4]  # differ, and are exact in all dtypes


def accumulators(element, count, first=0):
    return np.array([VALUES[(first + z) % len(VALUES)] for z in range(count)], STORED[element.accumulator.name])


def stored(element, count, first=0):
    values = np.array([VALUES[(first + z) % len(VALUES)] for z in range(count)], np.float32)
    if element.name == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(STORED[element.name])


def narrowing(element):
    """The element, whose ``store`` is Python's."""
    return SimpleNamespace(storage=element.storage, name=element.name, store=lambda value: stored_one(element, value))


def stored_one(element, value):
    if element.name == "bfloat16":
        return np.float32(value).view(np.uint32) >> 16
    return STORED[element.name](value)


def same(intrinsic, meaning, arrays, arguments):
    """Whether both leave the same in ``arrays``; what the code has read and written.

    ``arguments``: names of arrays, and numbers."""
    builder, wanted = Builder(), {}
    for name, values in arrays.items():  # aligned as the builder's are
        whole = np.zeros(values.size + 16, values.dtype)
        first = -whole.ctypes.data % 16 // values.itemsize
        wanted[name] = whole[first : first + values.size]
        wanted[name][:] = values
    placed = {name: builder.array(values) for name, values in arrays.items()}
    meaning(*(wanted.get(a, a) if isinstance(a, str) else a for a in arguments))
    computed(intrinsic, builder, *(placed[a] if isinstance(a, str) else a for a in arguments))
    for name, array in placed.items():
        assert array.view.tolist() == wanted[name].tolist(), name
    return {
        name: {(address - array.begin) // array.view.itemsize for address in builder.read} & set(range(array.view.size))
        for name, array in placed.items()
    }


@elements
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_a_run_from_any_place_of_a_vector(element, count):
    vector = 128 // element.storage.bitwidth
    for skip in range(vector):
        arrays = {"window": accumulators(element, count + 1), "source": stored(element, 5 * vector + 8, 3)}
        meaning = partial(meanings.run, element, count)
        read = same(ptx.load_run(element, count), meaning, arrays, ("window", "source", vector, skip))
        assert read["source"] == set(range(vector, vector * (1 + ptx.vectors_of(element, count))))


@elements
@pytest.mark.parametrize(("stride", "begin", "length"), [(1, -2, 3), (3, 0, 9), (2, 1, 4), (5, 2, 0), (1, -9, 3)])
def test_a_guarded_run(element, stride, begin, length):
    arrays = {"window": accumulators(element, 6), "source": stored(element, 80)}
    at = 7 - min(begin, 0) * stride
    meaning = partial(meanings.guarded_run, element, 5)
    read = same(ptx.load_guarded(element, 5), meaning, arrays, ("window", "source", at, stride, begin, length))
    assert read["source"] == {at + i * stride for i in range(begin, begin + 5) if 0 <= i < length}


@elements
def test_a_run_is_stored(element):
    vector = 128 // element.storage.bitwidth
    for count in (None, vector, max(vector // 2, 1)):
        for at in (0, 1, 3):
            arrays = {"target": stored(element, 4 * vector), "values": accumulators(element, 16, 5)}
            meaning = partial(meanings.stored_run, narrowing(element), count=count)
            same(ptx.store_run(element, count), meaning, arrays, ("target", vector, "values", at))


# (sum, factor, place): twice the same ones, in another order, more than a vector of either.
PRODUCTS = ((0, 0, 1), (1, 1, 0), (0, 2, 3), (2, 5, 9), (1, 0, 6), (0, 5, 4), (2, 9, 1))


@elements
@pytest.mark.parametrize("apart", [False, True])
def test_sums_of_products_from_shared_memory(element, apart):
    each = 128 // element.accumulator.bitwidth
    arrays = {"sums": accumulators(element, 4), "inputs": stored(element, 24, 2), "weights": accumulators(element, 24)}
    meaning = partial(meanings.multiplied_window, element, PRODUCTS, apart)
    told = ("sums", "inputs", windows.GRANULE, "weights", each)
    read = same(windows.multiply_window(element, PRODUCTS, apart), meaning, arrays, told)
    granules = {(windows.GRANULE + j) // windows.GRANULE for *_, j in PRODUCTS}
    assert read["inputs"] == {4 * granule + z for granule in granules for z in range(4)}


CASES = (PRODUCTS, ((0, 1, 2), (2, 0, 0)), ((1, 3, 3), (1, 4, 2), (1, 4, 3)))


@pytest.mark.parametrize("cases", [CASES, CASES[:1]], ids=len)
def test_a_switch_between_patterns(cases):
    for case in range(-1, len(cases) + 2):
        arrays = {name: np.array(VALUES[k : k + 12], np.float32) for k, name in enumerate(("sums", "a", "b"))}
        meaning = partial(meanings.multiplied, (*cases, *[cases[-1]] * 2))
        same(ptx.multiply_add(cases), meaning, arrays, ("sums", "a", "b", case))


@halves
@pytest.mark.parametrize("granule", [1, 2, 4, 8])
def test_runs_meet_factors(element, granule):
    granules, vector = 16 // granule, 8
    for case in range(len(CASES)):
        arrays = {"sums": accumulators(element, 9), "a": accumulators(element, 12, 4), "source": stored(element, 48)}
        meaning = partial(meanings.multiplied_runs, element, CASES, 3, granule, granules, 3)
        intrinsic = ptx.multiply_runs(element, CASES, 3, granule, granules, 3)
        read = same(intrinsic, meaning, arrays, ("sums", "a", "source", vector, 2 * vector // 2, case))
        assert read["source"] == set(range(vector, vector + 2 * vector + 16))


def test_sums_are_spread_and_stored_by_runs():
    def spread(sums, values):
        for r in range(3):
            sums[4 * r : 4 * r + 4] = values[r]

    def store(shared, index, sums):
        for r in range(3):
            shared[index + 6 * r : index + 6 * r + 4] = sums[4 * r : 4 * r + 4]

    arrays = {"sums": np.array(VALUES[:13], np.float32), "values": np.array(VALUES[5:9], np.float32)}
    same(windows.spread(3, 4), spread, arrays, ("sums", "values"))
    arrays = {"shared": np.zeros(24, np.float32), "sums": arrays["sums"]}
    same(windows.store_runs(3, 4, 6), store, arrays, ("shared", 3, "sums"))


@elements
def test_vectors_are_copied_by_cp_async(element):
    vector = 128 // element.storage.bitwidth
    arrays = {"shared": stored(element, 8 * vector), "source": stored(element, 9 * vector, 5)}
    meaning = partial(meanings.copied_vectors, 3, 2 * vector)
    same(windows.copy_vectors(3, 2 * vector), meaning, arrays, ("shared", vector, "source", 2 * vector))


@elements
def test_gathered_elements_are_stored(element):
    vector = 128 // element.storage.bitwidth
    places = np.array([1, 9, 4, 6, 2, 13, 8, 3][:vector], np.int32)
    arrays = {"target": stored(element, 6 * vector), "shared": accumulators(element, 30, 1), "places": places}
    meaning = partial(meanings.gathered, narrowing(element), 3, 5, vector)
    same(windows.store_gathered(element, 3, 5, vector), meaning, arrays, ("target", vector, "shared", "places"))


DTYPES = pytest.mark.parametrize("dtype", ["f4", "f8", "u2", "f2"])


def numbers(count, dtype, first=0):
    return np.array([(7 * (first + z)) % 61 for z in range(count)], dtype)


@DTYPES
def test_vectors_between_shared_memory_and_registers(dtype):
    n = 16 // np.dtype(dtype).itemsize
    arrays = {"local": numbers(3 * n, dtype), "shared": numbers(6 * n, dtype, 40)}

    def load(local, at, shared, index):
        local[at : at + n] = shared[index : index + n]

    same(ptx.load_vector, load, arrays, ("local", 1, "shared", 2 * n))
    same(ptx.store_vector, load, arrays, ("shared", 2 * n, "local", 3))

    def store(shared, index, local):
        for q in range(2):
            shared[index + 3 * q * n :][:n] = local[q * n : q * n + n]

    same(ptx.store_vectors(2, 3 * n), store, arrays, ("shared", n, "local"))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_vectors_are_loaded_by_address_and_added(dtype):
    n = 16 // np.dtype(dtype).itemsize
    arrays = {"local": numbers(3 * n, dtype), "shared": numbers(6 * n, dtype, 40)}
    builder = Builder()
    local, shared = (builder.array(values) for values in arrays.values())
    base = computed(ptx.shared_base, builder, shared).number
    assert base == shared.begin
    computed(ptx.load_vector_at, builder, local, 1, shared, base + 32)
    assert local.view[1 : 1 + n].tolist() == shared.view[2 * n : 3 * n].tolist()
    assert local.view[1 + n :].tolist() == arrays["local"][1 + n :].tolist()

    def add(local, shared, index):
        for q in range(2):
            local[q * n : q * n + n] += shared[index + 3 * q * n :][:n]

    same(ptx.add_vectors(2, 3 * n), add, arrays, ("local", "shared", n))
