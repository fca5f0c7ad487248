"""What is called a fixed number of times is straight-line code: no loop, no function, no index at run time."""

import re

import pytest

from numba_tconv.ptx import SIMULATOR, device_function, repeated

if SIMULATOR:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba import cuda, int32, types

from numba_tconv.runtime.kernel import Kernel, contiguous


@pytest.mark.parametrize(("first", "count"), [(0, 1), (2, 5), (3, 64)])
def test_each_call_has_its_number(first, count):
    @device_function
    def put(k, state):
        target, kept = state
        kept[k & 3] = k
        target[k] = kept[k & 3] + 100

    put_all = repeated(put, count)

    def kernel(target):
        kept = cuda.local.array(4, dtype=int32)
        put_all(int32(first), (target, kept))

    ptx = Kernel("stores", kernel, (contiguous(types.int32, 1),), 32).ptx((9, 0))
    stores = re.findall(r"st\.global\.u32 \s*\[%rd\d+(?:\+(\d+))?\], (%r\d+);", ptx)
    values = dict(re.findall(r"mov\.u32 \s*(%r\d+), (\d+);", ptx))
    assert [(int(at or 0), int(values[of])) for at, of in stores] == [
        (4 * k, k + 100) for k in range(first, first + count)
    ]
    assert not re.search(r"\b(call|bra)\b|\.local", ptx)
