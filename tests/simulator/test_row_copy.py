"""Copies in rows that begin at multiples of 16 bytes, in the CUDA simulator."""

import pytest
import torch

from numba_tconv.kernels.common import rows as row_copy
from numba_tconv.kernels.common.tensor_map import lies_in_rows
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.kernels.k6_wgmma import input as k6_input
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma.boxes import RowAlignment
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.layout import Layout
from tests.thorough import thorough

VIEWS = {
    "whole": lambda t: t,
    "channels last": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "samples within channels": lambda t: t.transpose(0, 1),
    "every other element": lambda t: t[:, :, ::2],
    "without the first": lambda t: t[:, :, 1:],
    "expanded": lambda t: t[:, :1].expand(-1, 3, -1),
    "backwards": lambda t: t.flip(2),
}


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setattr(row_copy, "THREADS", 8)
    row_copy.make_kernel.cache_clear()
    row_copy._prepared.cache_clear()
    yield
    row_copy.make_kernel.cache_clear()
    row_copy._prepared.cache_clear()


@pytest.mark.parametrize(
    "dtype", thorough([torch.float32, torch.float16, torch.bfloat16], always=[torch.float32, torch.bfloat16]), ids=str
)
@pytest.mark.parametrize("columns", [*range(1, 12), 16, 17, 31, 40])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_tensors_that_no_map_describes_are_copied_into_rows(dtype, columns, start):
    memory = torch.randn(1000).to(dtype)
    tensor = memory[start:].as_strided((2, 3, columns), (3 * columns, columns, 1))
    lies = tensor.data_ptr() % 16 == 0 and columns * dtype.itemsize % 16 == 0
    assert lies_in_rows(Layout.of(tensor)) == lies
    copied = row_copy.in_rows(tensor)
    assert (copied is tensor) == lies
    assert torch.equal(copied, tensor)
    assert lies_in_rows(Layout.of(copied))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_of_any_strides_are_copied(dtype, view):
    tensor = VIEWS[view](torch.randn(2, 3, 37).to(dtype))
    assert torch.equal(row_copy.to_rows(tensor), tensor)


@pytest.mark.parametrize("first", [-24, -8, 0, 8])
@pytest.mark.parametrize("pitch", [8, 16, 56, 64])
def test_beyond_a_row_are_zeros(pitch, first):
    tensor = torch.randn(2, 3, 37).half()
    copied = row_copy.copied(tensor, pitch, first)
    places = torch.arange(pitch) + first
    inside = (places >= 0) & (places < 37)
    assert torch.equal(copied[:, :, inside], tensor[:, :, places[inside]])
    assert not copied[:, :, ~inside].any()


@pytest.mark.parametrize("vectors", [20, 16], ids=["all full", "the last in part"])
def test_rows_in_several_layers(vectors, monkeypatch):
    """As where there are more vectors than 32 bits count."""
    monkeypatch.setattr(row_copy, "LAYER", vectors)
    tensor = torch.randn(5, 3, 13)
    assert torch.equal(row_copy.to_rows(tensor), tensor)


def test_joined_samples_have_zeros_between_them():
    x = torch.arange(1.0, 31).reshape(3, 2, 5)
    for first in (0, -8):
        joined = k6_input.join(x, first, 16)
        assert joined.shape == (1, 2, 48)
        groups = joined.reshape(2, 3, 16)
        assert torch.equal(groups[:, :, -first : 5 - first], x.transpose(0, 1))
        assert joined.count_nonzero() == x.numel()


def test_copies_are_laid_out_as_told():
    x = torch.randn(3, 22, 7)
    head, waveglow = (workloads.get(name).problem for name in ("head", "waveglow"))
    joined = next(config for config in k6_config.configs(waveglow, "tf32") if config.joined)
    for config in (k6_choose.choose_whole(head, "tf32"), joined):
        told = k6_input.input_of(x.shape, x.stride(), 0, config, 1, (0, 16))
        copy = told.copy(x)
        assert (tuple(copy.shape), copy.stride(), told.rows) == (told.shape, told.strides, RowAlignment())
        if not config.joined:
            assert torch.equal(copy, x)


def test_more_rows_than_it_counts_are_refused():
    with pytest.raises(NotImplementedError, match="4,294,967,296 rows"):
        row_copy._prepared((1 << 16, 1 << 16, 1), (1 << 16, 1, 1), torch.float32, 0, 4, 0)
