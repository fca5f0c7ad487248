"""Tensor maps as the host makes them, without a GPU: what the driver is asked, and in whose context."""

from types import SimpleNamespace

import pytest
import torch

from numba_tconv.kernels.common import tensor_map
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.layout import NO_GPU, Layout

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no copy engine")


def test_a_thread_that_has_no_context_gets_torchs_first(monkeypatch):
    """A thread of autograd's may first make a map: torch gives it no context before a launch."""
    asked = []

    def encode_tiled(*arguments):
        asked.append("map")
        return 0, SimpleNamespace(opaque=[1 << 63] + 15 * [7])

    monkeypatch.setattr(tensor_map.driver, "cuTensorMapEncodeTiled", encode_tiled)
    monkeypatch.setattr(tensor_map, "enter_context", lambda device: asked.append(f"context of {device}"))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    words = tensor_map.encode("bf16", (64, 8, 2), (128, 1024), (64, 8, 1))
    assert asked == ["context of 3", "map"]
    assert words == (-(1 << 63), *15 * [7]), "as the signed numbers that a kernel's argument holds"


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(
    ("precision", "kind"), [("tf32", "TFLOAT32"), ("tf32x3", "FLOAT32"), ("fp16", "UINT16"), ("bf16", "UINT16")]
)
def test_what_the_driver_is_asked(monkeypatch, precision, kind, swizzled):
    asked = []

    def encode_tiled(*arguments):
        asked.extend(arguments)
        return 0, SimpleNamespace(opaque=[])

    monkeypatch.setattr(tensor_map.driver, "cuTensorMapEncodeTiled", encode_tiled)
    monkeypatch.setattr(tensor_map, "enter_context", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    tensor_map.encode(precision, (64, 8, 2), (128, 1024), (32, 4, 1), swizzled)
    elements, dimensions, _, *lists, _, swizzle, _, _ = asked
    assert elements.name == f"CU_TENSOR_MAP_DATA_TYPE_{kind}"
    assert dimensions == 3
    assert [[int(one) for one in some] for some in lists] == [[64, 8, 2], [128, 1024], [32, 4, 1], [1, 1, 1]]
    assert swizzle.name == f"CU_TENSOR_MAP_SWIZZLE_{'128B' if swizzled else 'NONE'}"


@pytest.mark.parametrize("place", range(3), ids=["samples", "channels", "positions"])
def test_a_size_beyond_32_bits_has_no_map(place):
    for more, lies in ((-8, True), (0, False)):
        shape = [8, 8, 8]
        shape[place] = tensor_map.LARGEST_SIZE + more
        assert tensor_map.lies_in_rows(Layout.contiguous(tuple(shape), torch.float16, NO_GPU)) == lies
