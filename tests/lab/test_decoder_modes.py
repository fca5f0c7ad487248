"""BigVGAN in plain torch, and decoders in several modes."""

import copy

import pytest
import torch

from numba_tconv import convert
from numba_tconv.lab.measure import bench, rows
from numba_tconv.lab.measure.machine import Machine
from numba_tconv.lab.studies import bigvgan, decoder_modes, decoders

TINY = bigvgan.Sizes("Tiny", 5, 120, (4, 3), (8, 7), channels=16)


def tiny():
    torch.manual_seed(1)
    model = bigvgan.BigVGAN(TINY)
    decoders.randomise(model)
    return model.eval(), torch.randn(2, TINY.bands, 9)


@torch.no_grad()
def test_a_tiny_bigvgan_is_converted_and_decodes_the_same():
    model, x = tiny()
    y = model(x)
    assert y.shape == (2, 1, 9 * TINY.hop)
    assert y.std() > 1e-3
    assert y.abs().amax() < 1
    report = convert(model)
    assert (report.replaced, report.activations, report.left) == (2, 2 * 3 * 6 + 1, {})
    torch.testing.assert_close(model(x), y)


@pytest.mark.parametrize("name", bigvgan.SIZES)
def test_published_sizes(name):
    """Rates match the hop of its name's model; 109 activations."""
    sizes = bigvgan.SIZES[name]
    assert sizes.hop == {"bigvgan_v2_24khz": 256, "bigvgan_v2_44khz": 512}[name]
    with torch.device("meta"):
        model = bigvgan.BigVGAN(sizes)
        assert model(torch.empty(1, sizes.bands, 10)).shape == (1, 1, 10 * sizes.hop)
    assert sum(isinstance(one, bigvgan.Activation) for one in model.modules()) == 109


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(decoder_modes, "DEVICE", "cpu")
    monkeypatch.setattr(decoder_modes.machine, "describe", lambda: Machine("0123abc", "H200", "580", "2.11", "9", "0"))
    monkeypatch.setitem(bigvgan.SIZES, "tiny", TINY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_for_each_mode(on_the_cpu, tmp_path, dtype):
    row, one = decoder_modes.measure("tiny", [dtype], [2, 1], 0.5, ["eager"], 2)
    assert (row.decoder, row.mode, row.batch, row.activations) == ("tiny", "eager", 2, 37)
    assert 0 < row.relerr <= 2 * row.torch_relerr
    assert min(row.ms_p50, row.torch_ms_p50) > 0
    rows.append(tmp_path / "rows.csv", [row], decoder_modes.Timed)
    assert (one.batch, one.mode) == (1, "eager")
    (read,) = rows.existing(tmp_path / "rows.csv", decoder_modes.Timed)
    assert read.decoder == "tiny"


def test_kernels_of_layers_and_activations_are_compiled_ahead_in_each_dtype(monkeypatch):
    filled = []
    monkeypatch.setattr(decoder_modes.compile_ahead, "fill", lambda calls, cc, jobs: filled.extend(calls))
    model, x = tiny()
    convert(model)
    models = {dtype: copy.deepcopy(model).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    decoder_modes.compile_all(models, x)
    found = {(call.dtype, call.precision if hasattr(call, "precision") else call.activation) for call in filled}
    names = {torch.float32: "ieee", torch.bfloat16: "bf16"}  # TF32 gains nothing for so few channels
    assert found == {(dtype, name) for dtype in names for name in (names[dtype], "snake")}


def test_no_row_comes_of_a_wrong_waveform(on_the_cpu, monkeypatch):
    compute = decoder_modes.calls_of

    def wrong(model, x, mode, *, ours):
        call = compute(model, x, mode, ours=ours)
        return lambda: call() * (1.5 if ours else 1)

    monkeypatch.setattr(decoder_modes, "calls_of", wrong)
    with pytest.raises(bench.WrongResult, match="wrong on tiny eager tf32"):
        list(decoder_modes.measure("tiny", [torch.float32], [2], 0.5, ["eager"], 2))


def test_an_unknown_decoder_is_answered_with_the_names():
    with pytest.raises(ValueError, match="no decoder is called 'dacs'"):
        decoder_modes.make("dacs", 1, 1.0)


@torch.no_grad()
def test_a_converted_decoder_is_one_graph():
    model, x = tiny()
    y = model(x)
    convert(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)
