"""``warm`` finds alias-free activations too."""

import contextlib
import pickle
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import numba_tconv
from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.kernel import Kernel
from numba_tconv.selection.directions import FORWARD, STEP
from numba_tconv.torch_api import alias_free
from numba_tconv.torch_api.alias_free_operators import as_on_a_gpu
from numba_tconv.torch_api.compile_ahead import calls_of
from numba_tconv.torch_api.noted import NotedActivation, computations, transposed_convolutions

ACTIVATION = NotedActivation(AliasFree(2, 8, 100, 12, 12), torch.float32, "snake", True, False)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_activations_are_found_on_every_device(device):
    """Not as the transposed convolutions that they contain."""
    with FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        x, alpha, beta, taps = (torch.empty(shape, device=device) for shape in ((2, 8, 100), 8, 8, 12))

    def function(x):
        return numba_tconv.alias_free_activation(x, alpha, beta, up_filter=taps, down_filter=taps)

    assert computations(function, x) == [ACTIVATION]
    assert not as_on_a_gpu.get()


def test_activations_are_found_with_their_dtype():
    layer, x = numba_tconv.AliasFreeActivation(8, dtype=torch.bfloat16), torch.empty(2, 8, 100, dtype=torch.bfloat16)
    assert computations(layer, x) == [ACTIVATION._replace(dtype=torch.bfloat16)]


def test_they_are_no_transposed_convolutions():
    assert transposed_convolutions(numba_tconv.AliasFreeActivation(8), torch.empty(2, 8, 100)) == []


@pytest.mark.parametrize("direction", [FORWARD, STEP])
def test_an_activations_kernels(direction):
    call, *frozen = pickle.loads(pickle.dumps(calls_of([ACTIVATION, ACTIVATION], H200, direction)))
    gradients = ["alias_free_gradient", "alias_free_parameters"] if direction == STEP else []
    assert [kernel.name for kernel in call.kernels()] == ["alias_free", *gradients]
    assert frozen == ([] if direction == STEP else [replace(call, log_scale=False)])
    half = ACTIVATION._replace(dtype=torch.bfloat16)
    assert len(calls_of([half], H200)) == 1
    assert calls_of([half], replace(H200, cc=(7, 5))) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [{}, {"log_scale": False}, {"activation": "silu"}], ids=str)
def test_a_layer_may_be_frozen_afterwards(form, dtype, monkeypatch):
    layer = numba_tconv.AliasFreeActivation(8, dtype=dtype, **form).eval()
    x, found = torch.zeros(2, 8, 100, dtype=dtype), []
    for _ in range(2):
        calls = calls_of(computations(layer, x), H200)
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(alias_free, "computed", lambda tensors, form: found.append(form.log_scale))
            layer(x)
        assert {one.log_scale for one in calls} >= {*found}
        numba_tconv.freeze(layer)
    assert {one.log_scale for one in calls} == {*found}


def test_warm_compiles_them(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(Kernel, "ptx", lambda kernel, _: kernel.name)  # other tests compile them
    layer, x = numba_tconv.AliasFreeActivation(8), torch.empty(2, 8, 100)
    assert [numba_tconv.warm(layer, x, training=training, jobs=1) for training in (False, True, True)] == [2, 2, 0]
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {
        *("alias_free", "alias_free_gradient", "alias_free_parameters")
    }
