"""Measurement: the conv1d formulation, the check of outputs, the choice of contestants; on a GPU, the whole of it."""

import math

import pytest
import torch

from numba_tconv import bench, expert, workloads
from numba_tconv.kernels import RUNGS
from numba_tconv.kernels.device import A100, H200
from numba_tconv.kernels.rung import Rung
from numba_tconv.problem import Problem
from numba_tconv.workloads import Workload

FORMULATION = {
    "stride 1": Problem(2, 3, 5, 4, 11, bias=True),
    "stride 1, padding": Problem(2, 3, 5, 4, 11, padding=2),
    "stride 1, padding beyond the kernel": Problem(1, 3, 2, 3, 11, padding=4),
    "stride 1, dilation": Problem(1, 3, 2, 5, 9, dilation=3, padding=1, bias=True),
    "stride 1, output_padding": Problem(1, 3, 2, 5, 9, dilation=3, padding=1, output_padding=2),
    "stride 1, groups": Problem(2, 6, 4, 3, 7, groups=2, padding=1, bias=True),
    "K = s": Problem(1, 4, 6, 3, 8, stride=3, bias=True),
    "K = 2s": Problem(2, 4, 6, 8, 8, stride=4, padding=2, bias=True),
    "K = 3s, groups": Problem(2, 6, 9, 6, 5, stride=2, padding=3, groups=3, bias=True),
    "depthwise": Problem(2, 5, 5, 4, 9, stride=2, padding=1, groups=5),
    "output_padding within the padding": Problem(1, 3, 2, 4, 6, stride=2, padding=1, output_padding=1),
    "output_padding beyond the padding": Problem(1, 3, 2, 8, 6, stride=4, padding=1, output_padding=3, bias=True),
    "padding beyond the kernel": Problem(1, 2, 2, 4, 9, stride=2, padding=5),
    "one sample": Problem(1, 1, 1, 2, 1, stride=2),
}


@pytest.mark.parametrize("reason", FORMULATION)
def test_the_conv1d_formulation_is_the_same_function(reason):
    p = FORMULATION[reason]
    assert expert.applies(p)
    x, weight, bias = bench.make_inputs(Workload("", p, "", ""), torch.float64, "cpu")
    y = expert.run(x, expert.pack(weight, p), expert.pack_bias(bias, p), p)
    torch.testing.assert_close(y, bench.torch_result(x, weight, bias, p))


def test_where_the_formulation_does_not_apply():
    assert not expert.applies(Problem(1, 1, 1, 3, 8, stride=2))
    assert not expert.applies(Problem(1, 1, 1, 4, 8, stride=2, dilation=3))
    assert not expert.applies(workloads.get("kb79").problem)


def test_inputs_are_reproducible_and_an_expanded_weight_is_a_view():
    p = Problem(1, 8, 8, 4, 5, stride=2, groups=8)
    first, second = (bench.make_inputs(Workload("", p, "", "", True), torch.float32, "cpu") for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[1].shape == (8, 1, 4)
    assert first[1].stride(0) == 0


PROBLEM = Problem(3, 4, 5, 4, 50, stride=2, padding=1, bias=True)


@pytest.fixture
def measured(monkeypatch):
    """Inputs, torch's output, and the error of any output, with one sample at a time held against float64."""
    monkeypatch.setattr(bench, "ORACLE_ELEMENTS", 1)
    x, weight, bias = bench.make_inputs(Workload("", PROBLEM, "", ""), torch.float32, "cpu")
    y = bench.torch_result(x, weight, bias, PROBLEM)
    return y, lambda output: bench.errors({"": output}, x, weight, bias, PROBLEM)[""]


def test_errors_are_relative_to_float64(measured):
    y, error = measured
    assert 0 < error(y).norm < 1e-6
    doubled = error(2 * y)
    assert doubled.norm == pytest.approx(1, rel=1e-5)
    assert doubled.largest == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 2, 3), (2, 4, -1)])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
