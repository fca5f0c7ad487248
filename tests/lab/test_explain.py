"""``explain`` reports what calls do, by the same rules, and why."""

import re
import xml.etree.ElementTree as xml
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import numba_tconv
from numba_tconv import explain
from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.lab.explain.picture import EMPTY, OTHER, picture
from numba_tconv.lab.measure import rows, workloads
from numba_tconv.runtime import device as devices
from numba_tconv.runtime.device import A100, H200, Device
from numba_tconv.selection.joined import joined
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import operators as ops
from numba_tconv.torch_api.functional import default_precision
from tests.samples import row
from tests.thorough import thorough

TURING = Device((7, 5), 68, 64 * 1024)
STRIDED = Problem(4, 64, 32, 8, 1000, stride=4, padding=2, bias=True)
VARIED = ("kb64", "kb79", "hifigan_u1", "depthwise", "convtasnet", "istft", "pqmf", "waveglow", "small", "head")
ARITHMETIC = [(dtype, precision) for dtype, known in PRECISIONS.items() for precision in (None, *known)]


def candidate_of(found, rung):
    return next(one for one in found.candidates if one.rung == rung)


@pytest.mark.parametrize(
    ("device", "dtype", "precision"),
    thorough(
        [(device, *of) for device in (H200, A100, TURING) for of in ARITHMETIC],
        always=[*((H200, *of) for of in ARITHMETIC), *((TURING, *of) for of in ARITHMETIC[::4])],
    ),
    ids=lambda one: f"cc {one.cc}" if isinstance(one, Device) else str(one),
)
def test_what_is_explained_is_what_a_call_does(dtype, precision, device):
    for name in VARIED:
        workload = workloads.get(name)
        found = explain(name, dtype=dtype, precision=precision, device=device)
        if found.by_torch:
            assert found.taken is None
            assert "taken      none: torch's own operator computes it on such a GPU" in str(found)
            asked = precision or default_precision(dtype)
            assert ops._plan(workload.problem, dtype, "", asked, device) == (None, found.precision)
            continue
        if found.taken is None:
            assert "none: no rung can do it" in str(found)
            refusals = [f"{one.rung} cannot do {found.problem}: {one.refusal}" for one in found.candidates]
            with pytest.raises(NotImplementedError, match=re.escape("; ".join(refusals))):
                ops._plan(workload.problem, dtype, "", found.precision, device)
            continue
        rung, computed = ops._plan(workload.problem, dtype, "", precision or default_precision(dtype), device)
        assert (found.taken.rung, found.precision) == (rung.name, computed)
        assert [one.rung for one in found.candidates] == list(RUNGS)
        for one in found.candidates:
            assert (one.refusal is None) == (one.rung == rung.name)
            cannot = RUNGS[one.rung].refusal(workload.problem, dtype, computed, device)
            assert (one.config is None) == (one.tile is None) == bool(cannot)
            assert not cannot or one.refusal == cannot
            if one.config is not None:
                assert one.config == RUNGS[one.rung].config_on(device, workload.problem, dtype, computed)


def test_reasons_are_those_of_the_selection():
    def refusals(name, **arguments):
        return {one.rung: one.refusal for one in explain(name, device=H200, **arguments).candidates}

    assert refusals("kb64", precision="tf32")["k5_mma"] == "k6_wgmma is above it"
    reason = "it is for tiles of at least 64 rows (output channels times phases), not 8, or of 3 stages"
    assert refusals("pqmf", precision="tf32")["k6_wgmma"].startswith(reason)
    assert "up to 128 products an output" in refusals("pqmf", dtype=torch.bfloat16)["k5_mma"]
    short = replace(workloads.get("small").problem, in_channels=16)
    assert "short sums of fewer than 10,000,000 FLOPs" in refusals(short, precision="ieee")["k4_register_tile"]
    assert refusals("depthwise", precision="ieee")["k4_register_tile"].startswith("depthwise is for few channels")
    long = replace(workloads.get("pqmf").problem, kernel_size=512)
    assert refusals(long, dtype=torch.bfloat16)["depthwise"].startswith("it is for weights that its registers hold")
    dense = explain(Problem(16, 300, 4, 8, 60_000, 4), dtype=torch.float16, device=TURING)
    why = "below compute capability 8.0 torch's own operator is for dense layers"
    assert candidate_of(dense, "k3_shared_tile").refusal == why


