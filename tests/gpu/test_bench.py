"""Measurement on a GPU: rows of every rung and direction, and none for a wrong result."""

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung
from numba_tconv.lab.measure import bench
from numba_tconv.lab.measure import contestants as named
from numba_tconv.lab.measure.directions import torch_forward
from numba_tconv.lab.measure.workloads import Workload
from numba_tconv.selection.directions import DIRECTIONS
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import functional
from numba_tconv.torch_api import gradient_operators as grad_ops

pytestmark = pytest.mark.gpu

SMALL = Workload("small test", Problem(4, 16, 24, 4, 1000, stride=2, padding=1, bias=True), "", "")


@pytest.mark.parametrize(("dtype", "precision"), [(d, p) for d, known in bench.PRECISIONS.items() for p in known])
def test_a_row_for_every_rung_from_one_run(dtype, precision):
    names, _ = named.rungs_for(["all"], SMALL.problem, dtype, precision)
    rows = bench.measure(SMALL, names, dtype, precision, repeats=6, budget_s=0.1)
    assert [row.rung for row in rows] == names
    for row in rows:
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        assert row.cudnn_ms_p50 == rows[0].cudnn_ms_p50 > 0
        assert row.conv1d_ms_p50 > 0
        assert row.gpu == torch.cuda.get_device_name()
        assert row.gbps == pytest.approx(SMALL.problem.min_bytes(dtype.itemsize) / row.ms_p50 / 1e6)
        assert row.roofline is None or 0 < row.roofline < 1.1


def test_torchs_tf32_is_recorded_under_its_name():
    (row,) = bench.measure(SMALL, ["cudnn"], torch.float32, "tf32", repeats=6, budget_s=0.1)
    assert (row.rung, row.precision, row.ms_p50) == ("cudnn", "tf32", row.cudnn_ms_p50)


def test_no_row_comes_of_a_kernel_that_leaves_an_output_out(monkeypatch):
    class Forgetful(Rung):
        def supports(self, *_):
            return None

        def run(self, x, w, bias, y, p, config=None, precision=None):
            y[..., :-1] = torch_forward(x, w, bias, p)[..., :-1]

    monkeypatch.setitem(RUNGS, "forgetful", Forgetful())
    with pytest.raises(bench.WrongResult, match=r"forgetful \(error norm nan") as caught:
        bench.measure(SMALL, ["k2_polyphase", "forgetful"], repeats=5, budget_s=0.1)
    assert [row.rung for row in caught.value.rows] == ["k2_polyphase"]


def test_the_output_of_the_public_function_lies_where_nan_was(monkeypatch):
    """A function that writes nothing is caught, because its output's memory held NaN."""
    shape = (4, 24, SMALL.problem.out_length)
    monkeypatch.setattr(functional, "conv_transpose1d", lambda x, *_, **__: torch.empty(shape, device=x.device))
    with pytest.raises(bench.WrongResult, match=r"auto \(error norm nan"):
        bench.measure(SMALL, ["auto"], repeats=5, budget_s=0.1)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "bf16")], ids=str
)
def test_every_direction_on_the_gpu(direction, dtype, precision):
    names, _ = named.rungs_for(["all"], SMALL.problem, dtype, precision, direction=direction)
    rows = bench.measure(SMALL, names, dtype, precision, direction, repeats=6, budget_s=0.1)
    assert [(row.rung, row.direction) for row in rows] == [(name, direction) for name in names]
    for row in rows:
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        assert row.cudnn_ms_p50 == rows[0].cudnn_ms_p50 > 0
        assert (row.conv1d_ms_p50 is not None) == (direction == "forward")
        assert row.roofline is None or 0 < row.roofline < 1.1


@pytest.mark.parametrize("of", ["grad_input", "grad_weight"])
def test_no_row_comes_of_a_gradient_that_leaves_an_element_out(monkeypatch, of):
    class Forgetful(Rung):
        def supports(self, *_):
            return None

        def run(self, *operands_result_problem, precision):
            operands_result_problem[-2].view(-1)[:-1] = 0

    forgetful = Forgetful()
    forgetful.of = of
    monkeypatch.setitem(GRADIENTS, "forgetful", forgetful)
    right = {"grad_input": "grad_input_tile", "grad_weight": "grad_weight_split"}[of]
    with pytest.raises(bench.WrongResult, match=r"forgetful \(error norm nan") as caught:
        bench.measure(SMALL, [right, "forgetful"], direction=of, repeats=5, budget_s=0.1)
    assert [row.rung for row in caught.value.rows] == [right]


@pytest.mark.parametrize("of", ["grad_input", "grad_weight"])
def test_the_result_of_an_operator_lies_where_nan_was(monkeypatch, of):
    shape = SMALL.problem.shape_of(of)
    monkeypatch.setattr(grad_ops, of, lambda g, *_: torch.empty(shape, device=g.device))
    with pytest.raises(bench.WrongResult, match=r"auto \(error norm nan"):
        bench.measure(SMALL, ["auto"], direction=of, repeats=5, budget_s=0.1)
