"""The operator of the alias-free activation on CPU tensors, and the plain-Python definition that judges it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from numba_tconv.formula.alias_free import ACTIVATIONS, alias_free
from numba_tconv.runtime.device import GPUS
from numba_tconv.torch_api import alias_free_operators as ops
from numba_tconv.torch_api.alias_free_operators import alias_free_activation, composed

CHOICES = 2, 2, True, "snake"


def operands(length=5, up=12, down=12, **kind):
    torch.manual_seed(0)
    sizes = (2, 3, length), (up,), (down,), (3,), (3,)
    return [torch.randn(size, dtype=torch.float64).to(**kind) for size in sizes]


def test_the_definition_at_both_ends_by_hand():
    """Taps 1, 2, 3, 4, ratio 2: each sample of u takes taps 1 and 3, or 0 and 2, of neighbours; the ends repeat."""
    assert reference.alias_free.upsampled([1, 10], [1, 2, 3, 4], 2) == [2 * n for n in (6, 13, 24, 40)]
    assert reference.alias_free.downsampled([1, 10, 100], [1, 2, 4], 2) == [1 + 2 + 40, 10 + 200 + 400]
    assert reference.alias_free.downsampled([1, 10, 100], [1, 2, 4, 8], 1) == [843, 1221, 1410]


@given(st.data())
def test_composed_is_the_definition(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    ratios = draw(1, 4), draw(1, 4)
    taps = draw(ratios[0], 32), draw(1, 32)
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    x, up, down, alpha, beta = operands(draw(1, 20), *taps)
    alpha, beta = (alpha, data.draw(st.sampled_from([None, beta]))) if activation == "snake" else (None, None)
    choices = *ratios, data.draw(st.booleans()), activation
    wanted = reference.alias_free_activation(x, up, down, alpha, beta, *choices)
    assert wanted.shape[2] == alias_free(x.shape, *taps, *ratios).out_length
    for function in (composed, alias_free_activation):
        y = function(x, up, down, alpha, beta, *choices)
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-13 * max(1, abs(wanted).max()))


def test_derivatives():
    x, up, down, alpha, beta = operands(4)
    wanted = [one.requires_grad_() for one in (x, alpha, beta)]

    def function(x, alpha, beta):
        return alias_free_activation(x, up, down, alpha, beta, *CHOICES)

    assert torch.autograd.gradcheck(function, wanted)
    assert torch.autograd.gradgradcheck(function, wanted)


def test_gradients_do_not_follow_autocast():
    """Torch's own do not either."""
    tensors = [one.requires_grad_() for one in operands(dtype=torch.float32)]

    def gradients(**autocast):
        y = alias_free_activation(*tensors, *CHOICES)
        with torch.autocast("cpu", torch.bfloat16, **autocast):
            first = torch.autograd.grad(y.square().sum(), tensors, create_graph=True)
            return *first, *torch.autograd.grad(sum(one.square().sum() for one in first), tensors)

    assert all(map(torch.equal, gradients(), gradients(enabled=False)))


@pytest.mark.parametrize("choices", [(3, 2, False, "snake"), (1, 4, True, "snake"), (2, 3, True, "gelu")], ids=str)
def test_gradients_of_other_choices(choices):
    tensors = [one.requires_grad_() for one in operands()]
    tensors[3:] = tensors[3:] if choices[3] == "snake" else (None, None)
    given = [one for one in tensors if one is not None]
    dy = torch.randn_like(composed(*tensors, *choices))
    ours, truth = (
        torch.autograd.grad(function(*tensors, *choices), given, dy) for function in (alias_free_activation, composed)
    )
    torch.testing.assert_close(ours, truth)


def test_operator():
    tensors = operands(dtype=torch.float32)
    torch.library.opcheck(alias_free_activation, (*(one.requires_grad_() for one in tensors), *CHOICES))


def test_an_empty_batch():
    x, *others = operands()
    for function in (alias_free_activation, ops._cuda):
        assert function(x[:0], *others, 2, 3, True, "snake").shape == (0, 3, 4)


# What the public function refuses itself: changed argument, value, error, its words.
BAD = [
    (0, torch.zeros(3, 5), RuntimeError, "x must be"),
    (2, torch.zeros(1, 12), RuntimeError, "down_filter must have one dimension"),
    (3, None, RuntimeError, "alpha is needed"),
    (8, "gelu", RuntimeError, "alpha is needed"),
]


@pytest.mark.parametrize(("place", "value", "kind", "words"), BAD, ids=[f"{case[0]}-{case[3]}" for case in BAD])
def test_bad_arguments(place, value, kind, words):
    arguments = [*operands(dtype=torch.float32), *CHOICES]
    arguments[place] = value
    with pytest.raises(kind, match=words):
        alias_free_activation(*arguments)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