@pytest.fixture
def switch():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    yield lambda allowed: setattr(cudnn, "allow_tf32", allowed)
    cudnn.allow_tf32 = before


def test_why_a_precision_is_computed(switch):
    def why(what, **arguments):
        found = explain(what, device=H200, **arguments)
        return found.precision, found.why_precision

    switch(True)
    assert why("kb64") == ("tf32", "torch's switch allows TF32")
    assert why("depthwise") == ("ieee", "torch's switch allows TF32, but no rung gains by it here")
    assert why("kb64", precision="tf32x3") == ("tf32x3", "as named")
    assert why("depthwise", precision="tf32x3") == ("ieee", "no tensor-core rung takes it in tf32x3")
    assert why("kb64", dtype=torch.float64) == ("fp64", "the only precision of float64")
    switch(False)
    assert why("kb64") == ("ieee", "torch's switch does not allow TF32")


def test_numbers_are_the_problems():
    found = explain(STRIDED, precision="tf32", device=H200)
    assert (found.flops, found.bytes) == (STRIDED.flops, STRIDED.min_bytes(4))
    assert found.floor_ms == STRIDED.floor_ms(4, "tf32")
    assert found.predicted_ms == k6_choose.cost(STRIDED, found.taken.config, H200)
    assert found.predicted_roofline == found.floor_ms / found.predicted_ms
    for problem in (STRIDED, workloads.get("dac_u1").problem):
        found = explain(problem, precision="ieee", device=H200)
        floors = {"memory": found.bytes / 4.29e9, "arithmetic": found.flops / 67e9}
        assert found.bound == max(floors, key=floors.get)
        assert found.predicted_ms is found.predicted_roofline is None


def test_a_model_predicts_only_what_its_rung_is_meant_for():
    pqmf, kb64 = (explain(name, precision="tf32", device=H200) for name in ("pqmf", "kb64"))
    assert candidate_of(kb64, "k6_wgmma").predicted_ms
    assert candidate_of(pqmf, "k6_wgmma").tile
    assert candidate_of(pqmf, "k6_wgmma").predicted_ms is None


# Recorded rows


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


def recorded(data, what, **arguments):
    found = explain(what, device=H200, data=data, **dict(precision="ieee") | arguments)
    return {one.rung: one.recorded for one in found.candidates if one.recorded}


def test_rows_of_the_same_sizes_are_found_whatever_they_are_called(data):
    base = workloads.get("kb64")
    many, batch = workloads.at_length(base, 2048, 2048), workloads.at_length(base, 2048, 16)
    made = [row("kb64"), row(many), row(batch, "k3_shared_tile"), row("kb64", "auto")]
    rows.append(data / "a.csv", made)
    kept = rows.read(data / "a.csv")
    assert recorded(data, "kb64") == {"k4_register_tile": kept[0]}
    assert recorded(data, many.problem) == {"k4_register_tile": kept[1]}
    assert recorded(data, replace(batch.problem, bias=True)) == {"k3_shared_tile": kept[2]}
    assert recorded(data, replace(base.problem, length=2048)) == {}


def test_rows_of_other_measurements_are_not(data):
    others = (
        dict(gpu="NVIDIA H100 80GB HBM3"),
        dict(direction="grad_input"),
        dict(dtype="float64", precision="float64"),
        dict(precision="tf32"),
        dict(length=2048),
        dict(workload="kb63"),
        dict(workload="kb64@batchx"),
    )
    rows.append(data / "a.csv", [replace(row("kb64"), **other) for other in others])
    assert recorded(data, "kb64") == {}


