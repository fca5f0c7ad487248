"""Modules that crop a layer's output, in ``convert``: transformers' own and encodec's as published."""

import copy
import math
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm
from torch.nn.utils.parametrize import is_parametrized

from numba_tconv import ConvTranspose1d, convert, freeze
from numba_tconv.torch_api.convert.cropping import Cropping, layer_of
from tests.published_activations import Snake, TorchActivation1d


def of_transformers(name, cls):
    """Makes a module; transformers takes seconds to import."""

    def make(*arguments, **keywords):
        module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        return getattr(module, cls)(*arguments, **keywords)

    return make


class NormConvTranspose1d(nn.Module):
    def __init__(self, *sizes, norm):
        super().__init__()
        self.convtr = weight_norm(nn.ConvTranspose1d(*sizes)) if norm == "weight_norm" else nn.ConvTranspose1d(*sizes)
        self.norm = nn.GroupNorm(1, sizes[1]) if norm == "time_group_norm" else nn.Identity()
        self.norm_type = norm

    def forward(self, x):
        return self.norm(self.convtr(x))


class SConvTranspose1d(nn.Module):
    """encodec's."""

    def __init__(self, *sizes, causal=False, norm="none", trim_right_ratio=1.0):
        super().__init__()
        self.convtr = NormConvTranspose1d(*sizes, norm=norm)
        self.causal, self.trim_right_ratio = causal, trim_right_ratio

    def forward(self, x):
        padding_total = self.convtr.convtr.kernel_size[0] - self.convtr.convtr.stride[0]
        y = self.convtr(x)
        padding_right = math.ceil(padding_total * self.trim_right_ratio) if self.causal else padding_total // 2
        return y[..., padding_total - padding_right : y.shape[-1] - padding_right]


def config(causal=True, ratio=1.0, norm="weight_norm"):
    return types.SimpleNamespace(use_causal_conv=causal, trim_right_ratio=ratio, norm_type=norm)


def weight_normed(module):
    module.apply_weight_norm()
    return module


def old_norm(module):
    module.conv = weight_norm(module.conv)
    return module


MIMI, POCKET, ENCODEC = (
    of_transformers("mimi", "MimiConvTranspose1d"),
    of_transformers("pocket_tts_audio_tokenizer", "PocketTTSAudioTokenizerConvTranspose1d"),
    of_transformers("encodec", "EncodecConvTranspose1d"),
)
# A module, and the crops of its layer.
MODULES = {
    "Mimi": (lambda: MIMI(config(), 6, 4, 8, 4), (0, 4)),
    "Mimi, depthwise, no bias": (lambda: MIMI(config(), 6, 6, 4, 2, groups=6, bias=False), (0, 2)),
    "Mimi, not causal, odd": (lambda: MIMI(config(causal=False), 6, 4, 7, 4), (2, 1)),
    "Mimi, half of the crop at the right": (lambda: MIMI(config(ratio=0.5), 6, 4, 9, 4), (2, 3)),
    "Mimi, weight_norm": (lambda: weight_normed(MIMI(config(), 6, 4, 8, 4)), (0, 4)),
    "Mimi, older weight_norm": (lambda: old_norm(MIMI(config(), 6, 4, 8, 4)), (0, 4)),
    "Mimi, K = s": (lambda: MIMI(config(), 6, 4, 4, 4), (0, 0)),
    "Pocket TTS": (lambda: POCKET(config(ratio=0.3), 6, 4, 8, 4), (2, 2)),
    "EnCodec": (lambda: ENCODEC(config(), 6, 4, 10, 5), (0, 5)),
    "EnCodec, not causal": (lambda: ENCODEC(config(causal=False), 6, 4, 10, 5), (3, 2)),
    "encodec's package": (lambda: SConvTranspose1d(6, 4, 10, 5, norm="weight_norm"), (3, 2)),
    "encodec's package, causal": (lambda: SConvTranspose1d(6, 4, 8, 4, causal=True, trim_right_ratio=0.2), (3, 1)),
}


