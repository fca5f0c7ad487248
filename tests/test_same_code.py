"""The gate `make same-code`: it ignores names, compares every instruction, and lists every rung."""

import json
from types import SimpleNamespace

import pytest

from numba_tconv.ptx import SIMULATOR

if SIMULATOR:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from numba import cuda, int32, types

from numba_tconv.lab.machine_code import offline
from numba_tconv.runtime.kernel import Kernel, contiguous
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from numba_tconv.torch_api.compile_ahead import Call

from . import same_code
from .same_code import difference, plain_ptx, plain_sass

CC = (9, 0, "a")


def first_way(factor):
    @cuda.jit(device=True)
    def scaled(value):
        return value * factor

    def kernel(target):
        shared = cuda.shared.array(32, dtype=int32)
        shared[cuda.threadIdx.x] = target[cuda.threadIdx.x]
        cuda.syncthreads()
        target[cuda.threadIdx.x] = scaled(shared[31 - cuda.threadIdx.x])

    return kernel


def other_names(times):
    @cuda.jit(device=True)
    def multiplied(of, by):
        return of * by

    @cuda.jit(device=True)
    def product(of):
        return multiplied(of, times)

    def entry(numbers):
        kept = cuda.shared.array(32, dtype=int32)
        kept[cuda.threadIdx.x] = numbers[cuda.threadIdx.x]
        cuda.syncthreads()
        numbers[cuda.threadIdx.x] = product(kept[31 - cuda.threadIdx.x])

    return entry


def kernel_of(function):
    return Kernel("any", function, (contiguous(types.int32, 1),), 32)


def test_names_do_not_count_and_instructions_do():
    one, other, different = (kernel_of(f) for f in (first_way(3), other_names(3), first_way(5)))
    texts = [kernel.ptx(CC) for kernel in (one, other, different)]
    assert texts[0] != texts[1]
    plain = [plain_ptx(text) for text in texts]
    assert plain[0] == plain[1] != plain[2]
    assert not any("first_way" in line or "_Z" in line or "cudapy" in line for line in plain[0])
    # Every executed instruction of the text is compared.
    body = texts[0][texts[0].index("{") :]
    assert sum(line.strip().endswith(";") for line in body.splitlines()) == sum(
        line.endswith(";") for line in plain[0][plain[0].index("{") :]
    )


def test_machine_code_without_names():
    if offline.tool("nvdisasm", optional=True) is None:
        pytest.skip("needs nvdisasm")
    plain = [plain_sass(offline.report(kernel_of(f), CC)) for f in (first_way(3), other_names(3), first_way(5))]
    assert plain[0] == plain[1] != plain[2]
    assert any("BAR.SYNC" in line for line in plain[0])


@pytest.mark.parametrize("indent", [1, 40])
def test_notes_in_machine_code_are_compared_without_their_indent(indent):
    sass = f'/*0010*/  STL.64 [R1], R10{" " * indent}(*"SpillRefill"*);'
    report = SimpleNamespace(sass=sass, registers=8, shared_bytes=0, spill_bytes=8)
    assert plain_sass(report)[1] == '/*0010*/  STL.64 [R1], R10 (*"SpillRefill"*);'


LINES = """//
// Generated
//
.version 9.0
.target sm_90a
.extern .func  (.param .b32 func_retval0) vprintf
(
)
;
{first}
{second}
.visible .entry _ZN4main{tag}(
	.param .u64 _ZN4main{tag}_param_0
)
{{
	mov.u32 %r1, _cudapy_smem_{one};
	call.uni (retval0), vprintf, (param0); // called
	st.shared.u32 [_cudapy_smem_{two}+4], %r1;
	ld.param.u64 %rd1, [_ZN4main{tag}_param_{parameter}];
}}
"""
SHARED = ".visible .shared .align 8 .b8 _cudapy_smem_{}[{}];"


