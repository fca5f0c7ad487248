"""Compiling ahead: the rungs launch the compiled kernels, and a first launch finds their files."""

import itertools
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from numba import types

from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import wgmma_ring as grad_ring
from numba_tconv.gradients.input.wgmma import producer as grad_input_wgmma_rows
from numba_tconv.gradients.weight.wgmma import sum as grad_weight_sum
from numba_tconv.kernels.common import split_sums
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, LARGEST_BOX
from numba_tconv.kernels.k6_wgmma import boxes as k6_box
from numba_tconv.lab.cli import commands, compile_run, named_calls
from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.measure import workloads
from numba_tconv.lab.measure.directions import Operands
from numba_tconv.runtime import cache, device
from numba_tconv.runtime import kernel as launch
from numba_tconv.runtime.device import A100, H200
from numba_tconv.runtime.elements import ELEMENTS
from numba_tconv.runtime.kernel import Kernel, Prepared
from numba_tconv.runtime.layout import layout_of
from numba_tconv.selection.directions import rungs_of
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api import compile_ahead, operators
from tests import command_line
from tests.command_line import mistake
from tests.gradient_parity import OF, as_on_a_gpu, forget_what_is_ready, operator_arguments
from tests.thorough import thorough

pytest_plugins = "tests.not_compiled"

ARITHMETICS = [(dtype, precision) for dtype, known in PRECISIONS.items() for precision in known]
# Kernels in float16 differ from those in bfloat16 by the type alone.
arithmetics = pytest.mark.parametrize(
    "arithmetic",
    [pytest.param(a, id=a[1], marks=[pytest.mark.thorough] if a[1] == "fp16" else []) for a in ARITHMETICS],
)
# Lengths that are no multiple of a vector, and of half a vector.
ODD = [Problem(2, 32, 24, 4, length, 2, 1) for length in (301, 302)]
OPERANDS = ("grad_input", "grad_weight", "forward")  # have the shapes of input, weight and grad_output
PROBLEMS = [workload.problem for workload in workloads.WORKLOADS.values()] + ODD
SEGMENTS = Problem(32, 512, 256, 16, 32, 8, 4, bias=True)  # signals that are joined
SHARES = {"all": PROBLEMS, "a third": PROBLEMS[:-2:3] + ODD}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_CACHE", str(tmp_path / "kernels"))
    # The machine's own GPU must not decide what is compiled.
    monkeypatch.setattr(compile_run, "current_device", lambda: H200)
    return tmp_path / "kernels"


def run(capsys, *argv):
    """Exit code, stdout and stderr of the command."""
    return cli.main(["compile", *map(str, argv)]), *capsys.readouterr()


def check_tensor_map(precision, sizes, distances, box, swizzled=False):
    """Replaces tensor_map.encode: checks what the driver would refuse."""
    assert len(sizes) == len(box) == len(distances) + 1
    assert not any(distance % ALIGNMENT for distance in distances)
    assert all(0 < size <= LARGEST_BOX for size in box)
    return (0,) * 16


@pytest.fixture
def launched(monkeypatch):
    """A function for the kernels that a rung's call launches, on tensors without memory, of the types compiled for."""
    kernels = []

    def note(kernel, arguments):
        kernels.append(kernel)
        for kind, value in launch._leaves(kernel.signature, arguments):
            if isinstance(kind, types.Array) and value is not launch.GIVEN:
                plain = getattr(types, str(value.dtype).removeprefix("torch."), None)
                bits = types.uint16 if value.dtype.itemsize == 2 else None  # tensor cores take them as they are
                assert kind.dtype in (plain, bits, getattr(ELEMENTS.get(value.dtype), "storage", None)), kernel.name

    monkeypatch.setattr(Kernel, "launch", lambda kernel, blocks, *arguments, **_: note(kernel, arguments))
    monkeypatch.setattr(Prepared, "__call__", lambda prepared, *_: note(prepared.kernel, prepared.arguments))
    for module in (k6_box, grad_ring, grad_input_wgmma_rows):  # the driver makes tensor maps
        monkeypatch.setattr(module, "encode", check_tensor_map)

    def of(call):
        p = call.problem
        monkeypatch.setattr(device, "of", lambda _: call.device)
        kernels.clear()
        with torch.inference_mode():  # packs weights in every call
            x, w, y = (torch.empty(p.shape_of(of), dtype=call.dtype, device="meta") for of in OPERANDS)
            if call.rung in RUNGS:
                RUNGS[call.rung].run(x, w, None, y, p, precision=call.precision)
            else:
                rung = GRADIENTS[call.rung]
                result = torch.empty(p.shape_of(rung.of), dtype=call.dtype, device="meta")
                rung.run(*Operands(x, w, None, y).of(rung.of), result, p, precision=call.precision)
        return set(kernels)

    of.kernels = kernels
    return of


