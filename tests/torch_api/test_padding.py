"""Pairs and words for ``padding`` on the CPU: the function, its gradients, the layer, export and refusals."""

import copy
import itertools
import pickle
import random

import numpy as np
import pytest
import torch

import numba_tconv
import reference
from numba_tconv.formula.padding import WORDS, ends_of
from numba_tconv.lab.explain.explain import explain
from numba_tconv.lab.measure import fuzz
from numba_tconv.torch_api import torchs
from reference import lengths
from tests.thorough import thorough

PAIRS = list(itertools.product((-9, -1, 0, 2, 6), repeat=2))
LAYERS = [*WORDS, (1, 3), (-2, 1)]


def tensors(length, taps):
    made = torch.randn(2, 2, length), torch.randn(2, 3, taps), torch.randn(3)
    return [one.double().requires_grad_() for one in made]


@pytest.mark.parametrize("padding", thorough([*WORDS, *PAIRS], always=[*WORDS, *PAIRS[::3]], tuples=True), ids=str)
def test_outputs_and_gradients_are_the_references(padding):
    for length, taps, stride, dilation in itertools.product((1, 5), (1, 4, 7), (1, 3, 5), (1, 2)):
        x, w, bias = tensors(length, taps)
        pair = padding if isinstance(padding, tuple) else ends_of(padding, taps, stride, dilation)
        numbers = x.detach().numpy(), w.detach().numpy()
        if (length - 1) * stride - sum(pair) + dilation * (taps - 1) + 1 < 1:
            with pytest.raises(RuntimeError, match="must leave at least one output"):
                numba_tconv.conv_transpose1d(x, w, bias, stride, padding, dilation=dilation)
            continue
        y = numba_tconv.conv_transpose1d(x, w, bias, stride, padding, dilation=dilation)
        expected = reference.conv_transpose1d(*numbers, bias.detach().numpy(), stride, pair, dilation=dilation)
        np.testing.assert_allclose(y.detach(), expected)
        g = torch.randn_like(y)
        found = torch.autograd.grad(y, (x, w, bias), g)
        g, sizes = g.numpy(), dict(stride=stride, padding=pair, dilation=dilation)
        np.testing.assert_allclose(found[0], reference.grad_input(g, numbers[1], length, **sizes), atol=1e-12)
        np.testing.assert_allclose(found[1], reference.grad_weight(g, numbers[0], taps, **sizes), atol=1e-12)
        np.testing.assert_allclose(found[2], reference.grad_bias(g), atol=1e-12)


@pytest.mark.parametrize("stride", range(1, 7))
@pytest.mark.parametrize("taps", range(1, 9))
def test_words_are_those_of_keras_and_jax(taps, stride):
    x, w = torch.randn(5).double(), torch.randn(taps).double()
    for word in ("same", "valid") if taps >= stride else ("same",):
        y = numba_tconv.conv_transpose1d(x[None], w[None, None], stride=stride, padding=word)[0]
        for theirs in (lengths.keras, lengths.jax):
            np.testing.assert_allclose(y, theirs(x.numpy(), w.numpy(), stride, word), atol=1e-12)
    y = numba_tconv.conv_transpose1d(x[None], w[None, None], stride=stride, padding="causal")[0]
    np.testing.assert_allclose(y, lengths.causal(x.numpy(), w.numpy(), stride), atol=1e-12)


@pytest.mark.parametrize("padding", thorough(LAYERS, always=["causal", (1, 3)], tuples=True), ids=str)
def test_second_derivatives_and_vmap(padding):
    x, w, bias = tensors(4, 4)

    def call(*operands):
        return numba_tconv.conv_transpose1d(*operands, 2, padding)

    assert torch.autograd.gradgradcheck(call, (x, w, bias))
    by_samples = torch.vmap(lambda one: call(one, w, bias))(x)
    torch.testing.assert_close(by_samples, call(x, w, bias))


