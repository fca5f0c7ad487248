"""Steps on the CPU, by torch's operator: equal to the whole signal, masks, resets, errors, torch.compile."""

import copy
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

import numba_tconv
import reference.streaming
from numba_tconv import streaming
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import plan
from numba_tconv.lab.measure import fuzz_steps
from numba_tconv.lab.measure.bench import DTYPES
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.layout import Layout, layout_of
from numba_tconv.selection.forward import arithmetic
from numba_tconv.torch_api import streaming as module
from tests.streams import LAYERS, chunked, stream

layers = pytest.mark.parametrize("reason", LAYERS)
USUAL = "K = 2s, the usual decoder layer"


@layers
def test_the_reference_agrees_with_the_definition(reason):
    s = stream(LAYERS[reason], 2, 5, torch.float64)
    operands = s.weight.numpy(), None if s.bias is None else s.bias.numpy(), *s.parameters
    assert reference.streaming.kept_frames(s.layer.kernel_size, s.layer.stride, s.layer.dilation) == s.kept
    state, outputs = s.state().numpy(), []
    for chunk in chunked(s.x, (2, 1, 2)):
        y, state = reference.streaming.step(chunk.numpy(), state, *operands)
        outputs.append(y)
    whole = reference.streaming.causal(s.x.numpy(), *operands)
    np.testing.assert_allclose(np.concatenate(outputs, axis=2), whole, atol=1e-12)


@layers
def test_steps_are_the_whole_signal(reason):
    s = stream(LAYERS[reason], 2, 6, torch.float64)
    state = streaming.initial_state(2, s.weight, s.layer.stride, s.layer.dilation)
    assert torch.equal(state, s.state())
    assert state.dtype == torch.float64
    steps = [streaming.step(chunk, state, s.weight, s.bias, *s.parameters) for chunk in chunked(s.x, (1, 3, 2))]
    torch.testing.assert_close(torch.cat(steps, dim=2), s.offline())
    assert torch.equal(state, torch.cat([s.state(), s.x], dim=2)[:, :, 6:])


def test_masks_and_resets():
    s = stream(LAYERS[USUAL], 3, 4, torch.float64)
    state, mask = torch.randn_like(s.state()), torch.tensor([True, False, True])
    operands = s.weight, s.bias, *s.parameters
    before = state.clone()
    expected, new = reference.streaming.step(
        s.x.numpy(), state.numpy(), *(t.numpy() if torch.is_tensor(t) else t for t in operands), mask=mask.numpy()
    )
    y = streaming.step(s.x, state, *operands, mask)
    torch.testing.assert_close(y, torch.from_numpy(expected))
    assert torch.equal(state, torch.from_numpy(new))
    assert torch.equal(state[1], before[1])
    state[2].zero_()
    torch.testing.assert_close(streaming.step(s.x, state, *operands)[2], s.offline()[2])


def layer_of(problem, **parameters):
    p = problem
    sizes = p.in_channels, p.out_channels, p.kernel_size, p.stride
    made = numba_tconv.ConvTranspose1d(*sizes, groups=p.groups, bias=p.bias, dilation=p.dilation, **parameters)
    return made.requires_grad_(False)


