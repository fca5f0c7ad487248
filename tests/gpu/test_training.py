"""Training on the GPU: compiled, in CUDA graphs, under autocast, on side streams."""

import pytest
import torch
from torch import nn

from numba_tconv import ConvTranspose1d
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.studies import training
from numba_tconv.selection.registry import RUNGS
from tests.parity import verdict

pytestmark = pytest.mark.gpu

LENGTH = 200  # frames
ARITHMETICS = ("ieee", "tf32", "tf32x3", "fp16", "bf16")
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
arithmetics = pytest.mark.parametrize("arithmetic", ARITHMETICS)
autocasts = pytest.mark.parametrize("arithmetic", AUTOCAST)


@pytest.fixture(autouse=True)
def repeatable_torch(exact_torch):
    """torch's own part is float32, by algorithms that repeat their bits."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def autocast(arithmetic):
    return torch.autocast("cuda", AUTOCAST.get(arithmetic), enabled=arithmetic in AUTOCAST)


def decoder(layer=ConvTranspose1d, arithmetic="ieee"):
    """A decoder with equal parameters for every kind of layer; ours compute float32 in ``arithmetic``."""
    torch.manual_seed(2)
    model = training.decoder(layer, (32, 24)).cuda()
    for module in model:
        if isinstance(module, ConvTranspose1d) and arithmetic not in AUTOCAST:
            module.precision = arithmetic
    return model


def plain_decoder(arithmetic):
    """Layers whose weights are parameters, so that packed ones may be kept."""
    torch.manual_seed(4)
    choice = {} if arithmetic in AUTOCAST else {"precision": arithmetic}
    return nn.Sequential(
        ConvTranspose1d(training.COEFFICIENTS, 64, 16, stride=8, padding=4, **choice),
        nn.LeakyReLU(0.1),
        ConvTranspose1d(64, 16, 16, stride=8, padding=4, **choice),
    ).cuda()


def inputs_and_waves(seed, batch=4, length=LENGTH):
    """The decoder's inputs, and the waveforms to learn."""
    generator = torch.Generator("cuda").manual_seed(seed)
    waves = training.waveforms(batch, length * training.FRAME, generator)
    return training.representation(waves), waves


def loss_of(rebuilt, waves):
    return 1024 * (rebuilt.to(waves.dtype) - waves).square().mean()  # large enough for float16's gradients


def outcome(model, arithmetic, inputs, waves):
    """The output, the inputs' gradient, and the parameters' gradients in one tensor."""
    inputs = inputs.detach().requires_grad_()
    with autocast(arithmetic):
        rebuilt = model(inputs)
    of_inputs, *others = torch.autograd.grad(loss_of(rebuilt, waves), [inputs, *model.parameters()])
    return rebuilt, of_inputs, torch.cat([gradient.flatten() for gradient in others])


def exact(inputs, waves):
    return outcome(decoder(nn.ConvTranspose1d).double(), "ieee", inputs.double(), waves.double())


def assert_no_worse(found, than, oracle):
    """Every tensor is at most twice as far from the oracle as its counterpart."""
    for number, tensors in enumerate(zip(found, than, oracle, strict=True)):
        assert verdict(*tensors) is None, number
        assert tensors[0].dtype == tensors[1].dtype


# --- compiled ---------------------------------------------------------------------------------------------------------


@arithmetics
def test_a_compiled_decoder_is_as_exact_as_an_eager_one(arithmetic):
    torch.compiler.reset()
    model, given = decoder(arithmetic=arithmetic), inputs_and_waves(1)
    compiled = torch.compile(model, fullgraph=True)
    assert_no_worse(outcome(compiled, arithmetic, *given), outcome(model, arithmetic, *given), exact(*given))


@pytest.mark.parametrize("arithmetic", ["ieee", "tf32"])
def test_batch_and_length_may_change_without_compiling_again(arithmetic):
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds

    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    model = decoder(arithmetic=arithmetic)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch, length in ((2, 100), (3, 77), (8, 1000)):
        inputs, waves = inputs_and_waves(1, batch, length)
        torch._dynamo.mark_dynamic(inputs, 0)
        torch._dynamo.mark_dynamic(inputs, 2)
        oracle = exact(inputs, waves)[:1]
        with torch.no_grad():
            assert_no_worse([compiled(inputs)], [model(inputs)], oracle)
    assert counter.frame_count == 1


