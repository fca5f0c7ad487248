"""The public API against torch's, on the CPU: signatures, the layer, the operator's registration and gradients."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import numba_tconv
from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import operators as ops
from tests.parity import DTYPES, SMALL, operands, parameters
from tests.thorough import thorough

CHOICES = {"variant": None, "precision": None}
OP_ARGUMENTS = ("stride", "padding", "output_padding", "groups", "dilation")
rows = pytest.mark.parametrize("reason", SMALL)


def op_call(problem, dtype=torch.float32, device="cpu"):
    """The operator's positional arguments."""
    chosen = parameters(problem)
    return *operands(problem, dtype, device), *(chosen[name] for name in OP_ARGUMENTS), "", "ieee"


def torchs(x, w, bias, problem):
    return torch.conv_transpose1d(x, w, bias, **parameters(problem))


# The function


def test_function_has_torchs_signature_and_two_keywords():
    ours = inspect.signature(numba_tconv.conv_transpose1d).parameters
    theirs = torch.ops.aten.conv_transpose1d.default._schema.arguments
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # aten writes the default of a one-element list as [1].
    defaults = {a.name: a.default_value for a in theirs if a.has_default_value()}
    expected = {name: value[0] if isinstance(value, list) else value for name, value in defaults.items()}
    assert [p.name for p in positional] == [a.name for a in theirs]
    assert {p.name: p.default for p in positional if p.default is not p.empty} == expected
    assert {p.name: p.default for p in ours.values() if p.kind is p.KEYWORD_ONLY} == {
        "variant": None,
        "precision": None,
    }


@rows
def test_function_on_cpu_tensors_is_torchs(reason):
    problem = SMALL[reason]
    x, w, bias = operands(problem, torch.float32)
    assert torch.equal(numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem)), torchs(x, w, bias, problem))


def test_rungs_lists_the_ladder_in_order():
    ladder = numba_tconv.rungs()
    assert list(ladder) == list(RUNGS)
    assert list(ladder)[:4] == ["k1_gather", "k2_polyphase", "k3_shared_tile", "k4_register_tile"]
    assert all(idea and "\n" not in idea for idea in ladder.values())


def test_public_names():
    functions = {
        "alias_free_activation",
        "conv_transpose1d",
        "convert",
        "explain",
        "freeze",
        "routed",
        "rungs",
        "unfreeze",
        "warm",
    }
    classes = {"AliasFreeActivation", "ConvTranspose1d", "Conversion", "Explanation", "Freezing"}
    assert set(numba_tconv.__all__) == functions | classes | {"streaming", "__version__"}
    assert all(callable(getattr(numba_tconv, name)) for name in functions)
    assert re.fullmatch(r"\d+\.\d+\.\d+", numba_tconv.__version__)


# The layer


LAYERS = [
    {},
    {"stride": 2, "padding": 1, "bias": False},
    {"stride": (3,), "padding": (2,), "output_padding": (1,), "groups": 2, "dilation": (2,)},
    {"stride": 4, "dtype": torch.float64},
]
layers = pytest.mark.parametrize("arguments", LAYERS, ids=str)


def pair(arguments, **ours):
    """torch's layer and ours, each made after the same seed."""
    made = []
    for kind, extra in ((nn.ConvTranspose1d, {}), (numba_tconv.ConvTranspose1d, ours)):
        torch.manual_seed(7)
        made.append(kind(4, 6, 5, **arguments, **extra))
    return made


def test_layer_has_torchs_signature_and_two_keywords():
    theirs = inspect.signature(nn.ConvTranspose1d).parameters
    ours = inspect.signature(numba_tconv.ConvTranspose1d).parameters
    positional = [(p.name, p.default) for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [(p.name, p.default) for p in theirs.values()]
    assert {p.name: p.default for p in ours.values() if p.kind is p.KEYWORD_ONLY} == {
        "variant": None,
        "precision": None,
    }


@layers
def test_layer_draws_torchs_parameters(arguments):
    theirs, ours = (layer.state_dict() for layer in pair(arguments))
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)


@layers
def test_layer_loads_torchs_checkpoint_and_back(arguments):
    theirs, _ = pair(arguments)
    ours = numba_tconv.ConvTranspose1d(4, 6, 5, **arguments)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 9, dtype=theirs.weight.dtype)
    assert torch.equal(ours(x), theirs(x))
    nn.ConvTranspose1d(4, 6, 5, **arguments).load_state_dict(ours.state_dict())