def test_one_wrong_element_is_found(measured, where, value):
    y, error = measured
    wrong = y.clone()
    wrong[where] = wrong[where] + value
    assert error(y).within(error(y), torch.float32, "ieee", PROBLEM)
    assert not error(wrong).within(error(y), torch.float32, "ieee", PROBLEM)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_within_is_twice_torchs_error_and_no_more(precision):
    def within(norm, largest):
        return bench.Error(norm, largest).within(bench.Error(1e-6, 2e-6), torch.float32, precision, PROBLEM)

    assert within(2e-6, 4e-6)
    assert not within(2.1e-6, 1e-6)
    assert not within(1e-6, 4.1e-6)
    assert not within(math.nan, math.nan)


def test_tf32_is_held_against_torchs_tf32_or_where_torch_has_not_used_it_against_a_bound():
    def within(norm, largest, of_torch):
        return bench.Error(norm, largest).within(bench.Error(of_torch, of_torch), torch.float32, "tf32", PROBLEM)

    assert within(6e-4, 6e-4, of_torch=3e-4)
    assert not within(6.1e-4, 1e-4, of_torch=3e-4)
    assert within(4e-4, 6e-4, of_torch=2e-7)
    assert not within(4.1e-4, 4e-4, of_torch=2e-7)
    assert not within(3e-4, 6.1e-4, of_torch=2e-7)
    assert not within(math.nan, math.nan, of_torch=2e-7)


def test_only_float64_is_allowed_the_rounding_of_its_sums():
    """PROBLEM sums 4 channels of 2 taps, so the sums are rounded by about sqrt(8) spacings."""
    exact = bench.Error(0.0, 0.0)
    for dtype, spacings in ((torch.float64, math.sqrt(8)), (torch.float32, 1)):
        edge = spacings * torch.finfo(dtype).eps
        assert bench.Error(0.99 * edge, 0.99 * edge).within(exact, dtype, "ieee", PROBLEM)
        assert not bench.Error(1.01 * edge, 0.0).within(exact, dtype, "ieee", PROBLEM)
        assert not bench.Error(0.0, 1.01 * edge).within(exact, dtype, "ieee", PROBLEM)


def test_an_empty_batch_has_no_error():
    p = Problem(0, 2, 3, 4, 5)
    x, weight, bias = bench.make_inputs(Workload("", p, "", ""), torch.float32, "cpu")
    assert bench.errors({"": bench.torch_result(x, weight, bias, p)}, x, weight, bias, p)[""] == bench.Error(0, 0)


@pytest.mark.parametrize("tf32", [True, False])
def test_switches_are_put_back(tf32):
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    with pytest.raises(KeyError), bench.torch_switches(tf32):  # noqa: PT012
        assert (cudnn.benchmark, cudnn.allow_tf32) == (True, tf32)
        raise KeyError
    assert (cudnn.benchmark, cudnn.allow_tf32) == before


@pytest.mark.parametrize("precision", bench.PRECISIONS[torch.float32])
@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
def test_all_means_every_rung_that_can_and_the_selection(precision, device):
    p = workloads.get("kb64").problem
    names, left_out = bench.rungs_for(["all"], p, torch.float32, precision, device)
    able = [name for name, rung in RUNGS.items() if rung.refusal(p, torch.float32, precision, device) is None]
    assert names == ([*able, "auto"] if able else ["cudnn"])
    assert [line.split()[0] for line in left_out] == [name for name in RUNGS if name not in able]


def test_where_no_rung_computes_torch_is_recorded():
    class Unable(Rung):
        def supports(self, *_):
            return "it only pretends"

    p = workloads.get("kb64").problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "RUNGS", {"k0": Unable()})
        names, left_out = bench.rungs_for(["all"], p, torch.float32, "tf32")
        assert names == ["cudnn"]
        assert left_out == [f"k0 cannot do {p} in tf32: it only pretends"]
        with pytest.raises(NotImplementedError, match=r"k0 cannot do .*: it only pretends"):
            bench.rungs_for(["k0"], p, torch.float32, "tf32")
        with pytest.raises(NotImplementedError, match=r"no rung can do .* in tf32"):
            bench.rungs_for(["auto"], p, torch.float32, "tf32")


