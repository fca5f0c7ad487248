"""Which rung computes an unnamed call: by problem, GPU and precision."""

import time
from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.rung import Rung
from numba_tconv.lab.measure import workloads
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import A100, H200, Device
from numba_tconv.selection.forward import arithmetic, select
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import operators as ops

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores to select")

TURING = Device((7, 5), 68, 64 * 1024)
BLACKWELL = Device((10, 0), 148, 228 * 1024)
KB64, SMALL = workloads.get("kb64").problem, workloads.get("small").problem
TINY = replace(SMALL, in_channels=16)
FOUR_A_GROUP = Problem(4, 64, 64, 8, 10_000, 4, groups=16)
# The tensor-core rung of each GPU.
HIGHEST = {H200: "k6_wgmma", A100: "k5_mma", BLACKWELL: "k5_mma"}
devices = pytest.mark.parametrize("device", HIGHEST, ids=lambda device: f"cc {device.cc}")
tensor_arithmetic = pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float32, "tf32"), (torch.float32, "tf32x3"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")],
)


def name(problem, dtype, precision, device):
    rung = select(problem, dtype, precision, device)
    return rung and rung.name


def test_rungs_say_which_gpus_have_their_instructions():
    assert RUNGS["k6_wgmma"].runs_on(H200) is None
    for device, cc in ((A100, "8.0"), (BLACKWELL, "10.0")):
        assert RUNGS["k6_wgmma"].runs_on(device) == f"it needs a GPU of compute capability 9.0, not {cc}"
    least = "it needs a GPU of compute capability 8.0 or above, not 7.5"
    for rung in RUNGS.values():
        lowly = rung.name in ("k1_gather", "k2_polyphase", "k3_shared_tile", "depthwise", "k6_wgmma")
        assert lowly or rung.runs_on(TURING) == least


def test_k3_takes_what_just_fits_in_shared_memory():
    fits, k3 = Problem(1, 2, 16, 573, 100, stride=2, dilation=3), RUNGS["k3_shared_tile"]
    assert k3.supports(fits, torch.float32, "ieee") is None
    larger = k3.supports(replace(fits, kernel_size=574), torch.float32, "ieee")
    assert larger == "2 input channels need 49232 bytes of shared memory, of 49152"


def test_a_rung_refuses_for_the_problem_first_and_then_for_the_gpu():
    class Picky(Rung):
        exact_cc = (9, 0)

        def supports(self, problem, dtype, precision):
            return "it is too large" if problem.flops > 1000 else None

    assert Picky().refusal(KB64, torch.float32, "ieee", A100) == "it is too large"
    assert Picky().refusal(Problem(1, 1, 1, 1, 1), torch.float32, "ieee", A100).startswith("it needs a GPU")
    assert Picky().refusal(Problem(1, 1, 1, 1, 1), torch.float32, "ieee", H200) is None


@devices
@tensor_arithmetic
def test_tensor_cores_where_there_are_some(device, dtype, precision):
    assert name(KB64, dtype, precision, device) == HIGHEST[device]
    assert ops._plan(KB64, dtype, "", precision, device) == (RUNGS[HIGHEST[device]], precision)


DEPTHWISE = workloads.get("depthwise").problem


@pytest.mark.parametrize("problem", [KB64, SMALL, workloads.get("dac_u1").problem], ids=str)
def test_below_8_0_dense_layers_are_torchs(problem):
    """In every arithmetic and by every name but tensor cores'."""
    asked = [(torch.float16, "fp16"), (torch.float64, "fp64")]
    asked = [(problem, *one) for one in [*asked, *((torch.float32, p) for p in ("ieee", "tf32x3", TF32_ALLOWED))]]
    asked = [one for one in asked if name(one[0], one[1], one[2], TURING) != "k2_polyphase"]  # a small sum in float64
    assert len(asked) >= 4
    for one in asked:
        rung, precision = ops._plan(*one[:2], "", one[2], TURING)
        assert rung is None
        assert precision in ("fp16", "fp64", "ieee")
        for of in ("grad_input", "grad_weight"):
            assert ops.gradient_precision(of, *one, TURING) is None
    with pytest.raises(NotImplementedError, match=r"8\.0 or above"):
        ops._plan(problem, torch.float32, "", "tf32", TURING)
    assert ops._plan(problem, torch.float32, "k3_shared_tile", "ieee", TURING)[0] is RUNGS["k3_shared_tile"]


