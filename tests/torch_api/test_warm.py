"""``warm`` finds a call's transposed convolutions without computing, and compiles their kernels."""

import importlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import numba_tconv
from numba_tconv.formula.padding import parts_of
from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.cli import named_calls
from numba_tconv.lab.measure import bench
from numba_tconv.runtime.device import H200
from numba_tconv.torch_api import noted
from numba_tconv.torch_api.compile_ahead import Call, calls_of
from numba_tconv.torch_api.noted import Noted, transposed_convolutions
from tests.lab.test_decoders import needs_transformers, tiny

pytest_plugins = "tests.not_compiled"
module = importlib.import_module("numba_tconv.torch_api.warm")  # `numba_tconv.warm` is the function

WIDE = Problem(16, 128, 128, 8, 4096, stride=4, padding=2, bias=True)


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(module, "current_device", lambda: H200)
    with bench.torch_switches(tf32=False):
        yield tmp_path / "kernels"


def layers(kind=nn.ConvTranspose1d):
    """Two layers that differ in length alone, and layers that are no transposed convolutions."""
    return nn.Sequential(
        *(nn.Conv1d(8, 16, 3, padding=1), kind(16, 24, 8, 4, 2), nn.LeakyReLU()),
        *(nn.Conv1d(24, 16, 3, padding=1), kind(16, 24, 8, 4, 2)),
    )


def example():
    return layers(), torch.empty(2, 8, 100)


def of_length(length):
    return Problem(2, 16, 24, 8, length, stride=4, padding=2, bias=True)


FOUND = [Noted(of_length(length), torch.float32, "", "ieee") for length in (100, 400)]

# --- what a call computes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, numba_tconv.ConvTranspose1d])
def test_layers_of_a_model_are_found(kind):
    model = layers(kind)
    before = [parameter.clone() for parameter in model.parameters()]
    assert transposed_convolutions(model, torch.empty(2, 8, 100)) == FOUND
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model(torch.zeros(2, 8, 10)).isfinite().all()


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_may_be_computed(norm):
    assert transposed_convolutions(norm(nn.ConvTranspose1d(16, 24, 8, 4, 2)), torch.empty(2, 16, 100)) == FOUND[:1]


def test_sizes_alone_count():
    """Terabytes, on the device without memory."""
    with torch.device("meta"):
        model, x = layers(), torch.empty(2, 8, 10**10)
    assert [one.problem for one in transposed_convolutions(model, x)] == [of_length(10**10), of_length(4 * 10**10)]


def test_of_this_package_on_a_gpu_variant_and_precision_are_noted():
    with FakeTensorMode():
        x, w = torch.empty(2, 16, 100, device="cuda"), torch.empty(16, 12, 8, device="cuda")

    def function(x, w):
        numba_tconv.conv_transpose1d(x, w, None, 2, 1, 1, groups=2, dilation=3, precision="tf32x3")
        return numba_tconv.conv_transpose1d(x, w, variant="k1_gather")

    found = transposed_convolutions(function, x, w)
    first, second = Problem(2, 16, 24, 8, 100, 2, 1, 1, groups=2, dilation=3), Problem(2, 16, 12, 8, 100)
    assert found == [Noted(first, torch.float32, "", "tf32x3"), Noted(second, torch.float32, "k1_gather", "ieee")]


@pytest.mark.parametrize("padding", ["same", "causal", (1, 5), (-1, 2)], ids=str)
def test_a_pair_or_a_word_is_the_problem_that_the_kernels_compute(padding):
    layer = numba_tconv.ConvTranspose1d(16, 24, 8, 4, padding)
    (found,) = transposed_convolutions(layer, torch.empty(2, 16, 100))
    parts = parts_of(padding, 8, 4, 0, 1)
    sizes = dict(stride=4, padding=parts.padding, output_padding=parts.output_padding)
    assert found.problem == Problem(2, 16, 24, 8, 100, **sizes, bias=True)
    assert parts.before + found.problem.out_length + parts.after == layer(torch.zeros(2, 16, 100)).shape[-1]


def test_equal_calls_are_one_on_tensors_without_values():
    layer = nn.ConvTranspose1d(16, 24, 8, 4, 2)

    def function(x, *, also):
        assert isinstance(x, FakeTensor)
        assert isinstance(also[0], FakeTensor)
        return layer(x) + layer(also[0])

    assert transposed_convolutions(function, torch.empty(2, 16, 100), also=[torch.empty(2, 16, 100)]) == FOUND[:1]


def test_functions_keywords_and_unbatched_inputs_are_found():
    def function(x, *, weight):
        return F.conv_transpose1d(x, weight, stride=2, padding=1, output_padding=1, groups=2, dilation=3)

    found = transposed_convolutions(function, torch.empty(16, 100), weight=torch.empty(16, 12, 8))
    assert found == [Noted(Problem(1, 16, 24, 8, 100, 2, 1, 1, 2, 3), torch.float32, "", "ieee")]


