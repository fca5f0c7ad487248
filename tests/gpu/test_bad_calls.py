"""Calls of bad_calls.py on CUDA tensors: refused as torch refuses them, before allocation or launch.

Accepted calls only make their output; no kernel is compiled.
"""

import pytest
import torch

import numba_tconv
from numba_tconv.selection.registry import RUNGS
from tests.bad_calls import disagreements, is_huge, is_left_to_torch, pairs_of_arguments, tensors_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Sparse CSR")]


@pytest.fixture
def ran(monkeypatch):
    """The rungs that were asked to compute; they do not."""
    names = []
    for rung in RUNGS.values():
        monkeypatch.setattr(type(rung), "run", lambda rung, *_, **__: names.append(rung.name))
    return names


def depends_on_the_backend(arguments):
    """Whether torch would read tensors without memory, or accepts the call in some backends only."""
    return (
        any(tensor.is_meta for tensor in tensors_of(arguments))
        or is_huge(arguments)
        or repr(arguments.get("dilation")) in ("0", "(0,)")
    )


@pairs_of_arguments
def test_refuses_what_torch_refuses_before_anything_runs(pair, ran):
    def happened(arguments, ours, theirs):
        was, ran[:] = list(ran), []
        if isinstance(theirs, torch.Tensor) or is_left_to_torch(arguments):
            return None
        return f"{was} ran" if was else None

    assert disagreements(pair, "cuda", depends_on_the_backend, happened) == {}


@pytest.mark.parametrize("name", ["input", "weight", "bias", "stride", "groups"])
def test_a_refusal_allocates_nothing(name, ran):
    def allocated(arguments, ours, theirs):
        if isinstance(theirs, torch.Tensor) or is_left_to_torch(arguments):
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with pytest.raises(type(theirs)):
            numba_tconv.conv_transpose1d(**arguments)
        more = torch.cuda.max_memory_allocated() - before
        return f"{more} bytes were allocated" if more else None

    assert disagreements((name, name), "cuda", depends_on_the_backend, allocated) == {}