@pytest.mark.parametrize("what", MODULES)
def test_a_module_stays_what_it_is_but_for_the_crop(what):
    make, crops = MODULES[what]
    torch.manual_seed(3)
    module, x = make().double(), torch.randn(2, 6, 9, dtype=torch.float64)
    cls, keys, names = type(module), list(module.state_dict()), [name for name, _ in module.named_modules()]
    expected, of_one_frame = module(x), module(x[..., :1])
    g = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, module.parameters(), g)
    seen, state = [], torch.random.get_rng_state()
    module.register_forward_hook(lambda *_: seen.append(1))

    report = convert(module)
    assert (report.replaced, report.cropping, report.left) == (1, 1, {})
    assert str(report) == "1 replaced, 1 of them with their crop, 0 left"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert seen == []
    assert isinstance(module, cls)
    assert type(module).__name__ == cls.__name__
    assert list(module.state_dict()) == keys
    assert [name for name, _ in module.named_modules()] == names
    assert layer_of(module).padding == crops
    y = module(x)
    torch.testing.assert_close(y, expected)
    assert y.is_contiguous()
    for one, other in zip(torch.autograd.grad(y, module.parameters(), g), expected_gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert seen == [1]
    torch.testing.assert_close(module(x[..., :1]), of_one_frame)
    assert convert(module).cropping == 0


class Renamed(TorchActivation1d):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


@pytest.mark.parametrize("make", [MODULES["Mimi"][0], lambda: Renamed(Snake(6))], ids=["crop", "activation"])
def test_the_argument_keeps_its_name(make):
    module, x = make().double().eval(), torch.randn(2, 6, 9, dtype=torch.float64)
    expected = module(hidden_states=x)
    report = convert(module)
    assert report.cropping + report.activations == 1
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(one(hidden_states=x), expected)
        assert torch.equal(one(x), one(hidden_states=x))
        with pytest.raises(TypeError, match="'x'"):
            one(x=x)
    program = torch.export.export(module, (x,), dynamic_shapes={"hidden_states": {2: torch.export.Dim.AUTO}})
    torch.testing.assert_close(program.module()(x[..., :5]), module(x[..., :5]))
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden_states=x), module(x))
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(module))(x), module(x))


def test_an_activation_in_train_mode_is_refused_before_anything_is_converted():
    model = nn.Sequential(Renamed(Snake(6)), nn.ConvTranspose1d(6, 4, 4)).eval()
    model[0].train()
    with pytest.raises(RuntimeError, match="0 is in train mode"):
        convert(model, freeze=True)
    assert [type(one) for one in model] == [Renamed, nn.ConvTranspose1d]


@pytest.mark.parametrize("what", MODULES)
def test_copies_and_frozen_modules(what):
    module, x = MODULES[what][0]().eval(), torch.randn(2, 6, 9)
    with torch.no_grad():
        expected = module(x)
        convert(module, freeze=True)
        torch.testing.assert_close(module(x), expected)
        loaded = MODULES[what][0]().eval()
        convert(loaded)
        loaded.load_state_dict(module.state_dict())
        copies = [copy.deepcopy(module), loaded]
        if not is_parametrized(layer_of(module)):  # torch pickles no other
            copies.append(pickle.loads(pickle.dumps(module)))
        for other in copies:
            assert isinstance(other, Cropping)
            torch.testing.assert_close(other(x), expected)
            assert freeze(other).frozen == 1
            torch.testing.assert_close(other(x), expected)


