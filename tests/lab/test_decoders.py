"""Decoders of published models, built by transformers with random weights: converted, they decode the same."""

import copy
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

import numba_tconv
from numba_tconv import convert, routed
from numba_tconv.lab.measure import bench
from numba_tconv.lab.studies import decoders
from numba_tconv.lab.studies.decoder_times import error
from numba_tconv.lab.studies.decoders import DECODERS, decode
from tests.thorough import thorough

# Found, not imported: every process that collects the tests would wait for the import.
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

FRAMES = 9
TINY_HIFIGAN = dict(
    upsample_initial_channel=16,
    upsample_rates=(4, 3),
    upsample_kernel_sizes=(8, 7),
    resblock_kernel_sizes=(3,),
    resblock_dilation_sizes=((1, 3, 5),),
)
TINY = {
    "encodec": dict(hidden_size=16, num_filters=4, upsampling_ratios=(4, 3, 2), num_lstm_layers=1),
    "dac": dict(encoder_hidden_size=4, decoder_hidden_size=32, downsampling_ratios=(2, 3, 4)),
    "speecht5": dict(model_in_dim=10, **TINY_HIFIGAN),
    "mimi": dict(
        **dict(hidden_size=16, num_filters=4, upsampling_ratios=[4, 3, 2], upsample_groups=16),
        **dict(codebook_size=8, codebook_dim=8, num_quantizers=3, vector_quantization_hidden_dimension=8),
        **dict(intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8),
    ),
    "vits": dict(flow_size=10, speaker_embedding_size=0, **TINY_HIFIGAN),
    "bigvgan": dict(mel_dim=10, **TINY_HIFIGAN),
}
# Transposed layers of each decoder: of the tiny one and of the published one.
LAYERS = {"encodec": (3, 4), "dac": (3, 4), "speecht5": (2, 4), "mimi": (4, 5), "vits": (2, 4), "bigvgan": (2, 6)}


def tiny(name):
    """The decoder in tiny sizes, with weight_norm where its class can apply it, and an input."""
    decoders.require_transformers()
    model, hop, draw = DECODERS[name].build(**TINY[name])
    if hasattr(model, "apply_weight_norm"):
        model.apply_weight_norm()
    decoders.randomise(model)
    return model.eval(), draw(2, FRAMES), hop


@pytest.fixture(autouse=True)
def one_thread():
    """Threads would mostly wait for each other in decoders this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=thorough(DECODERS, always=["encodec"]))
def decoder(request):
    model, x, _ = tiny(request.param)
    return model, x, LAYERS[request.param][0]


BUILT = {
    "encodec": ("EncodecConfig", "EncodecDecoder", 24, (2, 5, 9)),
    "dac": ("DacConfig", "DacDecoder", 60, (2, 5, 9)),
    "speecht5": ("SpeechT5HifiGanConfig", "SpeechT5HifiGan", 12, (2, 9, 6)),
    "mimi": ("MimiConfig", "MimiModel", 33, (2, 3, 9)),
    "vits": ("VitsConfig", "VitsHifiGan", 12, (2, 7, 9)),
    "bigvgan": ("Qwen2_5OmniBigVGANConfig", "Qwen2_5OmniToken2WavBigVGANModel", 12, (2, 8, 9)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_inputs_and_hops_are_of_the_configuration(name, monkeypatch):
    """With stand-ins for transformers' classes."""
    config_of, model_of, hop, shape = BUILT[name]
    sizes = dict(upsampling_ratios=(4, 3, 2), downsampling_ratios=(4, 3, 5), upsample_rates=(4, 3), hidden_size=5)
    sizes |= dict(model_in_dim=6, flow_size=7, mel_dim=8, codebook_size=11, num_quantizers=3)
    sizes |= dict(sampling_rate=100, frame_rate=3)
    module = SimpleNamespace(**{config_of: SimpleNamespace, model_of: lambda config: (model_of, config)})
    monkeypatch.setattr(decoders.importlib, "import_module", {f"transformers.models.{name_of(name)}": module}.get)
    model, found, draw = DECODERS[name].build(**sizes)
    assert model == (model_of, SimpleNamespace(**sizes))
    assert found == hop
    x = draw(2, 9)
    assert tuple(x.shape) == shape
    if name == "mimi":
        assert (x.dtype, x.max()) == (torch.int64, 10)


def name_of(name):
    family = DECODERS[name].family
    return f"{family}.modeling_{family}"


def test_a_decoder_is_made_for_as_many_frames_as_the_seconds_take(monkeypatch):
    made, sizes = [], []

    def construct(classes, **given):
        sizes.append((classes, given))
        return decoders.Built(torch.nn.Conv1d(1, 1, 1), 30, lambda *asked: made.append(asked) or len(made))

    monkeypatch.setattr(decoders.Decoder, "classes", lambda self: "classes")
    some = decoders.Decoder("Some", "some", 100, construct)
    for seconds in (3.0, 0.01):
        model, x = some.make(2, seconds, width=5)
        assert not model.training
    assert (made, x, sizes) == ([(2, 10), (2, 1)], 2, [("classes", dict(width=5))] * 2)
    assert [decoders.title(one) for one in ("dac", "bigvgan_v2_24khz", "gone")] == [
        "DAC, 44.1 kHz", "BigVGAN v2, 24 kHz", "gone"
    ]  # fmt: skip