@arithmetics
def test_graphs_of_torch_compile_are_replayed_with_new_data(arithmetic):
    torch.compiler.reset()
    model = decoder(arithmetic=arithmetic)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):  # the first calls warm up and record
        given = inputs_and_waves(seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = [tensor.clone() for tensor in outcome(compiled, arithmetic, *given)]
        assert_no_worse(found, outcome(model, arithmetic, *given), exact(*given))


@arithmetics
def test_graphs_of_torch_compile_see_changed_weights(arithmetic):
    """Inference keeps packed weights, but not in the graph's memory."""
    torch.compiler.reset()
    model, inputs = plain_decoder(arithmetic), inputs_and_waves(1)[0]
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        with torch.no_grad(), autocast(arithmetic):
            model[0].weight.mul_(1.25)
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(inputs).clone()
            assert torch.equal(found, model(inputs))


# --- captured ---------------------------------------------------------------------------------------------------------


@arithmetics
def test_a_captured_training_step_is_replayed_with_new_data(arithmetic):
    """Replays give eager steps' bits, and write the weights."""
    model, twin = plain_decoder(arithmetic), plain_decoder(arithmetic)
    inputs, waves = (tensor.clone() for tensor in inputs_and_waves(0))

    def stepper(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

        def step(inputs, waves):
            optimizer.zero_grad(set_to_none=False)
            with autocast(arithmetic):
                rebuilt = model(inputs)
            loss = loss_of(rebuilt, waves)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    step, twins = stepper(model), stepper(twin)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(inputs, waves)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        twins(inputs, waves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(inputs, waves)

    for seed in range(1, 5):
        new = inputs_and_waves(seed)
        inputs.copy_(new[0])
        waves.copy_(new[1])
        graph.replay()
        assert torch.equal(loss, twins(*new))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        with torch.no_grad(), autocast(arithmetic):
            assert torch.equal(model(new[0]), twin(new[0]))


def test_what_would_be_compiled_inside_a_capture_is_refused(monkeypatch):
    problem = Problem(2, 8, 6, 4, 50, stride=2, padding=1, bias=True)
    rung = RUNGS["k2_polyphase"]
    kernel = rung.kernel(rung.config(problem, torch.float32, "ieee"))
    monkeypatch.setattr(kernel, "_handles", {})
    layer = ConvTranspose1d(8, 6, 4, stride=2, padding=1, device="cuda", variant=rung.name, precision="ieee")
    x = torch.randn(2, 8, 50, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with (
            pytest.raises(RuntimeError, match="run what is to be captured once before"),
            torch.cuda.graph(graph),
        ):
            layer(x)
        y = layer(x)  # the refusal broke nothing, and made a kernel to capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        graph.replay()
    assert torch.equal(captured, y)


# --- autocast ---------------------------------------------------------------------------------------------------------


@autocasts
def test_autocast_is_as_exact_as_with_torchs_layers(arithmetic):
    given = inputs_and_waves(1)
    found = outcome(decoder(), arithmetic, *given)
    assert_no_worse(found, outcome(decoder(nn.ConvTranspose1d), arithmetic, *given), exact(*given))
    assert [tensor.dtype for tensor in found] == [AUTOCAST[arithmetic], torch.float32, torch.float32]


@autocasts
def test_the_backward_pass_may_run_under_autocast_too(arithmetic):
    layer = ConvTranspose1d(16, 24, 8, stride=4, padding=2, device="cuda")
    x = torch.randn(2, 16, 500, device="cuda", requires_grad=True)
    wanted = [x, *layer.parameters()]
    with torch.autocast("cuda", AUTOCAST[arithmetic]):
        y = layer(x)
        inside = torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)
    outside = torch.autograd.grad(y, wanted, torch.ones_like(y))
    assert all(gradient.dtype == torch.float32 for gradient in inside)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_scaled_losses():
    """GradScaler skips the first float16 step; parameters stay finite and the loss falls."""
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE)
    scaler, losses, scales = torch.amp.GradScaler("cuda", init_scale=2.0**40, backoff_factor=2.0**-30), [], []
    for seed in range(40):
        inputs, waves = inputs_and_waves(seed)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            rebuilt = model(inputs)
        loss = (rebuilt.float() - waves).square().mean() / waves.square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert set(scales) == {2.0**10}
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


# --- streams ----------------------------------------------------------------------------------------------------------


@arithmetics
def test_a_training_step_on_a_side_stream(arithmetic):
    model, given = decoder(arithmetic=arithmetic), inputs_and_waves(1)
    here = outcome(model, arithmetic, *given)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # a kernel on another stream would read unwritten inputs
        there = outcome(model, arithmetic, *(tensor * 1 for tensor in given))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