def test_a_row_in_tf32x3_was_computed_in_it():
    """The public function computes a depthwise problem in "ieee" instead: no contestant in "tf32x3"."""
    p = workloads.get("depthwise").problem
    assert bench.rungs_for(["all"], p, torch.float32, "tf32x3", H200)[0] == ["cudnn"]
    with pytest.raises(NotImplementedError, match=r"no rung can do .* in tf32x3"):
        bench.rungs_for(["auto"], p, torch.float32, "tf32x3", H200)


def test_an_unknown_rung_is_answered_with_the_names():
    with pytest.raises(ValueError, match=r"'k9'.*k1_gather.*auto, cudnn, all"):
        bench.rungs_for(["k1_gather", "k9"], PROBLEM, torch.float32, "ieee")


def test_slow_contestants_sit_out_rounds(monkeypatch):
    calls = []

    def call(contestant, _):
        calls.append(contestant)
        contestant.events.append(contestant)

    class Timed(bench.Contestant):
        def times(self):
            return [self.ms for _ in self.events]

    fast, medium, slow = (Timed(call=None) for _ in range(3))
    fast.ms, medium.ms, slow.ms = 1, 100, 1000
    monkeypatch.setattr(bench, "timed_call", call)
    monkeypatch.setattr(bench, "Flush", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench.interleave([fast, medium, slow], repeats=30, budget_s=1.0, label="")
    assert [len(one.events) for one in (fast, medium, slow)] == [30, 10, 5]
    after_warm_up = calls[3 * bench.WARMUP_CALLS :]
    assert after_warm_up[:4] == [fast, medium, slow, fast]


def test_powers_of_two():
    assert bench.powers_of_two(1000, 4096) == [1024, 2048, 4096]
    assert bench.powers_of_two(5, 7) == []


SMALL = Workload("small test", Problem(4, 16, 24, 4, 1000, stride=2, padding=1, bias=True), "", "")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), [(d, p) for d, known in bench.PRECISIONS.items() for p in known])
def test_a_row_for_every_rung_from_one_run(dtype, precision):
    names, _ = bench.rungs_for(["all"], SMALL.problem, dtype, precision)
    rows = bench.measure(SMALL, names, dtype, precision, repeats=6, budget_s=0.1)
    assert [row.rung for row in rows] == names
    for row in rows:
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        assert row.cudnn_ms_p50 == rows[0].cudnn_ms_p50 > 0
        assert row.conv1d_ms_p50 > 0
        assert row.gpu == torch.cuda.get_device_name()
        assert row.gbps == pytest.approx(SMALL.problem.min_bytes(dtype.itemsize) / row.ms_p50 / 1e6)
        assert row.roofline is None or 0 < row.roofline < 1.1


@pytest.mark.gpu
def test_torchs_tf32_is_recorded_under_its_name():
    (row,) = bench.measure(SMALL, ["cudnn"], torch.float32, "tf32", repeats=6, budget_s=0.1)
    assert (row.rung, row.precision, row.ms_p50) == ("cudnn", "tf32", row.cudnn_ms_p50)


@pytest.mark.gpu
def test_no_row_comes_of_a_kernel_that_leaves_an_output_out(monkeypatch):
    class Forgetful(Rung):
        def supports(self, *_):
            return None

        def run(self, x, w, bias, y, p, config=None, precision=None):
            y[..., :-1] = bench.torch_result(x, w, bias, p)[..., :-1]

    monkeypatch.setitem(bench.RUNGS, "forgetful", Forgetful())
    with pytest.raises(bench.WrongResult, match=r"forgetful \(error norm nan") as caught:
        bench.measure(SMALL, ["k2_polyphase", "forgetful"], repeats=5, budget_s=0.1)
    assert [row.rung for row in caught.value.rows] == ["k2_polyphase"]


@pytest.mark.gpu
def test_the_output_of_the_public_function_lies_where_nan_was(monkeypatch):
    """The poison reaches what the selection returns: a function that writes nothing is caught."""
    shape = (4, 24, SMALL.problem.out_length)
    monkeypatch.setattr(bench, "conv_transpose1d", lambda x, *_, **__: torch.empty(shape, device=x.device))
    with pytest.raises(bench.WrongResult, match=r"auto \(error norm nan"):
        bench.measure(SMALL, ["auto"], repeats=5, budget_s=0.1)