def test_compiled_and_exported():
    module, x = MIMI(config(), 6, 4, 8, 4), torch.randn(2, 6, 9)
    expected = module(x)
    convert(module)
    torch.testing.assert_close(torch.compile(module, backend="aot_eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), expected)


def scaled():
    class Scaled(type(MIMI(config(), 6, 4, 8, 4))):
        def forward(self, x):
            return 2 * super().forward(x)

    return Scaled(config(), 6, 4, 8, 4)


def otherwise(change):
    """A module whose class computes the same, but for ``change`` of (module, input, output)."""

    class Otherwise(type(MIMI(config(), 6, 4, 8, 4))):
        def forward(self, x):
            return change(self, x, super().forward(x))

    return Otherwise(config(), 6, 4, 8, 4).eval()


def cached():
    class Cached(type(MIMI(config(), 6, 4, 8, 4))):
        def forward(self, x, cache=None):
            y = super().forward(x)
            return y if cache is None else y + cache

    return Cached(config(), 6, 4, 8, 4)


class OfOwnForward(nn.ConvTranspose1d):
    def forward(self, x):
        return super().forward(x).tanh()


def hooked(add):
    module = MIMI(config(), 6, 4, 8, 4)
    getattr(module.conv, add)(lambda *_: None)
    return module


def changed(module, **attributes):
    for path, value in attributes.items():
        *parents, name = path.split("__")
        setattr(module.get_submodule(".".join(parents)), name, value)
    return module


LEFT = {
    "time_group_norm": (
        lambda: ENCODEC(config(norm="time_group_norm"), 6, 4, 8, 4),
        "has the submodules conv, norm",
    ),
    "encodec's norm": (lambda: SConvTranspose1d(6, 4, 8, 4, norm="time_group_norm"), "its norm sees the outputs"),
    "K < s": (lambda: MIMI(config(), 6, 4, 3, 4), "a slice from a negative index is no crop"),
    "crops changed": (lambda: changed(MIMI(config(), 6, 4, 8, 4), padding_left=-1), "it crops -1 and 4 outputs"),
    "crops of all": (lambda: changed(MIMI(config(), 6, 4, 8, 4), padding_left=4), "which may leave none"),
    "a forward hook": (lambda: hooked("register_forward_hook"), "its layer has a hook"),
    "a backward hook": (lambda: hooked("register_full_backward_hook"), "its layer has a hook"),
    "a backward pre-hook": (lambda: hooked("register_full_backward_pre_hook"), "its layer has a hook"),
    "a subclass": (scaled, "it computes something else"),
    "a subclass in train mode": (lambda: otherwise(lambda s, x, y: 2 * y if s.training else y), "computes something"),
    "a subclass of channels": (lambda: otherwise(lambda s, x, y: y.flip(1)), "it computes something else"),
    "another argument": (cached, "its forward takes x, cache"),
    "a layer of a subclass": (
        lambda: changed(MIMI(config(), 6, 4, 8, 4), conv=OfOwnForward(6, 4, 8, 4)),
        "its layer is not a plain one",
    ),
    "padding": (lambda: changed(MIMI(config(), 6, 4, 8, 4), conv__padding=(1,)), "its layer has padding"),
    "dilation": (lambda: changed(MIMI(config(), 6, 4, 8, 4), conv__dilation=(2,)), "its layer has padding"),
    "output_padding": (lambda: changed(MIMI(config(), 6, 4, 8, 4), conv__output_padding=(1,)), "its layer has padding"),
    "a forward of its own": (
        lambda: changed(MIMI(config(), 6, 4, 8, 4), forward=lambda x: x),
        "its forward was",
    ),
    "no attributes": (lambda: changed(ENCODEC(config(), 6, 4, 8, 4), trim_right_ratio=None), "could not be compared"),
}


@pytest.mark.parametrize("what", LEFT)
def test_left_with_the_reason_and_the_same_numbers(what):
    make, reason = LEFT[what]
    module, x = make(), torch.randn(2, 6, 9)
    try:
        expected = module(x)
    except TypeError:
        expected = None
    padding, cls = layer_of(module).padding, type(module)
    report = convert(nn.ModuleDict({"up": module}))
    assert report.cropping == 0
    assert reason in report.left["up"]
    assert type(module) is cls
    assert layer_of(module).padding == padding
    if expected is not None:
        torch.testing.assert_close(module(x), expected)


def test_a_layer_of_two_modules_is_left():
    first, second = MIMI(config(), 6, 4, 8, 4), MIMI(config(), 6, 4, 8, 4)
    second.conv = first.conv
    report = convert(nn.Sequential(first, second))
    assert (report.replaced, report.cropping) == (1, 0)
    assert all("a part of another module too" in why for why in report.left.values())
    model = nn.Sequential(first, nn.Identity(), first)
    assert convert(model).cropping == 1


def test_norms_of_a_converted_module():
    module, x = MIMI(config(), 6, 4, 8, 4), torch.randn(2, 6, 9)
    expected = module(x)
    convert(module)
    module.apply_weight_norm()
    assert isinstance(module.conv, ConvTranspose1d)
    torch.testing.assert_close(module(x), expected)
    parametrizations.weight_norm(module.conv, "bias", dim=None)
    torch.testing.assert_close(module(x), expected)


def test_decoders_of_transformers():
    pytest.importorskip("transformers")
    from transformers import EncodecConfig, EncodecModel, MimiConfig, MimiModel

    small = dict(num_filters=4, hidden_size=8, upsampling_ratios=[4, 2], num_residual_layers=1)
    heads = dict(intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=4)
    quantizers = dict(codebook_dim=8, vector_quantization_hidden_dimension=8, codebook_size=16)
    models = {
        "EnCodec": EncodecModel(EncodecConfig(**small, codebook_dim=8, num_lstm_layers=1)).decoder,
        "Mimi": MimiModel(MimiConfig(**small, **heads, **quantizers, upsample_groups=8)).decoder,
    }
    for name, model in models.items():
        x = torch.randn(1, 8, 12)
        with torch.no_grad():
            expected = model(x)
            report = convert(model.eval())
            layers = len([one for one in model.modules() if isinstance(one, ConvTranspose1d)])
            assert (report.replaced, report.cropping, report.left) == (layers, layers, {}), name
            assert layers >= len(small["upsampling_ratios"])
            torch.testing.assert_close(model(x), expected)
