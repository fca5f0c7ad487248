"""Whole decoders timed: times and checks, rows, table and figure."""

import importlib.util
import itertools

import pytest
import torch

from numba_tconv.lab.cli import commands, study_runs
from numba_tconv.lab.measure import ahead, bench, rows, timing, workloads
from numba_tconv.lab.measure.accuracy import Error
from numba_tconv.lab.measure.machine import Machine
from numba_tconv.lab.studies import decoder_times, decoders
from numba_tconv.runtime.device import H200
from numba_tconv.torch_api import functional, module
from tests.command_line import mistake, run
from tests.samples import timed

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


class Double(torch.nn.Module):
    """A decoder of codes, of two layers and a function call on an expanded filter."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.ConvTranspose1d(4, 6, 4, 2), torch.nn.ConvTranspose1d(6, 2, 5, 3))
        self.codes = torch.nn.Embedding(9, 4)
        self.filter = torch.nn.Buffer(torch.rand(1, 1, 4))

    def forward(self, x):
        x = self.layers(self.codes(x).mT)
        return torch.nn.functional.conv_transpose1d(x, self.filter.expand(2, -1, -1), stride=2, groups=2)


class Clock:
    """Stands for a CUDA event: each record takes a millisecond."""

    now = itertools.count()

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = next(Clock.now)

    def elapsed_time(self, stop):
        return float(stop.at - self.at)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """``measure`` as if on an H200 whose time passes by events alone; returns the calls of our function.

    Four warm-up rounds with a slower ours, then three timed ones.
    """

    def ours(x, weight, *others, **named):
        calls.append((x.dtype, weight.shape, functional.default_precision(x.dtype), torch.backends.cudnn.benchmark))
        for _ in range(50 if len(calls) <= 4 * 3 else 1):  # ours takes a millisecond more than torch's
            Clock(True).record()
        return torch.conv_transpose1d(x, weight, *others, **named)

    def interleave(sides, *_):
        for turn in range(7):
            for side in sides:
                if turn <= 4:
                    side.events.clear()
                start, stop = Clock(True), Clock(True)
                start.record()
                side.output = side.call()
                stop.record()
                side.events.append((start, stop))

    def construct(_):
        return decoders.Built(Double(), 12, lambda batch, frames: torch.randint(9, (batch, frames)))

    calls = []
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(decoder_times, "DEVICE", "cpu")
    monkeypatch.setattr(functional, "conv_transpose1d", ours)
    monkeypatch.setattr(decoder_times, "interleave", interleave)
    monkeypatch.setattr(decoders, "require_transformers", lambda: None)
    monkeypatch.setattr(decoders.Decoder, "classes", lambda self: None)
    monkeypatch.setitem(decoders.DECODERS, "double", decoders.Decoder("Double", "dac", 120, construct))
    monkeypatch.setattr(decoder_times.machine, "describe", lambda: Machine("0123abc", "H200", "580", "2.11", "9", "0"))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_calls_and_the_whole(on_the_cpu, dtype, monkeypatch):
    shares, quantile = [], decoder_times.quantile
    monkeypatch.setattr(decoder_times, "quantile", lambda times, share: shares.append(share) or quantile(times, share))
    row = decoder_times.measure("double", dtype, batch=2, seconds=1.0)
    name = str(dtype).removeprefix("torch.")
    assert (row.decoder, row.dtype, row.batch, row.seconds, row.calls) == ("double", name, 2, 1.0, 3)
    assert row.precision == ("tf32" if dtype == torch.float32 else name)
    assert (row.gpu, row.weights, shares) == ("H200", "call", [0.5] * 4)
    # From event to event is a millisecond: three calls between two each, ours with a third inside.
    assert (row.torch_layers_ms_p50, row.layers_ms_p50) == (3, 6)
    assert (row.torch_ms_p50, row.ms_p50) == (7, 10)
    assert 0 < row.relerr == row.torch_relerr < (1e-5 if dtype == torch.float32 else 3e-2)
    shapes = [(4, 6, 4), (6, 2, 5), (2, 1, 4)]
    precision = functional.default_precision(dtype) if dtype != torch.float32 else functional.TF32_ALLOWED
    assert on_the_cpu == [(dtype, torch.Size(shape), precision, True) for _ in range(7) for shape in shapes]


def test_the_wall_time_is_of_the_model_and_of_its_converted_copy(on_the_cpu, monkeypatch):
    """Every call of torch's layer advances the clock by a second, every call of ours by two."""
    now = [0.0]

    def counted(seconds, function):
        def call(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "conv_transpose1d", counted(2, module.conv_transpose1d))
    monkeypatch.setattr(torch.nn.ConvTranspose1d, "forward", counted(1, torch.nn.ConvTranspose1d.forward))
    row = decoder_times.measure("double", batch=2, seconds=1.0)
    assert (row.torch_wall_ms_p50, row.wall_ms_p50) == (2000, 4000)


def test_an_error_is_by_norm_and_by_the_largest():
    found = decoder_times.error(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double())
    assert found == Error(1 / 5, 1 / 4)


@pytest.mark.parametrize("wrong", [0.0, float("nan"), 1.5])
def test_no_row_comes_of_a_wrong_waveform(on_the_cpu, monkeypatch, wrong):
    right = functional.conv_transpose1d

    def forgetful(x, weight, *others, **named):
        y = right(x, weight, *others, **named)
        if weight.shape == (6, 2, 5):
            y[..., -1] *= wrong
        return y

    monkeypatch.setattr(functional, "conv_transpose1d", forgetful)
    with pytest.raises(bench.WrongResult, match=r"wrong on double tf32: ours error norm .*; torch's own error norm"):
        decoder_times.measure("double", batch=2, seconds=1.0)