def test_arithmetic_is_that_of_the_call():
    model, x = layers(), torch.empty(2, 8, 100)
    with torch.autocast("cpu", torch.bfloat16):
        assert {one[1:] for one in transposed_convolutions(model, x)} == {(torch.bfloat16, "", "bf16")}
    assert {one[1:] for one in transposed_convolutions(model.double(), x.double())} == {(torch.float64, "", "fp64")}
    with bench.torch_switches(tf32=True):
        assert {one[1:] for one in transposed_convolutions(model.float(), x)} == {(torch.float32, "", TF32_ALLOWED)}


@pytest.mark.filterwarnings("ignore:.*jit.script.* is deprecated")
def test_in_inference_mode_and_in_scripts_layers_are_found_too():
    model, x = layers(), torch.empty(2, 8, 100)
    assert transposed_convolutions(torch.jit.script(model), x) == FOUND
    with torch.inference_mode():
        assert transposed_convolutions(model, torch.empty(2, 8, 100)) == FOUND
        assert torch.is_inference_mode_enabled()
    for deeper in (model, torch.jit.script(model)):
        assert transposed_convolutions(torch.inference_mode()(lambda x, call=deeper: call(x)), x) == FOUND
    alone = torch.inference_mode()(lambda x: torch.conv_transpose1d(x[0], x[0, :, :4, None]))
    assert transposed_convolutions(alone, x) == [Noted(Problem(1, 8, 4, 1, 100), x.dtype, "", "ieee")]


def test_lazy_layers_are_refused_and_stay_as_they_are():
    model = nn.Sequential(nn.LazyConvTranspose1d(24, 8, 4, 2))
    for function in (model, model.forward):
        with pytest.raises(RuntimeError, match="weight is lazy: its sizes are known after the first call of the model"):
            transposed_convolutions(function, torch.empty(2, 16, 100))
    assert model(torch.zeros(2, 16, 100)).shape == (2, 24, 400)
    assert transposed_convolutions(model, torch.empty(2, 16, 100)) == FOUND[:1]


class Keeping(nn.Module):
    """Keeps tensors and a layer of its last call."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.utils.weight_norm(nn.ConvTranspose1d(16, 24, 8, 4, 2)), None
        self.register_buffer("state", torch.zeros(2))

    def decode(self, x):
        self.last = self.state = self.extra = self.layer(x)
        self.added = nn.Linear(2, 2)
        return self.last


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_no_fake_tensor_stays_behind():
    model, x = Keeping(), torch.zeros(2, 16, 100)
    weight = model.layer.weight
    with torch.autocast("cpu", torch.bfloat16):
        assert len(transposed_convolutions(model.decode, x)) == 1
        assert model.last is None
        assert not hasattr(model, "extra")
        assert not hasattr(model, "added")
        assert torch.equal(model.state, torch.zeros(2))
        assert model.layer.weight is weight
        assert torch.is_autocast_cache_enabled()
        assert type(model.decode(x)) is torch.Tensor
        layer = nn.ConvTranspose1d(16, 24, 8, 4, 2)
        assert len(transposed_convolutions(lambda x: layer(x), x)) == 1  # autocast casts the weight itself
        assert type(layer(x)) is torch.Tensor


def test_buffers_and_random_numbers_stay_as_they_are():
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(), norm(nn.ConvTranspose1d(16, 24, 8, 4, 2)))
    before, state = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    assert transposed_convolutions(model, torch.zeros(2, 16, 100)) == FOUND[:1]
    assert torch.equal(torch.get_rng_state(), state)
    assert before.keys() == model.state_dict().keys()
    for name, one in model.state_dict().items():
        assert type(one) is torch.Tensor
        assert torch.equal(one, before[name]), name


def test_tensors_that_a_function_holds_stay_as_they_are():
    model, held = nn.Sequential(nn.ConvTranspose1d(16, 24, 8, 4, 2), nn.BatchNorm1d(24)), [torch.zeros(2, 3)]
    before = {name: one.clone() for name, one in model.state_dict().items()}

    def function(x):
        model[0].weight.mul_(2)
        held[0][1] += 1
        held[0] += 1
        return model(x)

    assert transposed_convolutions(function, torch.zeros(2, 16, 100)) == FOUND[:1]
    assert torch.equal(held[0], torch.zeros(2, 3))
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name


def test_what_is_not_for_this_package_is_left_out():
    def function(x):
        F.conv_transpose1d(x[:0], torch.empty(8, 4, 3))
        F.conv_transpose1d(x, torch.empty(8, 0, 3))
        F.conv_transpose2d(x[..., None], torch.empty(8, 4, 3, 1))
        F.conv1d(x, torch.empty(4, 8, 3))

    assert transposed_convolutions(function, torch.empty(2, 8, 10)) == []


def test_what_depends_on_values_is_an_error():
    with pytest.raises(RuntimeError):
        transposed_convolutions(lambda x: x[: int(x.sum())], torch.ones(3))
    with pytest.raises(RuntimeError, match="channels"):
        transposed_convolutions(layers(), torch.empty(2, 9, 100))


class Padded(nn.Module):
    """Pads by numbers in buffers, as EnCodec and Mimi do, and counts its calls in one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.ConvTranspose1d(16, 24, 8, 4, 2)
        self.register_buffer("stride", torch.tensor(4, dtype=torch.int64))
        self.register_buffer("widths", torch.tensor([1, 2, 3]))
        self.register_buffer("large", torch.zeros(noted.MOST_VALUES + 1, dtype=torch.int64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x, taken="widths"):
        self.calls += 1
        frames = (x.shape[-1] / self.stride).ceil().to(torch.int64) * self.stride
        missing = frames - x.shape[-1] + getattr(self, taken)[self.calls]
        return self.layer(F.pad(x, (0, missing)))


def test_small_buffers_of_integers_have_their_values():
    model = Padded()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    found = transposed_convolutions(model, torch.empty(2, 16, 95))
    assert [one.problem for one in found] == [of_length(96 + 2)]
    pad = torch.tensor(5)
    found = transposed_convolutions(lambda x: model.layer(F.pad(x, (0, pad + 0))), torch.empty(2, 16, 95))
    assert ([one.problem for one in found], pad) == ([of_length(100)], 5)
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name
    assert model(torch.zeros(2, 16, 95)).shape == (2, 24, 4 * 98)
    with pytest.raises(RuntimeError):
        transposed_convolutions(model, torch.empty(2, 16, 95), "large")


@needs_transformers
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["encodec", "mimi"])
def test_codecs_are_warmed(filled, name):
    model, x, _ = tiny(name)
    own = [one for one in model.modules() if isinstance(one, nn.ConvTranspose1d)]
    assert numba_tconv.warm(getattr(model, "decode", model), x) == 3
    shapes = [(call.problem.in_channels, call.problem.out_channels, call.problem.kernel_size) for call in filled.calls]
    assert shapes == [(one.in_channels, one.out_channels, *one.kernel_size) for one in own]