@layers
def test_a_layer_with_left_padding_is_the_same_stream(reason):
    p = LAYERS[reason]
    layer = layer_of(p, padding=1 if p.dilation * (p.kernel_size - 1) > 2 else 0)
    x, state, left = torch.randn(2, p.in_channels, 7), layer.initial_state(2), layer.padding[0]
    outputs = torch.cat([layer.step(chunk, state) for chunk in x.split(2, dim=2)], dim=2)[:, :, left:]
    whole = layer(x)
    common = min(whole.shape[2], outputs.shape[2])
    torch.testing.assert_close(outputs[:, :, :common], whole[:, :, :common])


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm], ids=["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_a_hook_computes_is_computed_for_a_step(norm, frozen):
    """The older norms compute it before a call of the layer, and a step is none."""
    layer, other = (norm(layer_of(LAYERS[USUAL]).train()).eval().requires_grad_(False) for _ in range(2))
    layer.load_state_dict(other.state_dict())
    layer, other = layer.double(), other.double()
    if frozen:
        numba_tconv.freeze(layer)
    x, state = torch.randn(2, 4, 3, dtype=torch.float64), layer.initial_state(2)
    assert state.dtype == torch.float64
    y = layer.step(x, state)
    torch.testing.assert_close(y, other(x)[:, :, :6])


class Halved(torch.nn.Module):
    def forward(self, weight):
        return weight.bfloat16()


def test_a_state_has_the_dtype_that_a_parametrization_gives_the_weight():
    layer = numba_tconv.ConvTranspose1d(4, 2, 4, 2, bias=False)
    parametrize.register_parametrization(layer, "weight", Halved(), unsafe=True)
    layer.requires_grad_(False)
    x, state = torch.randn(1, 4, 3, dtype=torch.bfloat16), layer.initial_state(1)
    assert torch.equal(layer.step(x, state), layer(x)[:, :, :6])


def test_a_frozen_weight_is_not_computed_for_a_step(monkeypatch):
    layer = parametrizations.weight_norm(layer_of(LAYERS[USUAL])).eval().requires_grad_(False)
    numba_tconv.freeze(layer)
    monkeypatch.setattr(layer.parametrizations.weight, "forward", lambda: pytest.fail("it was computed"))
    layer.step(torch.randn(2, 4, 3), torch.zeros(2, 4, 1))


def test_a_layer_refuses_padding_by_anything_but_zeros():
    layer = layer_of(LAYERS[USUAL])
    state = layer.initial_state(1)
    layer.padding_mode = "reflect"
    with pytest.raises(ValueError, match="padding_mode"):
        layer.step(torch.randn(1, 4, 1), state)
    with pytest.raises(ValueError, match="padding_mode"):
        layer.initial_state(1)


def test_a_state_is_a_plain_tensor():
    layer = layer_of(LAYERS[USUAL], dtype=torch.float64)
    state = layer.initial_state(2)
    assert type(state) is torch.Tensor
    assert not state.requires_grad
    assert state.dtype == torch.float64
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    layer.step(x, state)
    again = copy.deepcopy(state)
    assert torch.equal(layer.step(x, state), layer.step(x, again))
    assert layer.initial_state(0).shape == (0, 4, 1)


def test_no_slots():
    layer = layer_of(LAYERS[USUAL])
    assert layer.step(torch.randn(0, 4, 3), layer.initial_state(0)).shape == (0, 2, 6)


def test_compiles_without_a_break():
    s = stream(LAYERS[USUAL], 2, 4)

    def two(x, state, mask):
        first = streaming.step(x, state, s.weight, s.bias, *s.parameters, mask)
        return first + streaming.step(x + 1, state, s.weight, s.bias, *s.parameters)

    mask, state = torch.tensor([True, False]), torch.randn_like(s.state())
    ours = state.clone()
    expected = two(s.x, state, mask)
    torch.testing.assert_close(torch.compile(two, backend="aot_eager", fullgraph=True)(s.x, ours, mask), expected)
    assert torch.equal(ours, state)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_whole_stream_compiles_without_a_break(dynamic):
    layer = layer_of(LAYERS[USUAL])

    def streamed(x):
        state = layer.initial_state(x.shape[0])
        return torch.cat([layer.step(x[:, :, :2], state), layer.step(x[:, :, 2:], state)], dim=2)

    compiled = torch.compile(streamed, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for slots in (3, 2):
        x = torch.randn(slots, 4, 5)
        torch.testing.assert_close(compiled(x), streamed(x))


def test_the_operator_is_registered_as_torch_wants_it():
    s = stream(LAYERS[USUAL], 2, 4)
    arguments = s.x, s.state(), s.weight, s.bias, torch.tensor([True, False]), *s.parameters, "ieee"
    torch.library.opcheck(torch.ops.numba_tconv.streaming_step.default, arguments)


def bad(**changes):
    """Arguments of a step by name, some of them changed."""
    s = stream(LAYERS[USUAL], 2, 3)
    usual = dict(x=s.x, state=torch.randn_like(s.state()), weight=s.weight, bias=s.bias, stride=2)
    return usual | {name: change(usual[name]) if callable(change) else change for name, change in changes.items()}


BAD = {
    "no frames": (bad(x=lambda x: x[:, :, :0]), RuntimeError, "one frame or more"),
    "unbatched": (bad(x=lambda x: x[0]), RuntimeError, "x must be (N, C_in, T)"),
    "channels": (bad(x=lambda x: x[:, :3]), RuntimeError, "4 channels"),
    "batch of the state": (bad(state=lambda s: s[:1].clone()), RuntimeError, "state must be (N, C_in, F) = (2, 4, 1)"),
    "length of the state": (bad(state=torch.zeros(2, 4, 2)), RuntimeError, "state must be (N, C_in, F) = (2, 4, 1)"),
    "dtype of the state": (bad(state=lambda s: s.double()), RuntimeError, "state must have the dtype of x"),
    "device of the state": (bad(state=lambda s: s.to("meta")), RuntimeError, "state must be on the device of x"),
    "strides of the state": (bad(state=torch.zeros(4, 2, 1).transpose(0, 1)), RuntimeError, "must be contiguous"),
    "expanded state": (bad(state=torch.zeros(1, 4, 1).expand(2, 4, 1)), RuntimeError, "must be contiguous"),
    "dtype of the weight": (bad(weight=lambda w: w.double()), RuntimeError, "weight must have the dtype of x"),
    "bias": (bad(bias=torch.zeros(3)), RuntimeError, "bias must have shape (2,)"),
    "length of the mask": (bad(mask=torch.ones(3, dtype=torch.bool)), RuntimeError, "mask must be (N,) = (2,)"),
    "dimensions of the mask": (bad(mask=torch.ones(2, 1, dtype=torch.bool)), RuntimeError, "mask must be (N,)"),
    "dtype of the mask": (bad(mask=torch.ones(2)), TypeError, "torch.bool"),
    "device of the mask": (bad(mask=torch.ones(2, dtype=torch.bool, device="meta")), RuntimeError, "device of x"),
    "a list": (bad(mask=[True, False]), TypeError, "mask must be a Tensor, not list"),
    "no state": (bad(state=None), TypeError, "state must be a Tensor, not NoneType"),
    "stride": (bad(stride=0), RuntimeError, "stride must be positive"),
    "stride of two": (bad(stride=(1, 1)), RuntimeError, "stride must be one integer"),
    "precision": (bad(precision="fp64"), ValueError, "torch.float32 has"),
    "unknown precision": (bad(precision="fast"), ValueError, "unknown precision"),
    "integers": (bad(x=lambda x: x.int(), state=lambda s: s.int(), weight=lambda w: w.int()), RuntimeError, "x must"),
    "a gradient": (bad(weight=lambda w: w.clone().requires_grad_()), RuntimeError, "no_grad"),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_input_leaves_the_state(reason):
    arguments, error, message = BAD[reason]
    state = arguments["state"]
    before = state.clone() if torch.is_tensor(state) else None
    with pytest.raises(error, match=re.escape(message)):
        streaming.step(**arguments)
    if before is not None and before.device.type != "meta":
        assert torch.equal(state, before)


@pytest.mark.parametrize("shared", ["x", "weight", "bias"])
def test_a_state_that_shares_memory_is_refused(shared):
    arguments = bad()
    memory = torch.randn(100)
    arguments["state"] = memory[:8].view(2, 4, 1)
    like = arguments[shared]
    arguments[shared] = memory[7 : 7 + like.numel()].view(like.shape)
    before = memory.clone()
    with pytest.raises(RuntimeError, match=f"share memory with {shared}"):
        streaming.step(**arguments)
    assert torch.equal(memory, before)
    arguments[shared] = memory[8 : 8 + like.numel()].view(like.shape)  # its neighbour
    streaming.step(**arguments)
    apart, last = [2 * stride for stride in like.stride()], 2 * like.numel() - 2
    arguments = bad(state=memory[90:98].view(2, 4, 1)) | {shared: memory.as_strided(like.shape, apart, 90 - last)}
    with pytest.raises(RuntimeError, match=f"share memory with {shared}"):  # its last element
        streaming.step(**arguments)
    arguments[shared] = memory.as_strided(like.shape, apart, 89 - last)
    streaming.step(**arguments)


@pytest.mark.parametrize("name", ["x", "state", "weight", "bias"])
def test_a_tangent_is_refused(name):
    arguments = bad()
    before = arguments["state"].clone()

    def step(one):
        return streaming.step(**arguments | {name: one})

    with pytest.raises(RuntimeError, match=f"{name} has a tangent"):
        torch.func.jvp(step, (arguments[name],), (torch.ones_like(arguments[name]),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(RuntimeError, match=f"{name} has a tangent"):
            step(dual)
        assert torch.equal(arguments["state"], before)
        step(arguments[name])  # no tangent is no error


@pytest.mark.parametrize("name", ["x", "state", "weight", "bias", "mask"])
def test_zeros_without_memory_are_the_operators(monkeypatch, name):
    """As if all tensors were on a GPU."""
    sizes = {"x": (2, 4, 1), "state": (2, 4, 1), "weight": (4, 3, 4), "bias": (3,), "mask": (2,)}
    given = {one: torch.ones(size, dtype=torch.bool if one == "mask" else None) for one, size in sizes.items()}
    taken = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(module, "_cuda", lambda *_: taken.append("at once"))
    monkeypatch.setattr(module, "_operator", lambda *_: taken.append("by the operator"))
    without_memory = torch._efficientzerotensor(sizes[name], dtype=given[name].dtype)
    for some in (given, given | {name: without_memory}):
        streaming.step(**some, stride=2)
    assert taken == ["at once", "by the operator"]


def test_autocast_is_refused():
    arguments = bad()
    before = arguments["state"].clone()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        streaming.step(**arguments)
    assert torch.equal(arguments["state"], before)


def test_autocast_to_the_dtype_of_all_operands_changes_nothing():
    s = stream(LAYERS[USUAL], 2, 3, torch.bfloat16)
    state, again = s.state(), s.state()
    operands = s.weight, s.bias, *s.parameters
    expected = streaming.step(s.x, again, *operands)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(streaming.step(s.x, state, *operands), expected)
    assert torch.equal(state, again)


def test_a_gradient_is_no_error_without_grad_mode():
    arguments = bad(weight=lambda w: w.clone().requires_grad_())
    with torch.no_grad():
        assert not streaming.step(**arguments).requires_grad


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [(-1, RuntimeError, "must not be negative"), (1.5, TypeError, "integer"), (True, TypeError, "integer")],
)
def test_a_bad_batch_size(batch_size, error, message):
    with pytest.raises(error, match=message):
        streaming.initial_state(batch_size, torch.ones(4, 2, 4))


def test_a_weight_that_is_none():
    with pytest.raises(TypeError, match="weight must be a Tensor, not list"):
        streaming.initial_state(2, [1.0])


def test_random_streams():
    for number in range(150):
        fuzz_steps.draw(7, number).check()


def test_random_streams_on_a_gpu_reach_every_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reached = Counter()
    for number in range(60):
        case = fuzz_steps.draw(1, number)
        dtype = DTYPES[case.dtype]
        shapes = (case.slots, case.layer.in_channels), (case.layer.in_channels, case.layer.out_channels_per_group)
        for new in case.chunks:
            p = replace(case.layer, batch=case.slots, length=new)
            sizes = (*shapes[0], new), (*shapes[0], streaming.kept_frames(p)), (*shapes[1], p.kernel_size)
            laid_out = (Layout.contiguous(size, dtype, -1) for size in sizes)
            config = plan.choose(*laid_out, p, case.precision)
            reached[config and plan.kernel_of(config).name] += 1
    assert reached.keys() >= {"streaming_step", "streaming_mma", "streaming_depthwise"}
    assert reached["streaming_mma"] >= 10


def test_the_fuzzer_notices_a_lost_frame(monkeypatch):
    step = streaming.step

    def forgetful(x, state, *others, **named):
        y = step(x, state, *others, **named)
        state[:, :, -1:] = 0
        return y

    monkeypatch.setattr(streaming, "step", forgetful)
    case = fuzz_steps.Case(LAYERS[USUAL], "float32", "ieee", 2, (1, 2), 0, "cpu")
    with pytest.raises(fuzz_steps.Mismatch):
        case.check()


def test_the_fuzzer_on_a_gpu_wants_the_bits_of_the_whole_signal(monkeypatch):
    def whole(*operands, variant, precision):
        assert (variant, precision) == ("k2_polyphase", "ieee")
        return torch.conv_transpose1d(*operands)

    monkeypatch.setattr(fuzz_steps, "conv_transpose1d", whole)
    case = fuzz_steps.Case(LAYERS[USUAL], "float32", "ieee", 1, (3,), 0, "cuda")
    p = case.layer
    heard, weight = torch.randn(p.in_channels, 3), torch.randn(p.weight_shape)
    said = torch.conv_transpose1d(heard, weight, None, p.stride, 0, 0, p.groups, p.dilation)[:, : 3 * p.stride]
    case._check_slot(heard, said, heard[:, 2:], weight, None)
    said[0, 1] += 1
    with pytest.raises(fuzz_steps.Mismatch, match="1 of "):
        case._check_slot(heard, said, heard[:, 2:], weight, None)


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(module.device, "of", lambda _: H200)
    module._ready.cache_clear()
    yield
    module._ready.cache_clear()


@pytest.mark.parametrize(("in_channels", "most"), [(1024, 512), (1020, 256)])
def test_kernels_of_steps_take_more_columns_on_tensor_cores(in_channels, most, h200, monkeypatch):
    prepared = []
    monkeypatch.setattr(module.plan, "prepare", lambda x, *_: prepared.append(x.shape[0]))
    for slots in (256, 257, most, most + 1):
        shapes = *[(slots, in_channels, 1)] * 2, (in_channels, 512, 16)
        operands = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
        module._ready(*map(layout_of, operands), False, False, 8, 1, 1, "bf16")
    assert set(prepared) == {slots for slots in (256, 257, 512) if slots <= most}


def test_a_step_in_tf32_is_exact_where_no_tensor_core_computes(h200, monkeypatch):
    ways, p = [], Problem(600, 8, 8, 4, 1, stride=2, groups=8)
    x, state, weight = map(torch.zeros, (p.in_shape, p.in_shape, p.weight_shape))
    monkeypatch.setattr(module.ops, "conv_transpose1d", lambda *operands: ways.append(operands[-2:]) or x)
    module._ready(*map(layout_of, (x, state, weight)), False, False, 2, 8, 1, "tf32")(x, state, weight, None, None)
    assert arithmetic(p, torch.float32, *ways[0], H200) == "ieee"