def test_kernels_get_the_strides_that_they_were_made_ready_for(monkeypatch, gradients):
    """On a GPU: samples that lie apart are copied first."""
    x, *others = operands(8)
    apart = x.mT.contiguous().mT
    ready, signals = ("ready_gradients", 2) if gradients else ("ready", 1)
    got = []

    def made(sizes, *arguments):
        strides = arguments[:signals]
        return lambda *tensors: got.extend(zip(strides, (one.stride() for one in tensors), strict=False))

    monkeypatch.setattr(ops, ready, made)
    compute, more = (ops._gradients_cuda, (True,)) if gradients else (ops._cuda, ())
    compute(*[apart] * signals, *others, *CHOICES, *more)
    assert got == [(x.stride(), x.stride())] * signals


MANY = alias_free((2**31 // 3 + 1, 3, 1), 12, 12, 2, 2)


@pytest.mark.parametrize(
    ("dtype", "gpu", "sizes", "ours"),
    [
        (torch.float32, "Tesla T4", None, True),
        (torch.float16, "Tesla T4", None, True),
        (torch.bfloat16, "Tesla T4", None, False),  # has no bfloat16
        (torch.bfloat16, "NVIDIA A100", None, True),
        (torch.float32, "NVIDIA A100", MANY, False),  # more rows than a grid has blocks
        (torch.float32, "NVIDIA A100", MANY._replace(batch=0), False),
    ],
    ids=str,
)
def test_where_kernels_compute(monkeypatch, dtype, gpu, sizes, ours):
    sizes = sizes or alias_free((2, 3, 9), 12, 12, 2, 2)
    x = SimpleNamespace(is_cuda=True, dtype=dtype, get_device=lambda: 1)
    monkeypatch.setattr(ops.device, "of", {1: GPUS[gpu]}.get)
    monkeypatch.setattr(ops, "check", lambda *_: sizes)
    monkeypatch.setattr(ops.plan, "prepare", lambda *_: "prepared")
    assert ops._has_kernels(ops.Tensors(x, *[None] * 4), None) == ours
    if sizes.rows:
        made = ops.ready.__wrapped__(sizes, (27, 9, 1), dtype, 1, "snake", True)
        assert (made is not None) == ours
    x.is_cuda = False
    assert not ops._has_kernels(ops.Tensors(x, *[None] * 4), None)


@pytest.mark.parametrize(
    "wanted", [(1, 0, 0, 0, 0), (1, 0, 0, 1, 1), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1), (1, 0, 1, 0, 0)]
)
@pytest.mark.parametrize("recorded", [False, True])
def test_kernels_compute_the_gradients_that_are_wanted(monkeypatch, wanted, recorded):
    """Neither of filters nor for a derivative of the gradient."""
    x, up, down, alpha, beta = operands()
    asked = []
    monkeypatch.setattr(ops, "_has_kernels", lambda *_: True)
    monkeypatch.setattr(ops, "alias_free_gradients", lambda *told: asked.append(told[-1]) or ("x", "alpha", "beta"))
    monkeypatch.setattr(ops, "composed_gradients", lambda *_: ["torch's"] * 5)
    tensors = (x, up, down, alpha, beta)
    ctx = SimpleNamespace(choices=CHOICES, saved_tensors=tensors, needs_input_grad=(*map(bool, wanted), *[False] * 4))
    with torch.set_grad_enabled(recorded):
        found = ops._backward(ctx, x)
    if recorded or wanted[2]:
        assert (found, asked) == ((*["torch's"] * 5, *[None] * 4), [])
    else:
        names = "x", None, None, "alpha", "beta"
        assert found == (*(name if of else None for name, of in zip(names, wanted, strict=True)), *[None] * 4)
        assert asked == [bool(wanted[3] or wanted[4])]


TIES = {"one tensor": lambda x, alpha: (x, alpha), "by computation": lambda x, alpha: (alpha[:, None] * x, alpha.exp())}


@pytest.mark.parametrize("tie", TIES)
def test_operands_may_depend_on_each_other(tie):
    x, up, down, alpha, _ = operands()
    alpha.requires_grad_()

    def gradients(function):
        tied, beta = TIES[tie](x, alpha)
        y = function(tied, up, down, alpha, beta, *CHOICES)
        first = torch.autograd.grad(y.square().sum(), alpha, create_graph=True)[0]
        return first, torch.autograd.grad(first.sum(), alpha)[0]

    torch.testing.assert_close(gradients(alias_free_activation), gradients(composed))