def test_bfloat16_needs_8_0():
    """8.0 first converts to bfloat16: below, a named rung refuses, and torch computes the rest."""
    why = "bfloat16 needs a GPU of compute capability 8.0 or above, not 7.5"
    for problem in (KB64, DEPTHWISE, TINY):
        assert ops._plan(problem, torch.bfloat16, "", "bf16", TURING) == (None, "bf16")
        for of in ("grad_input", "grad_weight", "grad_bias"):
            assert ops.gradient_precision(of, problem, torch.bfloat16, "bf16", TURING) is None
    for rung in (*RUNGS.values(), *GRADIENTS.values()):
        assert rung.refusal(DEPTHWISE, torch.bfloat16, "bf16", TURING)
        assert why not in str(rung.refusal(DEPTHWISE, torch.bfloat16, "bf16", A100))
    with pytest.raises(NotImplementedError, match=f"k1_gather cannot do .*: {why}"):
        ops._plan(KB64, torch.bfloat16, "k1_gather", "bf16", TURING)


def test_what_is_torchs_is_computed_by_torch(monkeypatch):
    """The result is contiguous for all strides; without a sample it is empty."""
    monkeypatch.setattr(ops.device, "of", lambda _: TURING)
    for function in (ops.ready, ops.ready_input, ops.ready_weight):
        function.cache_clear()
    p = Problem(2, 24, 32, 8, 3000, 4, 2, groups=1, bias=True)
    assert select(p, torch.float32, "ieee", TURING) is None
    x, w, b = torch.randn(2, 24, 3000), torch.randn(32, 24, 8).transpose(0, 1), torch.randn(32)
    parameters = (4, 2, 0, 1, 1)
    y = ops._cuda(x, w, b, *parameters, "", "ieee")
    assert torch.equal(y, torch.conv_transpose1d(x, w, b, *parameters))
    assert y.is_contiguous()
    assert ops._cuda(x[..., :1], w[..., :2], b, 4, 1, 0, 1, 1, "", "ieee").shape == (2, 32, 0)
    for function in (ops.ready, ops.ready_input, ops.ready_weight):
        function.cache_clear()


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "ieee"), (torch.float16, "fp16")])
def test_special_problems_have_their_own_rungs(dtype, precision):
    assert name(TINY, dtype, precision, H200) == "k2_polyphase"
    for problem in (workloads.get("depthwise").problem, FOUR_A_GROUP):
        assert name(problem, dtype, precision, H200) == "depthwise"


def test_small_problems_of_longer_sums_are_worth_packed_weights():
    assert name(SMALL, torch.float32, "ieee", H200) == "k4_register_tile"
    assert name(SMALL, torch.float64, "fp64", H200) == "k2_polyphase"  # others pack weights in every call
    for device in (H200, A100):
        assert name(SMALL, torch.bfloat16, "bf16", device) == HIGHEST[device]
        assert ops._plan(SMALL, torch.float32, "", TF32_ALLOWED, device)[1] == "tf32"


def test_few_channels_go_to_tensor_cores_where_their_sums_are_long():
    problem = workloads.get("pqmf").problem
    for device, dtype in ((H200, torch.bfloat16), (A100, torch.bfloat16), (TURING, torch.float16)):
        assert name(problem, dtype, {torch.float16: "fp16"}.get(dtype, "bf16"), device) == "depthwise"
    assert name(problem, torch.float32, "tf32", H200) == "k5_mma"
    long = replace(problem, kernel_size=512)
    assert name(long, torch.bfloat16, "bf16", H200) == "k6_wgmma"
    assert name(long, torch.float16, "fp16", TURING) == "depthwise"


@tensor_arithmetic
def test_warpgroups_are_for_large_tiles(dtype, precision):
    for problem in (KB64, workloads.get("head").problem):
        assert name(problem, dtype, precision, H200) == "k6_wgmma"
    short_sums = replace(workloads.get("demucs_out").problem, in_channels=16, out_channels=2)
    assert RUNGS["k6_wgmma"].refusal(short_sums, dtype, precision, H200) is None
    assert name(short_sums, dtype, precision, H200) == "k5_mma"


@tensor_arithmetic
def test_warpgroups_are_for_parts_of_many_phases(dtype, precision):
    for problem in (workloads.get(which).problem for which in ("istft", "waveglow")):
        for length in (problem.length, 20):
            assert name(replace(problem, length=length), dtype, precision, H200) == "k6_wgmma"


def test_a_rung_that_is_not_meant_for_a_problem_computes_it_if_no_other_can(monkeypatch):
    monkeypatch.setattr(type(RUNGS["k5_mma"]), "supports", lambda *_: "not today")
    assert name(workloads.get("convtasnet").problem, torch.float32, "tf32", H200) == "k6_wgmma"


def test_tf32_by_name_is_never_replaced():
    assert name(TINY, torch.float32, "tf32", H200) == "k6_wgmma"
    assert name(FOUR_A_GROUP, torch.float32, "tf32", H200) is None
    with pytest.raises(
        NotImplementedError, match=r"k6_wgmma cannot do .*: it needs 8 channels a group, not 4"
    ) as error:
        ops._plan(FOUR_A_GROUP, torch.float32, "", "tf32", H200)
    assert all(f"{rung} cannot do" in str(error.value) for rung in RUNGS)