@pytest.mark.parametrize("gpu", thorough([H200, A100], always=[H200]), ids=["H200", "A100"])
@arithmetics
def test_the_kernels_of_a_call_are_those_that_it_launches(launched, arithmetic, gpu):
    calls = named_calls.calls(["all"], PROBLEMS, [arithmetic], gpu)
    assert calls
    for call in calls:
        assert set(call.kernels()) == launched(call), call


@pytest.mark.parametrize("gpu", [H200, A100], ids=["H200", "A100"])
def test_sums_that_k4_splits_are_added_up_early_where_the_gpu_can(gpu):
    """Their kernel then differs; the test above asks which it is."""
    call = compile_ahead.Call("k4_register_tile", workloads.get("head").problem, torch.float32, "ieee", gpu)
    (sums,) = [kernel for kernel in call.kernels() if kernel.name == "partial_sum"]
    assert sums is split_sums.make_kernel(torch.float32, gpu == H200)


def not_launched(kernels, launched):
    """Kernels not launched, except those that add partial sums or copy an operand in rows, which the layout decides."""
    assert launched <= kernels
    return {kernel.name for kernel in kernels - launched if not kernel.name.endswith(("_sum", "row_copy"))}


@pytest.mark.parametrize("gpu", thorough([H200, A100], always=[H200]), ids=["H200", "A100"])
@pytest.mark.parametrize("problems", thorough(SHARES, always=["a third"]))
@arithmetics
def test_the_kernels_of_a_gradient_are_those_that_it_launches(launched, arithmetic, problems, gpu):
    for direction in ("grad_input", "grad_weight"):
        calls = named_calls.calls(["all"], SHARES[problems], [arithmetic], gpu, direction)
        assert {call.rung for call in calls} == able(direction, arithmetic, gpu)
        for call in calls:
            assert not not_launched(set(call.kernels()), launched(call)), call


def able(direction, arithmetic, gpu):
    """The rungs that can do one of the problems."""
    rungs = rungs_of(direction).items()
    return {name for name, rung in rungs if any(rung.refusal(p, *arithmetic, gpu) is None for p in PROBLEMS)}


@pytest.mark.parametrize("gpu", thorough([H200, A100], always=[H200]), ids=["H200", "A100"])
@arithmetics
def test_a_step_is_the_forward_pass_and_what_the_operators_of_the_gradients_launch(
    launched, monkeypatch, arithmetic, gpu
):
    dtype, precision = arithmetic
    for problem in [*PROBLEMS, SEGMENTS]:
        forward = named_calls.calls(["auto"], [problem], [arithmetic], gpu)
        step = named_calls.calls(["auto"], [problem], [arithmetic], gpu, "step")
        assert step == named_calls.calls(["all"], [problem], [arithmetic], gpu, "step")
        assert step[: len(forward)] == forward
        gradients = step[len(forward) :]
        assert [call.rung in GRADIENTS for call in gradients] == [True] * len(gradients)
        monkeypatch.setattr(device, "of", lambda _: gpu)
        forget_what_is_ready()
        launched.kernels.clear()
        with torch.inference_mode():  # packs weights in every call
            x, w, g = (torch.empty(problem.shape_of(of), dtype=dtype, device="meta") for of in OPERANDS)
            for of, asked in itertools.product(OF, (precision, TF32_ALLOWED) if precision == "tf32" else (precision,)):
                as_on_a_gpu(of, *operator_arguments(of, problem, g, x, w, asked))
        kernels = {kernel for call in gradients for kernel in call.kernels()}
        assert not not_launched(kernels, set(launched.kernels)), problem


