"""How tensors lie in memory, by torch's own account."""

import pytest
import torch

from numba_tconv.runtime import layout
from numba_tconv.runtime.layout import PLACES, Layout, layout_of, room

SHAPES = [(), (5,), (2, 3, 4), (2, 1, 4), (1, 3, 1), (2, 0, 4), (3, 1, 1), (1, 1, 7)]
VIEWS = {
    "whole": lambda t: t,
    "other order": lambda t: t.transpose(1, 2),
    "part of rows": lambda t: t[:, :, 1:],
    "every other row": lambda t: t[:, ::2],
    "one row": lambda t: t[:, :1],
    "one column": lambda t: t[:, :, :1],
    "one sample": lambda t: t[1:],
    "turned": lambda t: t.permute(2, 0, 1),
    "overlapping and apart": lambda t: t.as_strided((2, 3), (5, 0)),
    "expanded": lambda t: t[:1].expand(3, -1, -1),
    "one of each, expanded": lambda t: t[:1, :1, :1].expand(2, 3, 4),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 4, 3), (2, 1, 4)], ids=str)
def test_the_layout_is_torchs(view, shape):
    tensor = VIEWS[view](torch.zeros(shape, dtype=torch.bfloat16))
    found = Layout.of(tensor)
    assert found[:3] == (tensor.shape, tensor.stride(), torch.bfloat16)
    assert found.index < 0
    assert found.offset == tensor.data_ptr() % PLACES
    assert found.is_contiguous == tensor.is_contiguous()
    assert found.is_dense == (torch.empty_like(tensor).stride() == tensor.stride()), (
        "torch keeps strides of dense tensors"
    )
    assert tuple(found) == layout_of(tensor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rooms_are_contiguous(monkeypatch, shape):
    made = room(shape, torch.float16, -1)()
    assert (tuple(made.shape), made.dtype) == (shape, torch.float16)
    assert Layout.contiguous(shape, torch.float16, 0)[:2] == (shape, made.stride())
    monkeypatch.setattr(layout, "_empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)
    as_on_a_gpu = room(shape, torch.float16, 0)()
    assert (as_on_a_gpu.shape, as_on_a_gpu.stride(), as_on_a_gpu.dtype) == (made.shape, made.stride(), made.dtype)
    assert as_on_a_gpu.data_ptr() != room(shape, torch.float16, 0)().data_ptr() or 0 in shape


def test_a_room_without_torchs_short_way_is_on_its_gpu(monkeypatch):
    asked = {}
    monkeypatch.setattr(layout, "_empty_on_gpu", None)
    monkeypatch.setattr(torch, "empty", lambda shape, **how: asked.update(shape=shape, **how))
    room((2, 3), torch.float32, 1)()
    assert asked == {"shape": (2, 3), "dtype": torch.float32, "device": torch.device("cuda", 1)}
