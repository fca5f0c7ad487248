"""Decoders of published models, built by transformers' classes with random weights: converted, they decode the same."""

import copy
import importlib.util
import os
import sys

import pytest
import torch

import numba_tconv
from numba_tconv import bench, convert, routed

# Found, not imported: every process that collects the tests would have to wait for it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is ever fetched

TINY_HIFIGAN = dict(
    upsample_initial_channel=16,
    upsample_rates=(4, 3),
    upsample_kernel_sizes=(8, 7),
    resblock_kernel_sizes=(3,),
    resblock_dilation_sizes=((1, 3, 5),),
)


def encodec():
    from transformers.models.encodec import modeling_encodec as m

    config = m.EncodecConfig(hidden_size=16, num_filters=4, upsampling_ratios=(4, 3, 2), num_lstm_layers=1)
    return m.EncodecDecoder(config), torch.randn(2, 16, 9)


def dac():
    from transformers.models.dac import modeling_dac as m

    config = m.DacConfig(encoder_hidden_size=4, decoder_hidden_size=32, downsampling_ratios=(2, 3, 4))
    return m.DacModel(config).decoder, torch.randn(2, config.hidden_size, 9)


def speecht5():
    from transformers.models.speecht5 import modeling_speecht5 as m

    model = m.SpeechT5HifiGan(m.SpeechT5HifiGanConfig(model_in_dim=10, **TINY_HIFIGAN))
    model.apply_weight_norm()
    return model, torch.randn(2, 9, 10)


def mimi():
    from transformers.models.mimi import modeling_mimi as m

    sizes = dict(hidden_size=16, num_filters=4, upsampling_ratios=[4, 3, 2], upsample_groups=16)
    codebooks = dict(codebook_size=8, codebook_dim=8, num_quantizers=3, vector_quantization_hidden_dimension=8)
    attention = dict(
        intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8
    )
    return m.MimiModel(m.MimiConfig(**sizes, **codebooks, **attention)), torch.randint(8, (2, 3, 9))


def vits():
    from transformers.models.vits import modeling_vits as m

    model = m.VitsHifiGan(m.VitsConfig(flow_size=10, speaker_embedding_size=0, **TINY_HIFIGAN))
    model.apply_weight_norm()
    return model, torch.randn(2, 10, 9)


def bigvgan():
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as m

    return m.Qwen2_5OmniToken2WavBigVGANModel(m.Qwen2_5OmniBigVGANConfig(mel_dim=10, **TINY_HIFIGAN)), torch.randn(
        2, 10, 9
    )


# Of each, its transposed layers.
DECODERS = {encodec: 3, dac: 3, speecht5: 2, mimi: 4, vits: 2, bigvgan: 2}


def decode(model, x):
    decoded = model.decode(x) if hasattr(model, "decode") else model(x)
    return getattr(decoded, "audio_values", decoded)


@pytest.fixture(autouse=True)
def one_thread():
    """Decoders this small wait for each other's threads longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DECODERS, ids=lambda make: make.__name__)
def decoder(request):
    model, x = request.param()
    with torch.no_grad():
        for parameter in model.parameters():  # some are initialised to zeros
            parameter.normal_(std=0.3)
    return model.eval(), x, DECODERS[request.param]


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
    assert torch.equal(decode(converted, x), expected)

    state = {name: 0.7 * value if value.is_floating_point() else value for name, value in original.state_dict().items()}
    for one in (original, converted):
        one.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
    loaded = decode(original, x)
    assert not torch.equal(loaded, expected)
    assert torch.equal(decode(converted, x), loaded)


@torch.no_grad()
def test_calls_of_the_function_with_an_expanded_filter_are_routed(monkeypatch):
    groups = []

    def counted(*args, **kwargs):
        groups.append(kwargs.get("groups"))
        return numba_tconv.conv_transpose1d(*args, **kwargs)

    monkeypatch.setattr(sys.modules[routed.__module__], "conv_transpose1d", counted)
    model, x = bigvgan()
    expected = model(x)
    filters = sum(type(one).__name__ == "Qwen2_5OmniUpSample1d" for one in model.modules())
    with routed():
        assert torch.equal(model(x), expected)
    assert filters == sum(count is not None for count in groups) == len(groups) - DECODERS[bigvgan] > 0


@pytest.mark.gpu
@torch.no_grad()
def test_a_converted_decoder_on_the_gpu_is_as_close_to_float64_as_torchs(decoder):
    model, x, _ = decoder
    model, x = model.cuda(), x.cuda()
    exact = decode(copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x)
    with bench.torch_switches(tf32=False):
        of_torch = error(decode(model, x), exact)
        with routed():
            assert error(decode(model, x), exact) <= 2 * of_torch
        convert(model)
        assert error(decode(model, x), exact) <= 2 * of_torch


def error(y, exact):
    return (y.double() - exact).norm() / exact.norm()