@arithmetics
def test_the_operator_launches_them_in_the_precision_that_is_named(launched, monkeypatch, arithmetic):
    dtype, precision = arithmetic
    p = workloads.get("hifigan_u1").problem
    (call,) = named_calls.calls(["auto"], [p], [arithmetic], H200)
    monkeypatch.setattr(device, "of", lambda _: H200)
    operators.ready.cache_clear()
    x, w, _ = (torch.empty(p.shape_of(of), dtype=dtype, device="meta") for of in OPERANDS)
    with torch.inference_mode():
        operators.ready(layout_of(x), layout_of(w), None, *p.parameters, "", precision)(x, w, None)
    assert set(launched.kernels) == set(call.kernels())
    operators.ready.cache_clear()


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, TF32_ALLOWED), (torch.bfloat16, "bf16")], ids=str)
def test_joined_signals_are_compiled_as_they_are_launched(launched, monkeypatch, dtype, precision):
    p = SEGMENTS
    calls = {of: compile_ahead.selected(of, p, dtype, precision, H200) for of in OPERANDS}
    for (call,) in calls.values():
        assert call.joins
        assert call.problem.batch == 1
    monkeypatch.setattr(device, "of", lambda _: H200)
    operators.ready.cache_clear()
    x, w, y = (torch.empty(p.shape_of(of), dtype=dtype, device="meta") for of in OPERANDS)
    bias = torch.empty(p.out_channels, dtype=dtype, device="meta")
    with torch.inference_mode():
        compute = operators.ready(*map(layout_of, (x, w, bias)), p.stride, p.padding, 0, 1, 1, "", precision)
        assert compute(x, w, bias).shape == y.shape
        assert set(launched.kernels) == set(calls["forward"][0].kernels())
        launched.kernels.clear()
        named = "tf32" if dtype == torch.float32 else precision
        operators.ready(*map(layout_of, (x, w, bias)), p.stride, p.padding, 0, 1, 1, "k6_wgmma", named)(x, w, bias)
    assert "row_copy" not in {kernel.name for kernel in launched.kernels}  # a named rung computes what it is given
    operators.ready.cache_clear()


def test_gradients_in_full_precision_are_not_joined():
    (call,) = compile_ahead.selected("grad_weight", SEGMENTS, torch.float32, "tf32x3", H200)
    assert (call.joins, call.precision) == (False, "ieee")


def test_every_kernel_can_be_kept():
    calls = [
        call
        for direction in ("forward", "grad_input", "grad_weight", "step")
        for call in named_calls.calls(["all"], PROBLEMS, ARITHMETICS, H200, direction)
    ]
    assert {call.rung for call in calls} == {*RUNGS, *GRADIENTS}
    kernels = {kernel for call in calls for kernel in call.kernels()}
    keys = {(kernel.name, kernel.key) for kernel in kernels}
    assert len(keys) == len(kernels)
    assert all(key for _, key in keys)


def test_auto_is_what_the_selection_picks():
    def picked(name, precision):
        calls = named_calls.calls(["auto"], [workloads.get(name).problem], [(torch.float32, precision)], H200)
        return [(call.rung, call.precision) for call in calls]

    assert picked("kb64", "ieee") == [("k4_register_tile", "ieee")]
    assert picked("kb64", "tf32x3") == [("k6_wgmma", "tf32x3")]
    assert picked("depthwise", "tf32x3") == [("depthwise", "ieee")]
    assert picked("depthwise", "tf32") == [("depthwise", "ieee")]  # where torch's switch allows TF32


@pytest.mark.thorough
def test_files_are_those_that_a_first_launch_looks_for(capsys, folder, monkeypatch):
    argv = ("small", "kb79", "--rung", "k1_gather", "--rung", "k2_polyphase", "--jobs", 2)
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert out.startswith("kernels for sm_90a: 2 compiled in ")
    assert out.endswith(f" s, 0 there already, in {folder}\n")
    assert sorted(path.name.partition("-")[0] for path in folder.iterdir()) == ["k1_gather", "k2_polyphase"]

    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert out == f"kernels for sm_90a: 0 compiled in 0 s, 2 there already, in {folder}\n"

    def compiled(*_):
        pytest.fail("compiled again")

    monkeypatch.setattr(Kernel, "ptx", compiled)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launch, "driver", MagicMock())
    monkeypatch.setattr(launch, "_check", lambda result: result)
    for name in ("k1_gather", "k2_polyphase"):
        rung = RUNGS[name]
        rung.kernel(rung.config(ODD[0], torch.float32))._load(0, 0)
    assert launch.driver.cuModuleLoadData.call_count == 2


def test_the_gpu_is_named_or_the_one_that_is_there(capsys, monkeypatch):
    monkeypatch.setattr(compile_ahead, "fill", lambda calls, cc, jobs: (seen.append((calls, cc, jobs)), (0, 0))[1])
    seen = []
    assert run(capsys, "small", "--rung", "k4_register_tile", "--cc", "8.0", "--jobs", 3)[0] == 0
    assert run(capsys, "small", "--rung", "k4_register_tile")[0] == 0
    assert run(capsys, "small", "--rung", "k4_register_tile", "--cc", "12.0")[1].startswith("kernels for sm_120: ")
    blackwell = commands.DEVICES["12.0"]
    assert [(call.device, cc) for (call,), cc, _ in seen] == [
        (A100, (8, 0)), (H200, (9, 0, "a")), (blackwell, (9, 0))
    ]  # fmt: skip
    assert seen[0][2] == 3