@layers
def test_layer_forward_and_backward(arguments):
    theirs, ours = pair(arguments)
    x = torch.randn(2, 4, 9, dtype=theirs.weight.dtype)
    for layer in (theirs, ours):
        layer(x).square().sum().backward()
    assert torch.equal(ours(x[0]), theirs(x[0]))
    assert torch.equal(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize(
    ("shape", "front"), [((2, 4, 9), []), ((2, 4, 9), [2, 6]), ((4, 9), []), ((4, 9), [6])], ids=str
)
def test_output_size(shape, front):
    theirs, ours = pair({"stride": 4, "padding": 1})
    x = torch.randn(shape)
    lengths = [theirs(x).shape[-1] + extra for extra in range(4)]
    for length in lengths:
        assert torch.equal(ours(x, [*front, length]), theirs(x, [*front, length]))
        assert ours(x, output_size=[*front, length]).shape[-1] == length
    with pytest.raises(ValueError, match="requested an output size"):
        ours(x, [*front, lengths[-1] + 1])


def test_layer_shows_what_torchs_shows_and_what_was_chosen():
    theirs, ours = pair(LAYERS[2])
    assert repr(ours) == repr(theirs)
    _, ours = pair({}, variant="k1_gather", precision="ieee")
    assert repr(ours) == "ConvTranspose1d(4, 6, kernel_size=(5,), stride=(1,), variant='k1_gather', precision='ieee')"


def test_layer_passes_its_choices_on():
    _, ours = pair({}, variant="k1_gather")
    with pytest.raises(NotImplementedError, match="variant 'k1_gather' needs dense CUDA tensors"):
        ours(torch.randn(2, 4, 9))


# The operator


@pytest.mark.parametrize(
    "reason", thorough(SMALL, always=["stride 1", "output_padding and padding", "groups, unequal channels"])
)
def test_operator_is_registered_soundly(reason):
    arguments = op_call(SMALL[reason])
    for tensor in arguments[:3]:
        if tensor is not None:
            tensor.requires_grad_()
    torch.library.opcheck(ops.conv_transpose1d, arguments)


@rows
def test_operator_computes_on_the_cpu(reason):
    arguments = op_call(SMALL[reason])
    assert torch.equal(ops.conv_transpose1d(*arguments), torchs(*arguments[:3], SMALL[reason]))


@rows
@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
def test_gradients_are_torchs_for_what_requires_them(reason, wanted):
    problem = SMALL[reason]
    arguments = op_call(problem, torch.float64)
    tensors = [t for t in arguments[:3] if t is not None]
    for tensor, want in zip(tensors, wanted, strict=False):
        tensor.requires_grad_(bool(want))
    if not any(t.requires_grad for t in tensors):
        assert not ops.conv_transpose1d(*arguments).requires_grad
        return
    gradients = []
    for y in (ops.conv_transpose1d(*arguments), torchs(*arguments[:3], problem)):
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
        gradients.append(torch.autograd.grad((y * weights).sum(), [t for t in tensors if t.requires_grad]))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@rows
@pytest.mark.parametrize("dtype", thorough(DTYPES, always=[torch.bfloat16]), ids=str)
def test_fake_cuda_tensors_through_the_public_function(reason, dtype):
    """Shape, dtype and device that torch.compile sees for CUDA tensors, on a machine without a GPU."""
    problem = SMALL[reason]
    shapes = [None if t is None else t.shape for t in operands(problem, dtype)]
    with FakeTensorMode():
        x, w, bias = (None if s is None else torch.empty(s, dtype=dtype, device="cuda") for s in shapes)
        y = numba_tconv.conv_transpose1d(x, w, bias, **parameters(problem))
        assert (y.dtype, y.device.type) == (dtype, "cuda")
        assert y.shape == problem.out_shape
        assert y.is_contiguous()


@pytest.fixture
def autocast(monkeypatch):
    """A function that turns autocast on for CUDA tensors. Without a GPU torch turns it off, so its two queries are
    answered here."""

    def turn_on(dtype):
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype)

    return turn_on