def test_a_permission_to_use_tf32_is_used_where_a_rung_gains_by_it():
    def plan(problem, variant="", device=H200):
        rung, precision = ops._plan(problem, torch.float32, variant, TF32_ALLOWED, device)
        return rung and rung.name, precision

    assert plan(KB64) == ("k6_wgmma", "tf32")
    assert plan(KB64, "k6_wgmma") == ("k6_wgmma", "tf32")
    assert plan(KB64, "k4_register_tile") == ("k4_register_tile", "ieee")
    assert plan(KB64, device=TURING) == (None, "ieee")  # torch's own operator
    assert plan(TINY) == ("k2_polyphase", "ieee")
    assert plan(FOUR_A_GROUP) == ("depthwise", "ieee")
    assert plan(workloads.get("pqmf").problem) == ("depthwise", "ieee")


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_a_precision_that_is_named_stays(precision):
    for variant in ("", *RUNGS):
        assert arithmetic(KB64, torch.float32, variant, precision, H200) == precision


def few_inputs(channels, groups=1):
    """This many input channels a group, and work for tensor cores."""
    return Problem(16, groups * channels, groups * 64, 8, 65_536, 4, groups=groups)


@devices
def test_tf32x3_needs_eight_input_channels_a_group(device):
    """In short sums tensor cores' errors exceed twice torch's; TF32's own are far larger."""

    def refusal(channels, precision="tf32x3", groups=1):
        return RUNGS[HIGHEST[device]].refusal(few_inputs(channels, groups), torch.float32, precision, device)

    for channels in (1, 3, 7):
        assert refusal(channels).startswith(f"in tf32x3 it needs 8 input channels a group, not {channels}: ")
        assert refusal(channels, groups=2)
        assert refusal(channels, "tf32") is None
    assert refusal(8) is refusal(8, groups=2) is None


@pytest.mark.parametrize(
    ("problem", "device", "rung"),
    [
        (few_inputs(7), H200, "k4_register_tile"),
        (few_inputs(7), A100, "k4_register_tile"),
        (FOUR_A_GROUP, H200, "depthwise"),
        (workloads.get("depthwise").problem, H200, "depthwise"),
        (Problem(16, 64, 64, 3, 4096, 256, dilation=512), H200, "k4_register_tile"),  # no tile
        (KB64, TURING, None),  # torch's own operator
    ],
    ids=str,
)
def test_tf32x3_is_ieee_where_no_rung_takes_it(problem, device, rung):
    assert ops._plan(problem, torch.float32, "", "tf32x3", device) == (RUNGS.get(rung), "ieee")
    for name, one in RUNGS.items():
        with pytest.raises(NotImplementedError) as error:
            ops._plan(problem, torch.float32, name, "tf32x3", device)
        why = one.refusal(problem, torch.float32, "tf32x3", device)
        assert str(error.value) == f"{name} cannot do {problem}: {why}"


@devices
def test_small_problems_stay_in_tf32x3(device):
    assert ops._plan(TINY, torch.float32, "", "tf32x3", device) == (RUNGS[HIGHEST[device]], "tf32x3")


def test_a_variant_that_the_gpu_cannot_run_is_refused_with_what_it_needs():
    with pytest.raises(NotImplementedError) as refusal:
        ops._plan(KB64, torch.float32, "k6_wgmma", "tf32", A100)
    assert str(refusal.value) == f"k6_wgmma cannot do {KB64}: it needs a GPU of compute capability 9.0, not 8.0"


def test_a_plan_is_remembered_for_each_gpu():
    ops._plan.cache_clear()
    for device in (H200, A100, H200, A100):
        ops._plan(KB64, torch.float32, "", "ieee", device)
    assert ops._plan.cache_info()[:2] == (2, 2)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")], ids=str)
@pytest.mark.parametrize("workload", ["kb74", "kb79"])
def test_the_gradient_for_the_input_of_few_channels_is_for_warpgroups_too(workload, dtype, precision):
    """Its tiles have 32 rows, and rows begin anywhere: k5 would copy them by elements."""
    config = GRADIENTS["grad_input_planes"].config(workloads.get(workload).problem, dtype, H200, precision)
    assert config.rung == "k6_wgmma"


@tensor_arithmetic
@devices
def test_a_long_crop_does_not_matter(device, dtype, precision):
    whole = replace(KB64, length=200_000)
    cropped = replace(whole, padding=70_000)
    assert name(cropped, dtype, precision, device) == name(whole, dtype, precision, device)


def test_a_kernel_of_millions_of_taps_is_chosen_for_at_once():
    problem, begun = Problem(2, 64, 64, 2**23, 1000), time.process_time()
    assert name(problem, torch.bfloat16, "bf16", H200) == "k6_wgmma"
    assert ops.gradient_precision("grad_weight", problem, torch.bfloat16, "bf16", H200) == "bf16"
    assert time.process_time() - begun < 3