def test_the_newest_row_counts_and_is_told(data):
    newest = row("kb64", slower=1.25, time="2026-03-01T00:00:00Z")
    swept = row(workloads.at_length(workloads.get("kb64"), 65536, 64), slower=3.0, time="2026-02-01T00:00:00Z")
    rows.append(data / "a.csv", [row("kb64"), newest, swept])
    found = explain("kb64", precision="ieee", device=H200, data=data)
    assert found.recorded_ms == pytest.approx(newest.ms_p50, rel=1e-5)
    assert found.recorded_roofline == 0.8
    assert "80% of the roofline" in str(found)
    assert "(kb64, 2026-03-01, commit 0123abc)" in str(found)
    (line,) = (line for line in str(found).splitlines() if line.strip().startswith(newest.rung) and ";" in line)
    assert line.endswith(f"recorded {newest.ms_p50:.3g} ms")
    assert f"recorded {newest.ms_p50:.3g} ms" in found._repr_html_()


def test_rows_of_frozen_weights_say_so_and_count_where_there_are_no_others(data):
    frozen = row("kb64", weights="frozen", time="2026-03-01T00:00:00Z")
    swept = row(workloads.at_length(workloads.get("kb64"), 65536, 64), slower=3.0, time="2026-02-01T00:00:00Z")
    rows.append(data / "a.csv", [frozen])
    assert " ms, weights frozen, " in str(explain("kb64", precision="ieee", device=H200, data=data))
    rows.append(data / "b.csv", [swept])
    found = explain("kb64", precision="ieee", device=H200, data=data)
    assert found.recorded_ms == pytest.approx(swept.ms_p50, rel=1e-5)
    assert "weights frozen" not in str(found)


def test_dtypes_without_a_choice_have_rows_under_their_own_name(data):
    made = replace(row("kb64", "k6_wgmma"), dtype="bfloat16", precision="bfloat16")
    rows.append(data / "a.csv", [made])
    assert recorded(data, "kb64", dtype=torch.bfloat16, precision=None).keys() == {"k6_wgmma"}


def test_without_rows_it_says_so(data):
    found = explain("kb64", device=H200, data=data)
    assert found.recorded_ms is found.recorded_roofline is None
    assert "recorded   no rows: they are in a checkout of the repository" in str(found)
    data.mkdir()
    assert "no row on NVIDIA H200" in str(explain("kb64", device=H200, data=data))


# Arguments that can be explained


def test_a_layer_is_explained_by_its_sizes():
    sizes = dict(stride=4, padding=2, output_padding=1, groups=2, dilation=3)
    layer = nn.ConvTranspose1d(64, 32, 8, **sizes, dtype=torch.bfloat16)
    problem = Problem(4, 64, 32, 8, 1000, **sizes, bias=True)
    for one in (layer, parametrizations.weight_norm(layer)):
        found = explain(one, (4, 64, 1000), device=H200)
        assert (found.problem, found.dtype) == (problem, torch.bfloat16)
        assert explain(one, (64, 1000), dtype=torch.float32, device=H200).problem == replace(problem, batch=1)
    assert not explain(nn.ConvTranspose1d(4, 4, 3, bias=False), (4, 9), device=H200).problem.bias


def test_our_layers_choices_count():
    layer = numba_tconv.ConvTranspose1d(64, 32, 8, stride=4, variant="k5_mma", precision="tf32x3")
    found = explain(layer, (4, 64, 1000), device=H200)
    assert (found.taken.rung, found.precision) == ("k5_mma", "tf32x3")
    assert candidate_of(found, "k6_wgmma").refusal == "variant is k5_mma"
    assert explain(layer, (4, 64, 1000), precision="tf32", device=H200).precision == "tf32"
    with pytest.raises(NotImplementedError, match=r"k5_mma cannot do .*: it multiplies on tensor cores"):
        explain(layer, (4, 64, 1000), precision="ieee", device=H200)