def test_a_model_decodes_by_its_method_and_gives_its_waveform():
    class Codec(torch.nn.Module):
        def decode(self, x):
            return SimpleNamespace(audio_values=x + 1)

    assert decode(Codec(), 1) == 2
    assert decode(lambda x: x + 2, 1) == 3


def test_old_weight_norm_keeps_the_drawn_norm():
    layer = torch.nn.Conv1d(4, 6, 5, bias=False)
    del layer.weight
    layer.weight_g, layer.weight_v = (torch.nn.Parameter(torch.zeros(6, *of)) for of in ((1, 1), (4, 5)))
    layer.weight = torch.zeros(6, 4, 5)
    decoders.randomise(layer)
    assert layer.weight_v.detach().std().item() == pytest.approx(decoders.GAIN / 20**0.5, rel=0.2)
    assert torch.equal(layer.weight_g, layer.weight_v.norm(dim=(1, 2), keepdim=True))


@needs_transformers
@torch.no_grad()
def test_a_converted_decoder_decodes_the_same_and_loads_the_same_checkpoints(decoder):
    original, x, layers = decoder
    converted = copy.deepcopy(original)
    done = convert(converted)
    assert (done.replaced, done.left) == (layers, {})
    assert sum(isinstance(one, numba_tconv.ConvTranspose1d) for one in converted.modules()) == layers
    expected = decode(original, x)
    assert expected.shape[-1] > x.shape[-1]
    assert expected.std() > 0
    # On CPUs torch rounds otherwise where a crop has become padding.
    same = torch.allclose if done.cropping else torch.equal
    assert same(decode(converted, x), expected)

    state = {name: 0.7 * value if value.is_floating_point() else value for name, value in original.state_dict().items()}
    for one in (original, converted):
        one.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
    loaded = decode(original, x)
    assert not torch.equal(loaded, expected)
    assert same(decode(converted, x), loaded)


@needs_transformers
@pytest.mark.thorough
@torch.no_grad()
def test_calls_of_the_function_with_an_expanded_filter_are_routed(monkeypatch):
    groups = []

    def counted(*arguments):
        groups.append(arguments[6])
        return numba_tconv.conv_transpose1d(*arguments)

    monkeypatch.setattr(sys.modules[routed.__module__], "conv_transpose1d", counted)
    model, x, _ = tiny("bigvgan")
    expected = model(x)
    filters = sum(type(one).__name__ == "Qwen2_5OmniUpSample1d" for one in model.modules())
    with routed():
        assert torch.equal(model(x), expected)
    assert filters == sum(count > 1 for count in groups) == len(groups) - LAYERS["bigvgan"][0] > 0


@pytest.mark.gpu
@needs_transformers
@torch.no_grad()
def test_a_converted_decoder_on_the_gpu_is_as_close_to_float64_as_torchs(decoder):
    model, x, _ = decoder
    model, x = model.cuda(), x.cuda()
    exact = decode(copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x)
    with bench.torch_switches(tf32=False):
        of_torch = error(decode(model, x), exact)
        with routed():
            assert error(decode(model, x), exact).norm <= 2 * of_torch.norm
        convert(model)
        assert error(decode(model, x), exact).norm <= 2 * of_torch.norm


# --- the models themselves --------------------------------------------------------------------------------------------


@needs_transformers
@torch.no_grad()
@pytest.mark.parametrize("name", thorough(DECODERS, always=["encodec"]))
def test_a_waveform_is_as_long_as_it_is_told_and_is_not_clipped(name):
    model, x, hop = tiny(name)
    waveform = decode(model, x)
    assert waveform.shape[-1] == pytest.approx(FRAMES * hop, abs=hop - 1)
    assert waveform.std(-1).amin() > 1e-4
    assert waveform.abs().amax() < 1


@needs_transformers
@torch.no_grad()
@pytest.mark.parametrize("name", thorough(DECODERS, always=["encodec"]))
def test_every_transposed_layer_is_heard(name):
    model, x, _ = tiny(name)
    whole = decode(model, x)
    for layer in (one for one in model.modules() if isinstance(one, torch.nn.ConvTranspose1d)):
        silenced = layer.register_forward_hook(lambda _, __, y: torch.zeros_like(y))
        assert error(decode(model, x), whole).norm > 0.05
        silenced.remove()


@needs_transformers
@pytest.mark.parametrize("name", thorough(DECODERS, always=["encodec"]))
def test_problems_are_those_of_the_published_sizes(name):
    """Found without computing, which would take minutes."""
    found = decoders.problems(DECODERS[name], 3, 1.5)
    layers, filters = LAYERS[name][1], 6 if name == "bigvgan" else 0
    assert len(found) == layers + filters
    assert all(p.batch == 3 for p in found)
    samples = max(p.out_length for p in found)
    assert samples == pytest.approx((1 + (name == "bigvgan")) * 1.5 * DECODERS[name].sampling_rate, rel=0.06)


def test_titles_have_the_sampling_rate():
    for one in DECODERS.values():
        assert one.title.endswith(f", {one.sampling_rate / 1000:g} kHz")