def lines(one=1, two=2, tag="", parameter=0, bytes=16, turned=False):
    declared = [SHARED.format(one, bytes), SHARED.format(two, 48)]
    first, second = declared[::-1] if turned else declared
    return plain_ptx(LINES.format(first=first, second=second, tag=tag, one=one, two=two, parameter=parameter))


def test_what_ptx_is_compared_by():
    assert lines() == lines(one=7, two=3, tag="B2v9", turned=True)
    for other in (lines(parameter=1), lines(bytes=32), lines(two=1)):
        assert lines() != other
    assert any("vprintf" in line for line in lines())  # an external name, not renamed


def test_a_kernel_is_the_same_by_its_ptx_or_by_its_machine_code():
    assert difference(["p", "s"], ["p", "other"]) is None
    assert difference(["q", "s"], ["p", "s"]) is None
    assert difference(["q", "t"], ["p", "s"]) == "differs"
    assert difference(None, ["p", "s"]) == "is gone"
    assert difference(["p", "s"], None) == "is new"


def test_every_rung_is_listed():
    calls = [(name, call) for _, name, call in same_code.listed() if isinstance(call, Call)]
    assert {call.rung for _, call in calls} == {*RUNGS, *GRADIENTS}
    for name, call in calls:
        rungs = RUNGS if call.rung in RUNGS else GRADIENTS
        assert rungs[call.rung].refusal(call.problem, call.dtype, call.precision, call.device) is None, name


def test_every_kernel_of_steps_is_listed():
    steps = [call for _, _, call in same_code.listed() if isinstance(call, same_code.StepCall)]
    names = {kernel.name for call in steps for kernel in call.kernels()}
    assert names == {"streaming_step", "streaming_mma", "streaming_depthwise"}


def test_every_kernel_of_activations_is_listed():
    calls = [call for _, _, call in same_code.listed() if isinstance(call, same_code.ActivationStep)]
    names = {kernel.name for call in calls for kernel in call.kernels()}
    assert names == {"alias_free", "alias_free_gradient", "alias_free_parameters"}
    assert {call.activation == "snake" for call in calls} == {True, False}
    assert {call.sizes.up_ratio == call.sizes.down_ratio for call in calls} == {True, False}


def test_the_record_is_of_the_kernels_that_are_listed():
    assert list(json.loads(same_code.RECORD.read_text())["kernels"]) == list(same_code.kernels())


@pytest.fixture
def gate(monkeypatch, tmp_path):
    """The gate over three kernels, with made-up records and compilations."""

    def run(now, *arguments):
        monkeypatch.setattr(same_code, "kernels", lambda: dict.fromkeys(now, (None, 0)))
        monkeypatch.setattr(same_code, "compiled", lambda wanted, *_: {name: now[name] for name in wanted})
        return same_code.main(list(arguments))

    monkeypatch.setattr(same_code, "RECORD", tmp_path / "record.json")
    return run


def test_the_gate_prints_what_differs_and_fails(gate, capsys):
    recorded = {"a": ["p", "s"], "b": ["p", "s"]}
    assert gate(recorded, "--record") == 0
    capsys.readouterr()
    assert gate(recorded) == 0
    assert capsys.readouterr().out == "2 kernels, all the same\n"
    assert gate({"a": ["p", "s"], "b": ["q", "t"], "c": ["p", "s"]}) == 1
    assert capsys.readouterr().out == "b differs\nc is new\n3 kernels, 2 of them not as recorded\n"
    assert gate({"b": ["p", "s"]}) == 1
    assert capsys.readouterr().out.startswith("a is gone\n")


def test_a_part_of_the_list_is_compared_and_recorded_alone(gate):
    gate({"a": ["p", "s"], "b": ["p", "s"]}, "--record")
    changed = {"a": ["q", "t"], "b": ["q", "t"]}
    assert gate(changed, "b") == 1
    gate(changed, "--record", "b")
    assert gate(changed, "b") == 0
    assert gate(changed) == 1
    assert json.loads(same_code.RECORD.read_text())["kernels"] == {"a": ["p", "s"], "b": ["q", "t"]}