def test_arithmetics_are_combined(capsys, filled):
    arithmetics = ("--dtype", "float32", "--dtype", "bfloat16", "--precision", "ieee", "--precision", "tf32")
    assert run(capsys, "kb64", "--rung", "auto", *arithmetics)[0] == 0
    assert [(call.rung, call.precision) for call in filled.calls] == [
        ("k4_register_tile", "ieee"), ("k6_wgmma", "tf32"), ("k6_wgmma", "bf16")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("direction", "rungs"),
    [
        ("grad_input", ["grad_input_gather", "grad_input_tile"]),
        ("step", ["k4_register_tile", "grad_input_tile", "grad_weight_split", "grad_bias"]),
    ],
)
def test_the_direction_is_named(capsys, filled, direction, rungs):
    assert run(capsys, "kb64", "--direction", direction, "--rung", "all", "--precision", "ieee")[0] == 0
    assert [call.rung for call in filled.calls] == rungs


def test_what_a_rung_cannot_do_is_passed_over(capsys, filled):
    rungs = ("--rung", "k6_wgmma", "--rung", "cudnn", "--rung", "k4_register_tile")
    assert run(capsys, "kb64", *rungs, "--precision", "ieee")[0] == 0
    assert [call.rung for call in filled.calls] == ["k4_register_tile"]
    assert "k6_wgmma cannot do" in mistake(capsys, "compile", "kb64", *rungs[:4], "--precision", "ieee")


def test_mistakes_get_one_line(capsys, folder, monkeypatch):
    assert "did you mean kb64" in mistake(capsys, "compile", "kb65")
    assert "no rung is called 'k9'" in mistake(capsys, "compile", "kb64", "--rung", "k9")
    folder.write_text("a file where the directory should be")
    assert f"cannot write {folder}" in mistake(capsys, "compile", "kb64")
    monkeypatch.setenv("NUMBA_TCONV_CACHE", "")
    assert "cache of compiled kernels is off" in mistake(capsys, "compile", "kb64")


def test_what_the_disk_does_not_keep_is_not_reported_as_compiled(capsys, folder, monkeypatch):
    monkeypatch.setattr(Kernel, "ptx", lambda kernel, _: kernel.key)
    monkeypatch.setattr(cache, "_write", lambda path, text: None)
    code, _, said = command_line.run(capsys, "compile", "small", "--rung", "k1_gather", "--jobs", "1")
    assert code == commands.MISTAKE
    assert said.endswith(f"numba_tconv: 1 of 1 compiled kernels were not kept in {folder}\n")


def test_what_the_compiler_raises_in_its_process_is_raised():
    call = compile_ahead.Call("k1_gather", ODD[0], torch.float32, "ieee", H200)
    with pytest.raises(TypeError):
        compile_ahead.fill([call], ("no architecture",), jobs=1)


def test_kernels_of_one_name_are_told_apart(monkeypatch):
    """Several kernels add partial sums, by their number."""
    monkeypatch.setattr(Kernel, "ptx", lambda kernel, _: kernel.key)
    problem = Problem(32, 512, 256, 8, 2048, stride=4, padding=2, bias=True)
    call = compile_ahead.Call("grad_weight_wgmma", problem, torch.bfloat16, "bf16", H200)
    sums = [kernel for kernel in call.kernels() if kernel.name == "grad_weight_sum"]
    assert len(sums) == len(grad_weight_sum.configs(torch.bfloat16))
    for kernel in sums:
        assert not cache.holds(kernel.name, kernel.key, (9, 0, "a"))
        compile_ahead._compile(call, kernel.name, kernel.key, (9, 0, "a"))
        assert cache.holds(kernel.name, kernel.key, (9, 0, "a"))


def test_a_kernel_that_a_call_launches_twice_is_compiled_once(monkeypatch):
    monkeypatch.setattr(Kernel, "ptx", lambda kernel, _: kernel.key)
    problem = replace(workloads.get("oobleck_u1").problem, batch=1)
    call = compile_ahead.Call("k6_wgmma", problem, torch.float32, "tf32", H200)
    launched = [(kernel.name, kernel.key) for kernel in call.kernels()]
    assert len(set(launched)) < len(launched)
    assert compile_ahead.fill([call], (9, 0, "a"), jobs=1) == (len(set(launched)), 0)