# --- what is compiled -------------------------------------------------------------------------------------------------


def test_the_kernels_are_those_of_the_operators():
    noted = [Noted(WIDE, torch.float32, "", "ieee"), Noted(WIDE, torch.float32, "k1_gather", "tf32")]
    assert calls_of(noted[:1], H200) == named_calls.calls(["auto"], [WIDE], [(torch.float32, "ieee")], H200)
    step = named_calls.calls(["auto"], [WIDE], [(torch.float32, "ieee")], H200, "step")
    assert calls_of(noted[:1], H200, "step") == step
    assert [call.rung.rpartition("_")[0] for call in step[1:]] == ["grad_input", "grad_weight", "grad"]
    allowed = calls_of([Noted(WIDE, torch.float32, "", TF32_ALLOWED)], H200)
    assert allowed == [Call("k6_wgmma", WIDE, torch.float32, "tf32", H200)]
    named = calls_of([Noted(WIDE, torch.float32, "k1_gather", "ieee")], H200, "step")
    assert named == [Call("k1_gather", WIDE, torch.float32, "ieee", H200), *step[1:]]
    with pytest.raises(NotImplementedError, match="k1_gather cannot do"):
        calls_of(noted[1:], H200)


@pytest.mark.parametrize("training", [False, True])
def test_a_call_or_a_step_is_compiled_for_the_gpu(filled, training):
    assert numba_tconv.warm(*example(), training=training, jobs=7) == 3
    assert filled.calls == calls_of(FOUND, H200, "step" if training else "forward")
    assert (filled.cc, filled.jobs) == ((9, 0, "a"), 7)


def test_the_cache_is_filled(settings):
    x = torch.empty(2, 4, 100)
    layer = nn.ConvTranspose1d(4, 4, 4, 2, 1, groups=4)
    assert numba_tconv.warm(layer, x, jobs=1) == 1
    assert [path.name.partition("-")[0] for path in settings.iterdir()] == ["depthwise"]
    assert numba_tconv.warm(layer, x, jobs=1) == 0


def test_mistakes_are_found_before_anything_is_done(settings, monkeypatch):
    def model(x):
        pytest.fail("it was called")

    x = torch.empty(2, 8, 100)
    with pytest.raises(TypeError, match="model must be a module or a function, not str"):
        numba_tconv.warm("model", x)
    with pytest.raises(TypeError, match="jobs must be an int or None, not float"):
        numba_tconv.warm(model, x, jobs=2.0)
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        numba_tconv.warm(model, x, jobs=0)
    settings.write_text("a file where the directory should be")
    with pytest.raises(OSError, match="cannot write"):
        numba_tconv.warm(model, x)
    monkeypatch.setenv("NUMBA_TCONV_CACHE", "")
    with pytest.raises(RuntimeError, match="cache of compiled kernels is off"):
        numba_tconv.warm(model, x)
