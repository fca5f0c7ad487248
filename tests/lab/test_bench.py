"""Measurement: the choice of contestants, rows of every direction, wrong results."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung
from numba_tconv.lab.measure import bench, timing, workloads
from numba_tconv.lab.measure import contestants as named
from numba_tconv.lab.measure.accuracy import errors
from numba_tconv.lab.measure.directions import by_selection, by_torch, torch_forward
from numba_tconv.lab.measure.machine import Machine
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.runtime.device import A100, H200
from numba_tconv.selection.directions import DIRECTIONS, OF_GRADIENTS, RESULTS, STEP, results_of, rungs_of
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import gradient_operators as grad_ops


def test_inputs_are_reproducible_and_an_expanded_weight_is_a_view():
    p = Problem(1, 8, 8, 4, 5, stride=2, groups=8)
    first, second = (bench.make_inputs(Workload("", p, "", "", True), torch.float32, "cpu") for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[1].shape == (8, 1, 4)
    assert first[1].stride(0) == 0


PROBLEM = Problem(3, 4, 5, 4, 50, stride=2, padding=1, bias=True)


@pytest.mark.parametrize("tf32", [True, False])
def test_switches_are_put_back(tf32):
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    with pytest.raises(KeyError), bench.torch_switches(tf32):  # noqa: PT012
        assert (cudnn.benchmark, cudnn.allow_tf32) == (True, tf32)
        raise KeyError
    assert (cudnn.benchmark, cudnn.allow_tf32) == before


@pytest.mark.parametrize("of", ["forward", "grad_input", "grad_weight"])
@pytest.mark.parametrize("precision", bench.PRECISIONS[torch.float32])
@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
def test_all_means_every_rung_that_can_and_the_selection(precision, device, of):
    p = workloads.get("kb64").problem
    refusals = {name: rung.refusal(p, torch.float32, precision, device) for name, rung in rungs_of(of).items()}
    able = [name for name, reason in refusals.items() if reason is None]
    names, left_out = named.rungs_for(["all"], p, torch.float32, precision, device, of)
    assert names == ([*able, "auto"] if able or precision == "tf32" else ["cudnn"])
    said = {name: f"{name} cannot do {p} in {precision}: {reason}" for name, reason in refusals.items() if reason}
    assert left_out == [*said.values()]
    for name in said:
        with pytest.raises(NotImplementedError, match=f"^{re.escape(said[name])}$"):
            named.rungs_for([name], p, torch.float32, precision, device, of)


def test_a_row_in_tf32x3_was_computed_in_it():
    """A depthwise problem is computed in "ieee" instead, so it has no contestant in "tf32x3"."""
    p = workloads.get("depthwise").problem
    assert named.rungs_for(["all"], p, torch.float32, "tf32x3", H200)[0] == ["cudnn"]
    with pytest.raises(NotImplementedError, match=r"no rung can do .* in tf32x3"):
        named.rungs_for(["auto"], p, torch.float32, "tf32x3", H200)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_where_tf32_is_allowed_the_selection_may_make_no_use_of_it(direction):
    """As torch's convolutions: a depthwise problem, which no rung computes in TF32, still has an ``auto``."""
    p = workloads.get("depthwise").problem
    assert named.rungs_for(["all"], p, torch.float32, "tf32", H200, direction)[0][-1] == "auto"
    assert named.rungs_for(["auto"], p, torch.float32, "tf32", H200, direction)[0] == ["auto"]


def test_a_step_is_computed_by_the_selection_alone():
    p = workloads.get("kb64").problem
    for precision in bench.PRECISIONS[torch.float32]:
        assert named.rungs_for(["all"], p, torch.float32, precision, H200, STEP) == (["auto"], [])
    no_channels = workloads.get("depthwise").problem
    assert named.rungs_for(["all"], no_channels, torch.float32, "tf32x3", H200, STEP) == (["cudnn"], [])


