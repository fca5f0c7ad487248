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


class Warp:
    """Lanes of a warp, one after another up to each meeting: what they write to a map, and what is published."""

    def __init__(self, monkeypatch):
        self.shared, self.published, self.lane, self.calls = {}, {}, None, []
        fakes = dict(
            st_shared_b64=lambda at, word: self.by_one(lambda: self.shared.__setitem__(at, word)),
            tensormap_replace_address=lambda at, value: self.by_one(lambda: self.replace(at, "address", value)),
            tensormap_replace_size=lambda dimension: (
                lambda at, value: self.by_one(lambda: self.replace(at, f"size {dimension}", value))
            ),
            tensormap_publish=self.publish,
            tensormap_acquire=lambda at: self.calls.append(("acquire", self.lane, at)),
            recomputed=lambda value: value,
            cuda=SimpleNamespace(syncwarp=lambda: self.calls.append(("meet", self.lane))),
        )
        for name, value in fakes.items():
            monkeypatch.setattr(tensor_map, name, value)
        for name in ("_stage", "_hand_over", "publish"):
            monkeypatch.setattr(tensor_map, name, getattr(tensor_map, name).py_func)
        monkeypatch.setattr(tensor_map, "device_function", lambda function: function)

    def by_one(self, write):
        assert self.lane == 0, "by one lane"
        write()

    def replace(self, at, field, value):
        assert at in self.shared, "staged before"
        self.shared[at, field] = value

    def publish(self, maps, at):
        assert self.calls[-1] == ("meet", self.lane), "when all lanes have come"
        self.calls.append(("publish", self.lane, maps))
        if self.lane == 0:
            self.published[maps] = {
                key[1] if isinstance(key, tuple) else key - at: value for key, value in self.shared.items()
            }

    def run(self, function, *arguments):
        of_lanes = []
        for self.lane in (0, 5):
            self.calls.clear()
            function(*arguments, self.lane)
            of_lanes.append([(name, *of) for name, _, *of in self.calls])
        return of_lanes


TEMPLATE = [100 + z for z in range(16)]
WORDS = {8 * z: word for z, word in enumerate(TEMPLATE)}


def test_a_map_is_published_by_a_whole_warp(monkeypatch):
    warp = Warp(monkeypatch)
    calls = warp.run(tensor_map.publish, TEMPLATE, 4096, 1 << 30, 256)
    assert calls == [[("meet",), ("publish", 1 << 30), ("meet",)]] * 2
    assert warp.published == {1 << 30: {**WORDS, "address": 4096}}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("boxes", "early", "stride_c", "channels"), [(1, 0, 64, 7), (4, 3, 301, 7), (2, 1, 302, 9)])
def test_each_set_of_rows_has_its_own_map(monkeypatch, itemsize, boxes, early, stride_c, channels):
    """Its first row begins ``before`` elements after a boundary of 16 bytes, and every boxes-th one follows."""
    warp, length, maps, vector = Warp(monkeypatch), 300, 1 << 30, 16 // itemsize
    publish_sets, acquire_sets = tensor_map.make_publish(itemsize)
    address = (1 << 20) + early * itemsize
    of_lanes = warp.run(publish_sets, TEMPLATE, maps, 256, boxes, address, early, stride_c, length, channels)
    places = [maps + box * tensor_map.MAP_BYTES for box in range(boxes)]
    assert of_lanes == [[call for at in places for call in (("meet",), ("publish", at), ("meet",))]] * 2
    for box, at in enumerate(places):
        first = address + box * stride_c * itemsize
        before = first % 16 // itemsize
        rows = len(range(box, channels, boxes))
        begin = {"address": first - before * itemsize, "size 0": length + before, "size 1": rows}
        assert warp.published[at] == {**WORDS, **begin}
        assert before < vector
    assert warp.run(acquire_sets, maps, boxes) == [[("acquire", at) for at in places], []]
