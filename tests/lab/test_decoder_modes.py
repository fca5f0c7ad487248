"""BigVGAN in plain torch, and decoders in several modes."""

import contextlib
import copy
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from numba_tconv import convert
from numba_tconv.lab.cli import commands
from numba_tconv.lab.measure import bench, rows
from numba_tconv.lab.measure.machine import Machine
from numba_tconv.lab.report import figures as plotting
from numba_tconv.lab.studies import bigvgan, decoder_modes, decoders
from tests.command_line import run
from tests.samples import in_mode
from tests.thorough import thorough

TINY = bigvgan.Sizes(5, 120, (4, 3), (8, 7), channels=16)
ONE_STAGE = bigvgan.Sizes(5, 120, (4,), (8,), channels=8)


def tiny(sizes=TINY):
    torch.manual_seed(1)
    model = bigvgan.BigVGAN(sizes)
    decoders.randomise(model)
    return model.eval(), torch.randn(2, sizes.bands, 9)


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


@pytest.mark.parametrize("name", thorough(bigvgan.SIZES, always=[*bigvgan.SIZES][:1]))
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
    monkeypatch.setitem(bigvgan.SIZES, "tiny", ONE_STAGE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_for_each_mode(on_the_cpu, tmp_path, dtype, capsys, monkeypatch):
    compute, cudnn, switches = decoder_modes.measure_mode, torch.backends.cudnn, []
    monkeypatch.setattr(
        decoder_modes,
        "measure_mode",
        lambda *given: switches.append((cudnn.benchmark, cudnn.allow_tf32, given[4])) or compute(*given),
    )
    row, one = decoder_modes.measure("tiny", [dtype], [2, 1], 0.5, ["eager"], 2)
    precision = "tf32" if dtype == torch.float32 else "bfloat16"
    assert [line.partition(" s: ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "tiny: making and converting it",
        f"{precision}: float64 reference",
        *(f"{precision}: {batch} inputs, eager" for batch in (2, 1)),
    ]
    assert row.dtype == str(dtype).removeprefix("torch.")
    assert row.seconds == 0.5
    assert switches == [(False, dtype == torch.float32, 2)] * 2
    assert (row.decoder, row.mode, row.batch, row.activations) == ("tiny", "eager", 2, 19)
    assert 0 < row.relerr <= 2 * row.torch_relerr
    assert min(row.ms_p50, row.torch_ms_p50) > 0
    rows.append(tmp_path / "rows.csv", [row], decoder_modes.Timed)
    assert (one.batch, one.mode) == (1, "eager")
    (read,) = rows.existing(tmp_path / "rows.csv", decoder_modes.Timed)
    assert read.decoder == "tiny"


def test_kernels_of_layers_and_activations_are_compiled_ahead_in_each_dtype():
    model, x = tiny()
    convert(model)
    models = {dtype: copy.deepcopy(model).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    calls = decoder_modes.calls_ahead(models, [x])
    found = {(call.dtype, call.precision if hasattr(call, "precision") else call.activation) for call in calls}
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


def test_each_side_has_an_input_of_its_own(on_the_cpu, monkeypatch):
    """A graph of ours may be captured with the input in place of torch's."""
    models, given, asked = [nn.Tanh(), nn.Sigmoid()], torch.randn(2, 3), []

    def calls_of(model, x, mode, *, ours):
        asked.append((model, mode, ours, x.data_ptr()))
        return lambda: model(x)[:, None]

    monkeypatch.setattr(decoder_modes, "calls_of", calls_of)
    monkeypatch.setattr(decoder_modes.timing, "wall_times", lambda calls, repeats: (len(calls), repeats))
    (of_torch, of_ours), times = decoder_modes.measure_mode(models, given, "graph", given.tanh().double(), 7)
    assert [one[:3] for one in asked] == [(models[0], "graph", 0), (models[1], "graph", 1)]
    assert len({given.data_ptr(), *(pointer for *_, pointer in asked)}) == 3
    assert of_torch.norm < 1e-6 < of_ours.norm
    assert times == (2, 7)


def test_inputs_last_as_long_as_was_asked(on_the_cpu):
    for seconds, frames in ((0.5, 15), (0.001, 1)):
        model, x = decoder_modes.make("tiny", 2, seconds)
        assert x.shape == (2, ONE_STAGE.bands, frames)
        assert not model.training


def test_an_unknown_decoder_is_answered_with_the_names():
    with pytest.raises(ValueError, match="no decoder is called 'dacs'"):
        decoder_modes.make("dacs", 1, 1.0)


def lines(page):
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def test_the_table_has_the_newest_row_of_each_mode_in_order():
    older = in_mode(ms_p50=1.0, time="2020-01-01T00:00:00Z")
    others = [in_mode("bigvgan_v2_24khz", batch=1), in_mode("gone"), in_mode("dac", dtype="bfloat16")]
    page = decoder_modes.render([in_mode(mode="graph"), in_mode(), older, *others])
    shown = ["40", "10", "4.00x", "3.0e-04", "2.0e-04"]
    assert lines(page) == [
        ["DAC, 44.1 kHz", "float32", "4", "eager", *shown],
        ["DAC, 44.1 kHz", "float32", "4", "graph", *shown],
        ["DAC, 44.1 kHz", "bfloat16", "4", "eager", *shown],
        ["BigVGAN v2, 24 kHz", "float32", "1", "eager", *shown],
        ["gone", "float32", "4", "eager", *shown],
    ]
    assert "inputs of 4 s" in page
    assert page.count("NVIDIA H200") == 1
    assert decoder_modes.render([in_mode(), in_mode(gpu="another")]).count("| DAC") == 2


def test_the_command_records_what_it_can(capsys, monkeypatch, tmp_path):
    seen, out = [], tmp_path / "rows.csv"

    def measure(name, dtypes, batches, seconds, modes, repeats):
        seen.append((name, dtypes, batches, seconds, modes, repeats))
        yield in_mode(name)
        if name == "vits":
            raise RuntimeError("it cannot be captured")
        yield in_mode(name, "graph")

    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(decoders, "require_transformers", lambda: None)
    monkeypatch.setattr(decoder_modes, "measure", measure)
    named = "vits", "bigvgan_v2_24khz", "--mode", "eager", "--mode", "graph", "--batch", 1, "--batch", 4, "--out", out
    code, printed, err = run(capsys, "decoders", *named)
    assert (code, err) == (commands.FAILED, "numba_tconv: vits: it cannot be captured\n")
    given = [torch.float32, torch.bfloat16], [1, 4], 4.0, ["eager", "graph"], 20
    assert seen == [("vits", *given), ("bigvgan_v2_24khz", *given)]
    kept = [(one.decoder, one.mode) for one in rows.read(out, decoder_modes.Timed)]
    assert kept == [("vits", "eager"), ("bigvgan_v2_24khz", "eager"), ("bigvgan_v2_24khz", "graph")]
    assert "vits float32, 4 x 4 s, eager: 10 ms (torch 40)" in printed
    seen.clear()
    assert run(capsys, "decoders", "--mode", "graph", "--out", out)[0] == commands.FAILED
    assert [name for name, *_ in seen] == list(decoder_modes.NAMES)


def test_transformers_is_needed_by_its_decoders_alone(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(decoders.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(decoder_modes, "measure", lambda name, *_: [in_mode(name)])
    out = "--mode", "eager", "--out", tmp_path / "rows.csv"
    assert run(capsys, "decoders", "bigvgan_v2_24khz", *out)[0] == 0
    code, _, err = run(capsys, "decoders", "bigvgan_v2_24khz", "dac", *out)
    assert (code, err) == (commands.MISTAKE, f"numba_tconv: {decoders.MISSING}\n")


@pytest.mark.parametrize("ours", [True, False])
def test_what_is_compiled_is_the_whole_decoder(monkeypatch, ours):
    monkeypatch.setattr(torch, "compile", lambda function: lambda *given: (function, *given))
    model, x = nn.Tanh(), torch.randn(3)
    assert decoder_modes.calls_of(model, x, "compile", ours=ours)() == (decoders.decode, model, x)


@pytest.fixture
def capturing(monkeypatch):
    for name, stand_in in {
        "CUDAGraph": mock.MagicMock,
        "Stream": mock.MagicMock,
        "stream": lambda _: contextlib.nullcontext(),
        "graph": lambda _: contextlib.nullcontext(),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def test_a_graph_keeps_what_it_reads(capturing):
    model, x = nn.Tanh(), torch.randn(3)
    kept = weakref.ref(model), weakref.ref(x)
    replay = decoder_modes.calls_of(model, x, "graph", ours=False)
    del model, x
    assert all(one() is not None for one in kept)
    assert torch.equal(replay(), kept[1]().tanh())


def test_numbers_of_a_captured_model_are_on_the_cpu(capturing, monkeypatch):
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.number, self.scale = nn.Buffer(torch.tensor(2)), nn.Buffer(torch.tensor(0.5))

        def forward(self, x):
            return x * self.scale + self.number

    monkeypatch.setattr(torch.Tensor, "cpu", lambda number: number + 100)
    model, x = Shift(), torch.ones(3)
    replay = decoder_modes.calls_of(model, x, "graph", ours=False)
    assert replay().tolist() == [102.5] * 3
    assert model.number == 2


@pytest.mark.thorough
@torch.no_grad()
def test_a_converted_decoder_is_one_graph():
    model, x = tiny(ONE_STAGE)
    y = model(x)
    convert(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), y)


MEASURED = [
    *(in_mode(mode=mode, dtype=dtype) for mode in ("eager", "graph") for dtype in ("bfloat16", "float32")),
    in_mode(ms_p50=99.0, time="2025-01-01T00:00:00Z"),
    in_mode("bigvgan", activations=109, ms_p50=50.0),
]


@pytest.mark.parametrize("other", [{}, {"gpu": "another", "time": "2027-01-01T00:00:00Z"}, {"seconds": 1.0}])
def test_a_panel_of_the_figure_shows_a_decoders_modes(other):
    figure = plotting.decoders([in_mode(**{"ms_p50": 1.0, "time": "2020-01-01T00:00:00Z"} | other), *MEASURED])
    first, other = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["DAC, 44.1 kHz", "Qwen2.5-Omni BigVGAN, 24 kHz"]
    assert [text.get_text() for text in first.get_yticklabels()] == [
        f"{dtype}, 4 x, {mode}" for dtype in ("TF32", "bf16") for mode in ("eager", "graph")
    ]
    assert [text.get_text() for text in other.get_yticklabels()] == ["TF32, 4 x, eager"]
    assert [text.get_text() for text in first.texts + other.texts] == ["4.00x"] * 4 + ["0.80x"]
    torchs, ours = first.lines
    assert (torchs.get_label(), *torchs.get_xdata()) == ("torch", *[40] * 4)
    assert (ours.get_label(), *ours.get_xdata()) == ("ours", *[10] * 4)
    assert "random weights, frozen; 4 s of sound an input; NVIDIA H200" in figure.get_supxlabel().replace("\n", " ")
    (said,) = (legend.get_title().get_text().replace("\n", " ") for legend in figure.legends)
    assert said.endswith("0.8 (0.80 to 0.80) with alias-free activations, 4.0 (4.00 to 4.00) without")


@pytest.mark.parametrize(("other", "shown"), [("eager", False), ("graph", True)])
def test_labels_that_the_panel_at_the_left_has_are_not_repeated(other, shown):
    figure = plotting.decoders([in_mode(), in_mode("bigvgan", other)])
    figure.draw_without_rendering()
    left, right = ([one.label1.get_visible() for one in axes.yaxis.get_major_ticks()] for axes in figure.axes)
    assert (left, right) == ([True], [shown])


def test_they_are_drawn_with_the_other_figures(tmp_path):
    assert plotting.decoders([]) is None
    paths = plotting.draw_all([], tmp_path, timed=MEASURED)
    assert [path.name for path in paths] == ["decoders.svg", "decoders.png"]
