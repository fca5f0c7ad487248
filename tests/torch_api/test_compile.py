"""torch.compile and torch.export of decoders, on CPU tensors that count as a GPU's, so that operators are traced."""

import io

import pytest
import torch
from torch.export import Dim

from numba_tconv import ConvTranspose1d
from numba_tconv.lab.studies import training
from numba_tconv.torch_api import functional, operators

CHANNELS = training.COEFFICIENTS


@pytest.fixture(autouse=True)
def through_the_operator(monkeypatch):
    monkeypatch.setattr(functional, "_ours", lambda *_: True)
    torch.compiler.reset()


@pytest.fixture
def decoder():
    """Three layers with weight_norm, and snake between them."""
    return training.decoder(ConvTranspose1d, (6, 4)).double()


def outcome(model, x):
    """The output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    y = model(x)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return y, *torch.autograd.grad(loss, [x, *model.parameters()])


def inputs(batch, length):
    return torch.randn(batch, CHANNELS, length, dtype=torch.float64)


def test_a_compiled_decoder_has_the_outputs_and_gradients_of_an_eager_one(decoder):
    x = inputs(2, 5)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, x), outcome(decoder, x))


def test_a_compiled_decoder_has_our_operator_and_an_exported_one_torchs(decoder):
    found, x = [], inputs(2, 5)

    def backend(graph, _):
        found.extend(node.target for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        torch.compile(decoder, fullgraph=True, backend=backend)(x)
    assert found.count(operators.conv_transpose1d) == 3
    for strict in (False, True):
        targets = [node.target for node in torch.export.export(decoder, (x,), strict=strict).graph.nodes]
        assert targets.count(torch.ops.aten.conv_transpose1d.default) == 3
        assert operators.conv_transpose1d not in targets


def test_batch_and_length_may_change_without_compiling_again(decoder):
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decoder, fullgraph=True, backend=counter)
    for batch, length in ((2, 5), (3, 9), (7, 4), (2, 64)):
        x = inputs(batch, length).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
        y = compiled(x)
        torch.testing.assert_close(y, decoder(x))
        y.sum().backward()
    assert counter.frame_count == 1


def test_an_exported_decoder_is_saved_and_loaded(decoder):
    sizes = ({0: Dim("batch", min=1, max=64), 2: Dim("length", min=2, max=4096)},)
    exported = torch.export.export(decoder, (inputs(2, 5),), dynamic_shapes=sizes)
    calls = [node for node in exported.graph.nodes if node.target is torch.ops.aten.conv_transpose1d.default]
    assert len(calls) == 3
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    x = inputs(3, 11)
    assert torch.equal(torch.export.load(file).module()(x), decoder(x))


@pytest.mark.parametrize("dimension", [0, 2])
def test_a_batch_or_length_that_depends_on_values_is_traced_whole(dimension):
    from torch._dynamo import config  # takes seconds

    layer, x = ConvTranspose1d(4, 6, 4, stride=2, padding=1).double(), torch.randn(5, 4, 5, dtype=torch.float64)

    def gradients(call, some):
        return torch.autograd.grad(call(some).square().sum(), list(layer.parameters()))

    def chosen(some):
        return layer(x.index_select(dimension, some.nonzero()[:, 0]))

    compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager")
    with config.patch(capture_dynamic_output_shape_ops=True):
        for some in ([1, 0, 0, 1, 1], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1]):
            some = torch.tensor(some)
            torch.testing.assert_close(gradients(compiled, some), gradients(chosen, some))