@pytest.mark.gpu
@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_on_the_gpu(dtype):
    row = decoder_times.measure("vits", dtype, batch=1, seconds=0.2, repeats=5, budget_s=0.1)
    assert row.calls == 4
    assert 0 < row.layers_ms_p50 < row.ms_p50
    assert 0 < row.torch_layers_ms_p50 < row.torch_ms_p50


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def measuring(monkeypatch):
    """Measurements return a made-up row, as if with a GPU and transformers; returns what was measured."""
    seen = []

    def measure(name, dtype, *, batch, seconds, repeats):
        seen.append((name, str(dtype).removeprefix("torch."), batch, seconds, repeats))
        return timed(name, seen[-1][1])

    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(decoders, "require_transformers", lambda: None)
    monkeypatch.setattr(ahead, "compile_all", lambda *_: None)
    monkeypatch.setattr(decoder_times, "measure", measure)
    return seen


def test_the_command_adds_a_row_for_each_decoder_and_dtype(capsys, measuring, tmp_path):
    out = tmp_path / "rows.csv"
    code, printed, _ = run(capsys, "decoders", "dac", "vits", "--batch", 2, "--seconds", 0.5, "--out", out)
    assert code == 0
    pairs = [(name, dtype) for name in ("dac", "vits") for dtype in ("float32", "bfloat16")]
    assert measuring == [(*pair, 2, 0.5, 20) for pair in pairs]
    assert "dac tf32, 4 x 4 s: whole 26 ms (torch 40), 4 transposed convolutions 7 ms (torch 21)" in printed
    assert run(capsys, "decoders", "--dtype", "float16", "--repeats", 3, "--out", out)[0] == 0
    assert measuring[4:] == [(name, "float16", 4, 4.0, 3) for name in decoders.DECODERS]
    assert [(one.decoder, one.dtype) for one in rows.read(out, decoder_times.Timed)] == [one[:2] for one in measuring]


def test_a_wrong_decoder_fails_and_the_others_are_kept(capsys, measuring, tmp_path, monkeypatch):
    right = decoder_times.measure

    def measure(name, *others, **named):
        if name == "dac":
            raise bench.WrongResult("wrong on dac", [])
        return right(name, *others, **named)

    monkeypatch.setattr(decoder_times, "measure", measure)
    out = tmp_path / "rows.csv"
    code, _, err = run(capsys, "decoders", "dac", "vits", "--dtype", "bfloat16", "--out", out)
    assert (code, err) == (commands.FAILED, "numba_tconv: wrong on dac\n")
    assert [one.decoder for one in rows.read(out, decoder_times.Timed)] == ["vits"]


def test_without_transformers_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    err = mistake(capsys, "decoders")
    assert err == f"numba_tconv: {decoders.MISSING}\n"
    assert "'.[decoders]'" in err


def test_what_is_compiled_ahead_is_what_is_called(monkeypatch):
    problems = [workloads.get(name).problem for name in ("hifigan_u1", "bigvgan_96")]
    asked, dtypes = [], [torch.bfloat16, torch.float32]
    monkeypatch.setattr(decoders, "problems", lambda *given: asked.append(given) or problems)
    monkeypatch.setattr(study_runs, "current_device", lambda: H200)
    calls = [*study_runs.calls_of([decoders.get("bigvgan")], dtypes, 2, 0.5)]
    assert asked == [(decoders.get("bigvgan"), 2, 0.5)]
    found = {(call.dtype, call.problem, call.precision) for call in calls}
    # TF32 gains nothing for the filter.
    precisions = ("bf16", "bf16"), ("tf32", "ieee")
    assert found == {
        (dtype, problem, precision)
        for dtype, some in zip(dtypes, precisions, strict=True)
        for problem, precision in zip(problems, some, strict=True)
    }


# --- table and figure -------------------------------------------------------------------------------------------------

RECORDED = [
    timed("vits", calls=5),
    timed("dac", time="2025-01-01T00:00:00Z", ms_p50=99.0),
    timed("dac"),
    timed("dac", "bfloat16", ms_p50=10.0, torch_ms_p50=12.0, layers_ms_p50=2.0, torch_layers_ms_p50=3.0),
]


def test_the_table_has_the_newest_rows_of_each_dtype():
    parts = decoder_times.render(RECORDED).split("\n\n")
    assert [part.split(",")[0] for part in parts[::2]] == ["**float32", "**bfloat16**"]
    assert "4 inputs of 4 s" in parts[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for part in parts[1::2] for line in part.splitlines()[2:]]
    shown = ["21", "7", "3.00x", "40", "26", "1.54x", "52%"]
    assert cells == [
        ["DAC, 44.1 kHz", "4", *shown],
        ["VITS HiFi-GAN, 16 kHz", "5", *shown],
        ["DAC, 44.1 kHz", "4", "3", "2", "1.50x", "12", "10", "1.20x", "25%"],
    ]


def test_a_decoder_that_is_no_longer_there_keeps_its_row():
    (some,) = decoder_times.grouped([timed("gone"), timed("vits")])
    assert [one.decoder for one in some] == ["vits", "gone"]
    assert "| gone " in decoder_times.render(some)
