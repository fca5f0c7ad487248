"""The layer in torch's surroundings: copies, files, parametrizations, autocast."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from numba_tconv import ConvTranspose1d, conv_transpose1d
from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.torch_api import operators as ops


def made(kind=ConvTranspose1d, **choice):
    torch.manual_seed(3)
    return kind(4, 6, 5, stride=3, padding=2, output_padding=1, groups=2, dilation=2, **choice)


def pickled(layer):
    return pickle.loads(pickle.dumps(layer))


def saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_parameters_want_gradients_unless_told():
    layer = made().requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert all(parameter.requires_grad for parameter in layer.requires_grad_().parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved], ids=lambda copied: copied.__name__)
def test_copies(copied):
    layer = made(variant="k1_gather", precision="ieee").eval()
    layer.weight.requires_grad_(False)
    again = copied(layer)
    assert type(again) is ConvTranspose1d
    assert repr(again) == repr(layer)
    assert not again.training
    assert [p.requires_grad for p in again.parameters()] == [False, True]
    x = torch.randn(2, 4, 7)
    again.variant = layer.variant = None  # CPU tensors do not take it
    assert torch.equal(again(x), layer(x))
    with torch.no_grad():
        again.weight.zero_()
    assert layer.weight.any()


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"variant": "nope"}, "unknown variant 'nope': the rungs are k1_gather, "),
        ({"precision": "tf31"}, "unknown precision 'tf31': there are fp64, ieee, "),
    ],
)
def test_what_no_call_would_take_is_refused_when_a_layer_is_made(choice, said):
    """The exception is a call's; a call checks again, since attributes change."""
    with pytest.raises(ValueError, match=said):
        made(**choice)
    layer = made()
    vars(layer).update(choice)
    with pytest.raises(ValueError, match=said.partition(":")[0]):
        layer(torch.randn(2, 4, 7))


def test_results_are_contiguous_whatever_the_weight_is():
    """torch's own operator gives some with swapped dimensions."""
    x, weight = torch.randn(2, 4, 7), torch.randn(6, 4, 5).transpose(0, 1)
    turned = torch.randn(4, 5, 6).transpose(1, 2)
    assert not all(torch.conv_transpose1d(x, one).is_contiguous() for one in (weight, turned))
    for one in (weight, turned):
        for given in (x, x[0]):
            y = conv_transpose1d(given, one)
            assert y.is_contiguous()
            assert torch.equal(y, torch.conv_transpose1d(given, one))
        torch.library.opcheck(ops.conv_transpose1d, (x, one, None, 1, 0, 0, 1, 1, "", "ieee"))


def test_weight_norms_checkpoints_are_torchs():
    theirs, ours = weight_norm(made(nn.ConvTranspose1d)), weight_norm(made())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        theirs.parametrizations.weight.original0.mul_(1.5)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 7)
    assert torch.equal(ours(x), theirs(x))
    ours(x).sum().backward()
    assert ours.parametrizations.weight.original0.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_the_cpu_is_torchs(dtype):
    x = torch.randn(2, 4, 7)
    results = []
    for layer in (made(nn.ConvTranspose1d), made()):
        with torch.autocast("cpu", dtype):
            y = layer(x)
            assert layer(x.to(dtype)).dtype == dtype
            with pytest.raises(RuntimeError):  # autocast leaves float64 as it is
                layer(x.double())
        y.float().square().sum().backward()
        results.append((y, layer.weight.grad, layer.bias.grad))
    assert [tensor.dtype for tensor in results[1]] == [dtype, torch.float32, torch.float32]
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(*results, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS[torch.float32])
def test_a_model_of_a_named_precision_runs_under_autocast(precision):
    """The second layer gets the first one's output in autocast's dtype."""
    theirs, ours = (
        nn.Sequential(*(kind(4, 4, 3, **choice) for _ in range(2)))
        for kind, choice in ((nn.ConvTranspose1d, {}), (ConvTranspose1d, {"precision": precision}))
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
        assert torch.equal(ours(x), theirs(x))
        for wrong in ("fp16", "tf32x4"):
            ours[1].precision = wrong
            with pytest.raises(ValueError, match=f"unknown precision '{wrong}': torch.bfloat16 has bf16"):
                ours(x)