MISTAKES = {
    "workload": (("kb65",), {}, ValueError, "did you mean kb64"),
    "type": ((nn.Conv1d(1, 1, 1),), {}, TypeError, "not Conv1d"),
    "lazy": ((nn.LazyConvTranspose1d(4, 3), (1, 4, 9)), {}, ValueError, "a lazy layer has no sizes"),
    "no shape": ((nn.ConvTranspose1d(4, 4, 3),), {}, ValueError, "a layer needs input_shape"),
    "too much shape": (("kb64", (1, 2, 3)), {}, ValueError, "input_shape is for a layer"),
    "channels": ((nn.ConvTranspose1d(4, 4, 3), (1, 5, 9)), {}, RuntimeError, r"must be \(N, 4, L\)"),
    "rank": ((nn.ConvTranspose1d(4, 4, 3), (9,)), {}, RuntimeError, r"must be \(N, 4, L\)"),
    "length": ((nn.ConvTranspose1d(4, 4, 3), (1, 4, 0)), {}, RuntimeError, "length must be positive"),
    "output_padding": (
        (nn.ConvTranspose1d(4, 4, 3, stride=2, padding=1, output_padding=2), (1, 4, 9)),
        {},
        RuntimeError,
        "output_padding must be smaller than the larger of stride and dilation",
    ),
    "dtype": (("kb64",), dict(dtype=torch.int32), ValueError, r"dtype must be one of torch\.float64"),
    "variant": (("kb64",), dict(variant="k9"), ValueError, "unknown variant 'k9'"),
    "precision": (("kb64",), dict(precision="tf31"), ValueError, "torch.float32 has ieee, tf32, tf32x3"),
    "precision of a dtype": (("kb64",), dict(dtype=torch.float16, precision="tf32"), ValueError, "has fp16"),
    "device": (("kb64",), dict(device="cpu"), ValueError, "device must be a GPU"),
    "no device": (
        ("kb64",),
        dict(device="H300"),
        ValueError,
        "device must be a GPU, as torch has it, or one of .*A100",
    ),
    "index": (("kb64",), dict(device=-1), ValueError, "device must be a GPU"),
    "no such GPU": (("kb64",), dict(device=99), ValueError, "torch sees"),
    "empty": ((Problem(0, 1, 1, 1, 5),), {}, ValueError, "has no outputs"),
    "no outputs": ((Problem(1, 1, 1, 1, 2, padding=1),), {}, ValueError, "has no outputs"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what):
    arguments, options, kind, said = MISTAKES[what]
    with pytest.raises(kind, match=said):
        explain(*arguments, **options)


def test_a_layer_that_refuses_to_compute_is_refused():
    layer = nn.ConvTranspose1d(4, 4, 3)
    layer.padding_mode = "reflect"
    with pytest.raises(ValueError, match="padding_mode must be 'zeros'"):
        explain(layer, (1, 4, 9))


# Text and picture


def test_the_text_tells_taps_and_phases():
    text = str(explain(replace(STRIDED, kernel_size=3, dilation=2), device=H200))
    assert "4 phases; output o has phase (o + 2) mod 4 and is in column j = (o + 2) div 4" in text
    assert re.search(r"^  0: tap 0 reads x\[j\], tap 2 reads x\[j - 1\]$", text, re.MULTILINE)
    assert re.search(r"^  1: bias alone$", text, re.MULTILINE)
    assert re.search(r"^  2: tap 1 reads x\[j\]$", text, re.MULTILINE)
    long = str(explain(Problem(1, 8, 8, 100, 64, stride=10), device=H200))
    assert re.search(r"^  0: tap 0 .* tap 70 reads x\[j - 7\], 2 more$", long, re.MULTILINE)
    assert re.search(r"^  and 2 more$", long, re.MULTILINE)


def cells(problem):
    """The picture's boxes as (column's x, line's y, text, colour)."""
    root = xml.fromstring(picture(problem))
    boxes, texts = ([one for one in root if one.tag.endswith(kind)] for kind in ("rect", "text"))
    inside = [one for one in texts if one.get("fill") == "#111111"]
    assert len(inside) == len(boxes)
    for box, text in zip(boxes, inside, strict=True):
        for axis, size in (("x", "width"), ("y", "height")):
            begin = float(box.get(axis))
            assert begin < float(text.get(axis)) < begin + float(box.get(size))
    return [(float(b.get("x")), float(b.get("y")), t.text, b.get("fill")) for b, t in zip(boxes, inside, strict=True)]


def test_the_picture_shows_every_tap_below_the_input_it_reads():
    problem = Problem(1, 1, 1, 5, 9, stride=4, padding=1, dilation=2)
    taps = problem.taps
    drawn = {text: (x, y, colour) for x, y, text, colour in cells(problem)}
    columns, lines = ({drawn[f"tap {k}"][axis] for k in range(5)} for axis in (0, 1))
    assert [sorted(columns).index(drawn[f"tap {k}"][0]) for k in range(5)] == [taps.shift(k) for k in range(5)]
    assert len(lines) == 2
    for o in range(5):
        phase = (o + 1) % 4
        own = taps.of_phase(phase)
        assert drawn[f"y[{o}]"][2] == (drawn[f"tap {own[0]}"][2] if own else EMPTY)
    assert len({drawn[f"tap {k}"][2] for k in range(5)}) == 2
    assert sum(text == "bias" for *_, text, _ in cells(problem)) == 2


def test_the_picture_counts_what_there_is_no_room_for():
    problem = Problem(1, 1, 1, 400, 9, stride=20)
    text = picture(problem)
    assert "12 more" in text
    assert "8 more" in text
    assert {colour for *_, name, colour in cells(problem) if name in ("y[8]", "y[12]")} == {OTHER}
    assert "y[2]" not in picture(Problem(1, 1, 1, 2, 1))
    beyond = Problem(1, 1, 1, 2, 9, stride=2, dilation=25)  # tap 1, of phase 1, reads x[j - 12]
    assert [name for *_, name, _ in cells(beyond)][:2] == ["tap 0", "y[0]"]


def test_jupyter_gets_the_picture_and_text_without_markup():
    unrecorded = replace(workloads.get("kb64").problem, length=65_533)
    found = replace(explain(unrecorded, precision="tf32", device=H200), gpu="<GPU>")
    root = xml.fromstring(found._repr_html_())
    assert [one.tag for one in root.iter() if one.tag.endswith("svg")]
    words = " ".join("".join(one.itertext()) for one in root.iter("td"))
    assert RUNGS["k6_wgmma"].idea in words
    assert "no row on <GPU>" in words
    assert "<GPU>" in root[0][0].text


def test_gpus_are_known_by_torchs_names(monkeypatch):
    """As if there were two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100"].__getitem__)
    monkeypatch.setattr(devices, "of", [A100, H200].__getitem__)
    for device, name, rung in ((None, "NVIDIA H100", "k6_wgmma"), (0, "NVIDIA A100-SXM4-80GB", "k5_mma")):
        found = explain("kb64", precision="tf32", device=device)
        assert (found.gpu, found.taken.rung, found.recorded_ms) == (name, rung, None)
    assert explain("kb64", device="cuda").gpu == explain("kb64", device=torch.device("cuda:1")).gpu == "NVIDIA H100"
    with pytest.raises(ValueError, match="torch sees 2 GPUs, and 'cuda:2' is none of them"):
        explain("kb64", device=2)


@pytest.mark.parametrize("name", devices.GPUS)
def test_a_gpu_is_known_by_its_name(name):
    found, expected = (explain("small", device=device) for device in (name, devices.GPUS[name]))
    assert str(found) == str(expected)
    assert name in str(found)


@pytest.mark.gpu
def test_the_gpu_is_the_current_one():
    found = explain("kb64")
    assert found.gpu == torch.cuda.get_device_name() == explain("kb64", device="cuda:0").gpu
    assert found.device.cc == torch.cuda.get_device_capability()


def test_joined_signals_are_named():
    short = Problem(32, 512, 256, 16, 32, stride=8, padding=4)
    found = explain(short, precision="tf32", device=H200)
    assert found.joint == joined(short, torch.float32, "tf32", H200)
    assert "32 signals end to end, one each 36 positions; copies take 0.0" in str(found)
    assert found.taken.config == RUNGS["k6_wgmma"].config_on(
        H200, joined(short, torch.float32, "tf32", H200).problem, torch.float32, "tf32"
    )
    for other in (
        explain(short, precision="tf32", device=H200, variant="k6_wgmma"),
        explain(short, precision="ieee", device=H200),
        explain(short, precision="tf32", device=A100),
    ):
        assert other.joint is None
        assert "end to end" not in str(other)