@pytest.mark.parametrize(
    ("direction", "name", "said"),
    [
        ("forward", "grad_input_tile", "grad_input_tile computes grad_input, not the forward pass"),
        ("grad_input", "k1_gather", "k1_gather computes the forward pass, not grad_input"),
        ("grad_input", "grad_weight_split", "grad_weight_split computes grad_weight, not grad_input"),
        ("grad_weight", "grad_bias", "grad_bias computes grad_bias, not grad_weight"),
        ("step", "k1_gather", "k1_gather computes the forward pass, not a whole step; there are "),
        ("step", "k9", "no rung is called 'k9'"),
        ("forward", "k9", "no rung is called 'k9'; there are k1_gather, "),
    ],
)
def test_a_rung_of_another_direction_is_refused(direction, name, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}.*auto, cudnn, all$"):
        named.rungs_for([name], PROBLEM, torch.float32, "ieee", H200, direction)


def test_slow_contestants_sit_out_rounds(monkeypatch):
    calls = []

    def call(contestant, _):
        calls.append(contestant)
        contestant.events.append(contestant)

    class Timed(timing.Contestant):
        def times(self):
            return [self.ms for _ in self.events]

    fast, medium, slow = (Timed(call=None) for _ in range(3))
    fast.ms, medium.ms, slow.ms = 1, 100, 1000
    monkeypatch.setattr(timing, "timed_call", call)
    monkeypatch.setattr(timing, "Flush", lambda times: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timing.interleave([fast, medium, slow], repeats=30, budget_s=1.0, label="")
    assert [len(one.events) for one in (fast, medium, slow)] == [30, 10, 5]
    after_warm_up = calls[3 * timing.WARMUP_CALLS :]
    assert after_warm_up[:4] == [fast, medium, slow, fast]


def test_wall_times_are_taken_forwards_and_backwards(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    first, second = timing.wall_times([lambda: calls.append("first"), lambda: calls.append("second")], repeats=2)
    assert first > 0 < second
    assert calls[-4:-2] == calls[:-3:-1]
    assert {*calls[-2:]} == {"first", "second"}


TINY = Workload("tiny test", Problem(2, 4, 6, 4, 50, stride=2, padding=1, bias=True), "", "")
X, W, Y, B = 2 * 4 * 50, 4 * 6 * 4, 2 * 6 * 100, 6  # elements of the problem's tensors


class Right(Rung):
    """Stands for a rung of a result: torch computes it."""

    def __init__(self, of, operands):
        self.of, self.operands = of, operands

    def supports(self, *_):
        return None

    def run(self, *given, precision):
        *operands, result, p = given
        assert all(one is other for one, other in zip(operands, self.operands[-1].of(self.of), strict=True))
        assert result.isnan().all()
        assert precision == "ieee"
        result.copy_(bench.by_torch(self.of, self.operands[-1], p))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """``measure`` as if on an H200: medians are 1 ms, 2 ms and so on; memory moves 8 bytes a nanosecond."""
    made, make_operands = [], bench.make_operands

    def make(workload, dtype, device, gradients):
        made.append(make_operands(workload, dtype, "cpu", gradients))
        return made[-1]

    def interleave(contestants, *_):
        for ms, one in enumerate(contestants, 1):
            one.prepare()
            one.output = one.call()
            times = [ms * share for share in (0.2, 0.5, 1.0, 1.5, 9.0)]
            one.events = [(SimpleNamespace(elapsed_time=lambda _, ms=ms: ms), None) for ms in times]

    class Copy(timing.Contestant):
        def times(self):
            return [1.0]

    monkeypatch.setattr(bench, "make_operands", make)
    monkeypatch.setattr(bench, "interleave", interleave)
    monkeypatch.setattr(bench, "_copy", lambda: Copy(lambda: torch.empty(4_000_000, dtype=torch.int8)))
    for module in (bench, named):
        monkeypatch.setattr(module, "rungs_of", lambda of: {"right": Right(of, made)})
    monkeypatch.setattr(
        bench.machine, "describe", lambda: Machine("0123abc", "NVIDIA H200", "580", "2.11", "9.19", "0.30")
    )
    return made


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_of_every_direction(on_the_cpu, direction):
    rows = bench.measure(TINY, ["all", "cudnn"] if direction == "step" else ["all"], direction=direction)
    names = ["auto", "cudnn"] if direction == "step" else ["right", "auto"]
    assert [(row.rung, row.direction) for row in rows] == [(name, direction) for name in names]
    passes = 3 if direction == "step" else 1
    biases = 1 if direction in ("forward", "step") else 0
    moved = 4 * (passes * (X + W + Y) + biases * B)
    p, (operands,) = TINY.problem, on_the_cpu
    outputs = {result: {"": by_torch(result, operands, p)} for result in results_of(direction, p)}
    worst = max(errors(output, operands, p, result)[""].norm for result, output in outputs.items())
    for ms, row in enumerate(rows, 1):
        assert (row.ms_p50, row.cudnn_ms_p50) == (ms, 2 if direction == "step" else 3)
        assert (row.ms_p20, row.ms_p80) == pytest.approx((0.44 * ms, 3 * ms))
        assert (row.workload, row.length, row.dtype, row.precision) == ("tiny test", 50, "float32", "ieee")
        assert (row.gpu, row.weights) == ("NVIDIA H200", "call")
        assert row.conv1d_ms_p50 == (4 if direction == "forward" else None)
        assert row.gbps == pytest.approx(moved / ms / 1e6)
        assert row.tflops == pytest.approx(passes * 2 * 2 * 4 * 6 * 4 * 50 / ms / 1e9)
        assert row.roofline == pytest.approx(moved / 8e9 / (1e-3 * ms))
        assert (row.relerr, row.cudnn_relerr) == pytest.approx((worst, worst))


@pytest.mark.parametrize("direction", ["grad_input", "grad_weight"])
@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_no_row_comes_of_a_wrong_gradient(on_the_cpu, monkeypatch, direction, value):
    class Forgetful(Right):
        def run(self, *given, precision):
            super().run(*given, precision=precision)
            given[-2].view(-1)[-1] = value

    rungs = {"right": Right(direction, on_the_cpu), "forgetful": Forgetful(direction, on_the_cpu)}
    for module in (bench, named):
        monkeypatch.setattr(module, "rungs_of", lambda of: rungs)
    with pytest.raises(bench.WrongResult, match=rf"wrong on tiny test {direction} ieee: forgetful \(error") as caught:
        bench.measure(TINY, ["all"], direction=direction)
    assert [row.rung for row in caught.value.rows] == ["right", "auto"]


@pytest.mark.parametrize("wrong", ["forward", "grad_input", "grad_weight", "grad_bias"])
def test_every_result_of_a_step_is_checked(on_the_cpu, monkeypatch, wrong):
    def spoilt(x, weight, bias, p, precision):
        operands = {"grad_input": x, "grad_weight": weight, "grad_bias": bias}
        extra = 1e-3 * operands.get(wrong, x.detach() + 1).sum()
        return torch_forward(x, weight, bias, p) + (extra if wrong == "forward" else extra - extra.detach())

    monkeypatch.setattr(bench, "our_forward", spoilt)
    with pytest.raises(
        bench.WrongResult, match=rf"auto \({wrong}: error norm [^;]*; torch's own [^;]*; no row"
    ) as caught:
        bench.measure(TINY, ["auto", "cudnn"], direction="step")
    assert [row.rung for row in caught.value.rows] == ["cudnn"]


def test_what_is_selected_is_the_operators_of_this_package(on_the_cpu, monkeypatch):
    monkeypatch.setattr(functional, "_ours", lambda *_: True)
    monkeypatch.setattr(functional.sharding, "prepare", lambda: None)  # it would take the stand-ins for operators
    called = []

    def recorded(module, name):
        operator = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: called.append(name) or operator(*arguments))

    recorded(functional.ops, "conv_transpose1d")
    for of in OF_GRADIENTS:
        recorded(grad_ops, of)
    expected = {"forward": ["conv_transpose1d"], "step": ["conv_transpose1d", *OF_GRADIENTS]}
    for direction in DIRECTIONS:
        called.clear()
        bench.measure(TINY, ["auto"], direction=direction)
        assert called == expected.get(direction, [direction])


@pytest.mark.parametrize("result", RESULTS)
def test_what_is_selected_computes_in_the_precision_that_is_named(monkeypatch, result):
    monkeypatch.setattr(functional, "conv_transpose1d", lambda *_, precision: precision)
    for of in OF_GRADIENTS:
        monkeypatch.setattr(grad_ops, of, lambda *arguments: arguments[-1])
    operands = bench.make_operands(TINY, torch.float32, "cpu", gradients=True)
    assert by_selection(result, operands, TINY.problem, "tf32x3") == "tf32x3"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("precision", bench.PRECISIONS[torch.float32])
def test_in_tf32_the_selection_is_asked_as_by_a_call_that_names_no_precision(
    on_the_cpu, monkeypatch, direction, precision
):
    asked = []

    def recorded(module, name, of):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **named: asked.append(of(given, named)) or function(*given))

    recorded(functional, "conv_transpose1d", lambda _, named: (named["precision"], functional.torch_allows_tf32()))
    for of in OF_GRADIENTS:
        recorded(grad_ops, of, lambda given, _: given[-1])
    monkeypatch.setattr(bench, "_wrong", lambda *_: [])
    names = ["auto"] if direction == STEP or precision == "ieee" else ["auto", "cudnn"]
    bench.measure(TINY, names, torch.float32, precision, direction)
    switched = TF32_ALLOWED if precision == "tf32" else precision
    by_function = None if precision == "tf32" else precision, precision == "tf32"
    assert asked == [by_function if direction in ("forward", STEP) else switched]