def test_autocast_is_followed_for_cuda_tensors(autocast):
    autocast(torch.bfloat16)
    with FakeTensorMode():
        tensors = [torch.empty(shape, device="cuda") for shape in ((2, 4, 9), (4, 6, 5), (6,))]
        assert numba_tconv.conv_transpose1d(*tensors).dtype == torch.bfloat16
        assert numba_tconv.conv_transpose1d(tensors[0].half(), *tensors[1:]).dtype == torch.bfloat16
        assert numba_tconv.conv_transpose1d(*(t.double() for t in tensors)).dtype == torch.float64
        with pytest.raises(RuntimeError, match="weight must have the dtype of input"):
            numba_tconv.conv_transpose1d(tensors[0].double(), *tensors[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_under_autocast_a_precision_of_float32_counts_for_float32_alone(monkeypatch, autocast, dtype):
    autocast(dtype)
    seen, operator = [], ops.conv_transpose1d
    monkeypatch.setattr(ops, "conv_transpose1d", lambda *arguments: seen.append(arguments[-1]) or operator(*arguments))
    own = PRECISIONS[dtype]
    with FakeTensorMode():
        tensors = [torch.empty(shape, device="cuda") for shape in ((2, 4, 9), (4, 6, 5), (6,))]
        for input in (tensors[0], tensors[0].to(dtype)):  # the layer before may give autocast's dtype
            for precision in PRECISIONS[torch.float32]:
                y = numba_tconv.conv_transpose1d(input, *tensors[1:], precision=precision)
                assert y.dtype == dtype
                assert seen.pop() == (precision if dtype == torch.float32 else own[0])
            for wrong in ("fp64", "bf16", "fp16", "tf32x4", ""):
                if wrong not in own:
                    with pytest.raises(ValueError, match=f"unknown precision '{wrong}': {dtype} has {own[0]}"):
                        numba_tconv.conv_transpose1d(input, *tensors[1:], precision=wrong)
        with pytest.raises(ValueError, match=r"unknown precision 'ieee': torch\.float64 has fp64"):
            numba_tconv.conv_transpose1d(*(t.double() for t in tensors), precision="ieee")
    assert seen == []


# Torch's switch for TF32


@pytest.fixture
def passed(monkeypatch):
    """The precisions that the function passes to the operator, for CPU tensors as if on a GPU."""
    seen, compute = [], ops.conv_transpose1d

    def conv_transpose1d(*arguments):
        seen.append(arguments[-1])
        return compute(*arguments)

    monkeypatch.setattr(ops, "conv_transpose1d", conv_transpose1d)
    monkeypatch.setattr(functional, "_ours", lambda *_: True)
    return seen


@pytest.fixture
def switches():
    """torch's switches as after its import, before and after the test."""

    def reset():
        for settings in (torch.backends, torch.backends.cudnn):
            settings.fp32_precision = "none"
        torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "tf32"
        torch.backends.cudnn.allow_tf32 = True

    reset()
    yield torch.backends
    reset()


def set_legacy(backends, allowed):
    backends.cudnn.allow_tf32 = allowed


def set_convolutions(backends, allowed):
    backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"


def set_cudnn(backends, allowed):
    backends.cudnn.conv.fp32_precision = "none"
    backends.cudnn.fp32_precision = "tf32" if allowed else "ieee"


def set_everything(backends, allowed):
    backends.cudnn.conv.fp32_precision = "none"
    backends.fp32_precision = "tf32" if allowed else "ieee"


@pytest.mark.parametrize("set_switch", [set_legacy, set_convolutions, set_cudnn, set_everything])
def test_the_switch_is_read_at_every_call_however_it_was_set(passed, switches, set_switch):
    x, w = torch.randn(2, 4, 9), torch.randn(4, 6, 5)
    numba_tconv.conv_transpose1d(x, w)
    for allowed in (False, True, False):
        set_switch(switches, allowed)
        numba_tconv.conv_transpose1d(x, w)
    assert passed == [TF32_ALLOWED, "ieee", TF32_ALLOWED, "ieee"]


def test_the_switch_counts_for_float32_without_a_named_precision_only(passed, switches):
    for dtype, precisions in PRECISIONS.items():
        x, w = torch.randn(2, 4, 9).to(dtype), torch.randn(4, 6, 5).to(dtype)
        for precision in (None, *precisions):
            numba_tconv.conv_transpose1d(x, w, precision=precision)
    assert passed == ["fp64", "fp64", TF32_ALLOWED, "ieee", "tf32", "tf32x3", "fp16", "fp16", "bf16", "bf16"]


def test_a_trace_holds_the_answer_and_not_the_question(monkeypatch, switches):
    monkeypatch.setattr(functional, "_ours", lambda *_: True)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(numba_tconv.conv_transpose1d, fullgraph=True, backend=backend)
    x, w = torch.randn(2, 4, 9), torch.randn(4, 6, 5)
    torch.testing.assert_close(compiled(x, w), nn.functional.conv_transpose1d(x, w))
    (call,) = [node for node in graphs[0].graph.nodes if node.target is ops.conv_transpose1d]
    assert call.args[-1] == TF32_ALLOWED


@pytest.mark.parametrize("choice", [{}, {"variant": "k1_gather"}, {"precision": "tf32"}], ids=str)
@pytest.mark.parametrize(
    ("x", "w"),
    [((0, 4, 9), (4, 6, 5)), ((2, 4, 9), (4, 0, 5)), ((4, 9), (4, 0, 5))],
    ids=["samples", "channels", "one sample"],
)
def test_torch_decides_about_no_samples_and_no_output_channels(passed, monkeypatch, x, w, choice):
    given, torchs = [], torch.randn(3)
    monkeypatch.setattr(torch, "conv_transpose1d", lambda *arguments: given.append(arguments) or torchs)
    x, w = torch.randn(x), torch.randn(w)
    assert numba_tconv.conv_transpose1d(x, w, None, (2,), 1, **choice) is torchs
    assert given == [(x, w, None, (2,), 1, 0, 1, 1)]
    assert passed == []