@pytest.mark.parametrize("padding", thorough(LAYERS, always=["same", (-2, 1)], tuples=True), ids=str)
def test_the_layer(padding):
    layer = numba_tconv.ConvTranspose1d(4, 6, 7, 2, padding, bias=True)
    x = torch.randn(2, 4, 5)
    y = layer(x)
    assert torch.equal(y, numba_tconv.conv_transpose1d(x, layer.weight, layer.bias, 2, padding))
    assert f"padding={padding}" in repr(layer)
    assert layer.state_dict().keys() == torch.nn.ConvTranspose1d(4, 6, 7).state_dict().keys()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.padding == padding
        assert torch.equal(other(x), y)
    longer = layer(x, output_size=[y.shape[-1] + 1])
    assert longer.shape[-1] == y.shape[-1] + 1
    with pytest.raises(ValueError, match="valid sizes range from"):
        layer(x, output_size=[y.shape[-1] + 2])
    exported = torch.export.export(layer, (x,))
    assert {node.target.namespace for node in exported.graph.nodes if hasattr(node.target, "namespace")} == {"aten"}
    torch.testing.assert_close(exported.module()(x), y)
    torch.compiler.reset()  # a layer is compiled a limited number of times
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), y)


@pytest.mark.parametrize("padding", [*WORDS, (1, 3), (-2, -1)], ids=str)
def test_forward_mode(padding):
    x, w, bias = tensors(4, 4)
    tangents = [torch.randn_like(one) for one in (x, w, bias)]

    def call(x, w, bias):
        return numba_tconv.conv_transpose1d(x, w, bias, 2, padding)

    y, tangent = torch.func.jvp(call, (x, w, bias), tuple(tangents))
    assert torch.equal(y, call(x, w, bias))
    expected = call(tangents[0], w, None) + call(x, tangents[1], tangents[2])
    torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize("padding", [*WORDS, (1, 3), (-2, -1)], ids=str)
def test_autocast(padding):
    x, w, bias = (one.detach().float() for one in tensors(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = numba_tconv.conv_transpose1d(x, w, bias, 2, padding)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, numba_tconv.conv_transpose1d(*(one.bfloat16() for one in (x, w, bias)), 2, padding))


@pytest.mark.parametrize("padding", ["same", "causal", (1, 5)], ids=str)
def test_explain(padding):
    layer = numba_tconv.ConvTranspose1d(4, 6, 8, 4, padding)
    found = explain(layer, (2, 4, 10)).problem
    x = torch.randn(2, 4, 10)
    torch.testing.assert_close(torchs.forward(x, layer.weight, layer.bias, *found.parameters), layer(x))


def test_random_problems_have_every_kind_of_crop():
    drawn = random.Random(0)
    found = [fuzz._problem(drawn) for _ in range(300)]
    assert any(one.output_padding < 0 for one in found)
    assert any(one.output_padding >= max(one.stride, one.dilation) for one in found)
    assert any(one.has_torchs_padding and one.padding for one in found)


@pytest.mark.parametrize(
    ("padding", "error", "message"),
    [
        ("full", ValueError, "unknown padding 'full': the words are valid, same, causal"),
        ((1, 2, 3), RuntimeError, "one integer or a tuple of one|single integer"),
        ((1, 2.0), TypeError, "each item of padding must be an integer, not float"),
        ((True, 1), TypeError, "each item of padding must be an integer, not bool"),
        ((1, 2**70), RuntimeError, "each item of padding must fit in 64 bits"),
        ((9, 9), RuntimeError, "padding \\(9, 9\\) must leave at least one output, but leaves -5 of an input of 5"),
    ],
)
def test_refusals(padding, error, message):
    with pytest.raises(error, match=message):
        numba_tconv.conv_transpose1d(torch.ones(1, 1, 5), torch.ones(1, 1, 9), padding=padding)


def test_output_padding_is_torchs():
    for output_padding in (-1, 2):
        with pytest.raises(RuntimeError, match="output_padding must"):
            numba_tconv.conv_transpose1d(torch.ones(1, 1, 5), torch.ones(1, 1, 9), None, 2, "same", output_padding)


def test_torchs_function_keeps_its_meaning_when_routed():
    with numba_tconv.routed(), pytest.raises((RuntimeError, TypeError)):
        torch.nn.functional.conv_transpose1d(torch.ones(1, 1, 5), torch.ones(1, 1, 9), padding=(1, 1))


@pytest.mark.parametrize("padding", LAYERS, ids=str)
def test_an_output_may_be_overwritten(padding):
    layer = numba_tconv.ConvTranspose1d(4, 1, 4, stride=2, padding=padding)
    y = layer(torch.randn(1, 4, 9))
    expected = y.detach().tanh()
    assert torch.equal(y.tanh_(), expected)
    y.sum().backward()