def test_a_step_is_given_longer_to_be_queued(on_the_cpu, monkeypatch):
    flushes, interleave = [], bench.interleave
    monkeypatch.setattr(bench, "interleave", lambda *given: flushes.append(given[-1]) or interleave(*given))
    for direction in DIRECTIONS:
        bench.measure(TINY, ["auto"], direction=direction)
    *others, step = flushes
    assert set(others) == {timing.FLUSHES}
    assert step > timing.FLUSHES


@pytest.mark.parametrize("weights", ["call", "frozen"])
def test_frozen_weights_are_for_ours_alone_and_rows_say_so(on_the_cpu, monkeypatch, weights):
    given = []

    class Packs(Right):
        def run(self, x, weight, bias, result, p, precision):
            given.append(weight)
            super().run(x, self.operands[-1].weight, bias, result, p, precision=precision)

    for module in (bench, named):
        monkeypatch.setattr(module, "rungs_of", lambda of: {"packs": Packs(of, on_the_cpu)})
    rows = bench.measure(TINY, ["packs", "auto", "cudnn"], weights=weights)
    assert {row.rung: row.weights for row in rows} == {"packs": weights, "auto": weights, "cudnn": "call"}
    (weight,), own = given, on_the_cpu[-1].weight
    assert weight.data_ptr() == own.data_ptr()
    assert (weight is own) == (weights == "call")
    assert hasattr(weight, "packings") == (weights == "frozen")


@pytest.mark.parametrize("direction", DIRECTIONS[1:])
def test_weights_that_are_trained_cannot_be_frozen(direction):
    with pytest.raises(ValueError, match=f"frozen weights are for the forward pass, not for {direction}"):
        bench.measure(TINY, ["auto"], direction=direction, weights="frozen")
