"""The command line has help for every command, and one clear line for every mistake."""

import pytest

from numba_tconv.lab.cli import commands
from numba_tconv.lab.cli.parser import parser
from numba_tconv.lab.measure import ahead, search
from numba_tconv.lab.studies import decoders
from tests.command_line import mistake, no_gpu, run

VERBS = sorted({one.prog.split()[-1] for one in parser()._subparsers._group_actions[0].choices.values()})


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    for module in (ahead, search):
        monkeypatch.setattr(module, "compile_all", lambda *_: pytest.fail("compiled"))


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    assert out.startswith(f"usage: python -m numba_tconv {verb}")


MISTAKES = {
    "unknown workload": (["bench", "kb65"], "no workload is called 'kb65'; did you mean kb64"),
    "no workload like it": (["bench", "zzz"], "no workload is called 'zzz'; there are kb64, kb74"),
    "unknown workload to sweep": (["sweep", "kb65"], "did you mean kb64"),
    "unknown workload to search": (["search", "kb65"], "did you mean kb64"),
    "unknown workload to inspect": (["inspect", "k1_gather", "kb65"], "did you mean kb64"),
    "unknown rung": (["bench", "kb64", "--rung", "k9"], "no rung is called 'k9'"),
    "unknown rung to inspect": (["inspect", "k9"], "no rung is called 'k9'"),
    "a rung that cannot be inspected for an older GPU": (
        ["inspect", "k6_wgmma", "--cc", "8.0"],
        "needs a GPU of compute capability 9.0, not 8.0",
    ),
    "a rung that cannot be compiled for an older GPU": (
        ["compile", "small", "--rung", "k6_wgmma", "--cc", "8.0"],
        "needs a GPU of compute capability 9.0, not 8.0",
    ),
    "a rung that cannot do it": (
        ["bench", "kb64", "--rung", "k1_gather", "--precision", "tf32"],
        "k1_gather cannot do",
    ),
    "a rung that cannot do any of several": (
        ["bench", "kernelbench", "--direction", "grad_weight", "--rung", "grad_weight_split", "--precision", "tf32"],
        "none of the workloads can be done: grad_weight_split cannot do",
    ),
    "a gradient's rung that cannot do it": (
        ["bench", "kb64", "--direction", "grad_input", "--rung", "grad_input_tile", "--precision", "tf32"],
        "grad_input_tile cannot do",
    ),
    "a gradient's rung that cannot be inspected so": (
        ["inspect", "grad_weight_split", "--precision", "tf32x3"],
        "grad_weight_split cannot do",
    ),
    "a gradient's rung for the forward pass": (
        ["sweep", "--rung", "grad_input_tile"],
        "grad_input_tile computes grad_input, not the forward pass",
    ),
    **{
        f"frozen weights for a step to {command}": (
            [command, "kb64", "--direction", "step", "--weights", "frozen"],
            "frozen weights are for the forward pass, not for step",
        )
        for command in ("bench", "sweep")
    },
    "a rung of another direction to compile": (
        ["compile", "--direction", "grad_weight", "--rung", "grad_input_tile"],
        "grad_input_tile computes grad_input, not grad_weight",
    ),
    "nothing to check": (["check", "--batch", "0"], "has no outputs"),
    "nothing to compile": (["compile", "kb64", "--batch", "0"], "has no outputs"),
    "impossible problem": (["check", "--stride", "0"], "stride must be positive"),
    "impossible groups": (["check", "--groups", "3"], "divisible by groups"),
    "nothing to explain": (
        ["explain", "--in-channels", "4"],
        "name a workload, or give --out-channels, --kernel-size, ",
    ),
    "impossible problem to explain": (["explain", "kb64", "--stride", "0"], "stride must be positive"),
    "a precision of another dtype to explain": (
        ["explain", "kb64", "--dtype", "float64", "--precision", "tf32"],
        "unknown precision 'tf32': torch.float64 has fp64",
    ),
    **{
        f"a precision of another dtype to {one[0]}": (
            [*one, "--dtype", "bfloat16", "--precision", "tf32"],
            "bfloat16 has no precision 'tf32': --precision is of float32 products",
        )
        for one in (["check"], ["bench"], ["sweep"], ["inspect", "k5_mma"], ["search"])
    },
    **{
        f"no folder of rows for {one[0]}": ([*one, "--data", "no/folder"], "there is no folder no/folder")
        for one in (["demo"], ["figures"], ["explain", "kb64"])
    },
    "nothing between": (["sweep", "--min", "5", "--max", "7"], "no power of two from 5 to 7"),
    "sizes beside a name": (["sweep", "kb64", "--stride", "2"], "name layers, or give sizes, not both"),
    "too few sizes to sweep": (["sweep", "--in-channels", "4"], "give --out-channels, --kernel-size too"),
    "unknown decoder": (["decoders", "vits", "dacs"], "no decoder is called 'dacs'; there are encodec, dac, "),
    "unknown KernelBench problem": (["kernelbench", "63"], "no entry for problem 63; there are 64, 74, 79"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_gets_one_line(capsys, what):
    argv, said = MISTAKES[what]
    assert said in mistake(capsys, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["check", "--length", "x"],
        ["explain", "kb64", "--length", "2**63"],
        ["sweep", "--min", "2**"],
        ["bench", "--dtype", "int8"],
        ["bench", "--direction", "backward"],
        [],
    ],
)
def test_arguments_that_are_no_arguments_are_argparses(capsys, argv):
    code, _, err = run(capsys, *argv)
    assert code == 2
    assert "error: " in err


RECORDERS = [
    ["bench", "kb64"],
    ["bench", "kb64", "--direction", "step"],
    ["sweep"],
    ["search"],
    ["kernelbench"],
    ["activations"],
    ["streaming"],
    ["train"],
]
RECORDERS += [["decoders"], ["decoders", "--mode", "eager"]]


@no_gpu
@pytest.mark.parametrize("argv", RECORDERS, ids=" ".join)
def test_measuring_without_a_gpu_says_so(capsys, monkeypatch, argv):
    monkeypatch.setattr(decoders, "require_transformers", lambda: None)
    assert "needs a CUDA GPU" in mistake(capsys, *argv)


@no_gpu
@pytest.mark.parametrize("argv", RECORDERS, ids=" ".join)
def test_where_no_rows_can_be_added_nothing_is_measured(capsys, monkeypatch, tmp_path, argv):
    """A measurement would fail without a GPU."""
    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(decoders, "require_transformers", lambda: None)
    out = tmp_path / "rows.csv"
    out.write_text("time,speed\nnow,fast\n")
    assert "columns of another version" in mistake(capsys, *argv, "--out", out)
    assert out.read_text() == "time,speed\nnow,fast\n"
    assert "cannot write" in mistake(capsys, *argv, "--out", out / "rows.csv")


@no_gpu
def test_a_problem_too_large_for_the_simulator_is_refused(capsys):
    said = (
        "(64, 128->128, k3, s1, L 65536) has 206,158,430,208 products, and the CUDA simulator, used where there is no "
    )
    assert mistake(capsys, "check", "kb64") == f"numba_tconv: {said}GPU, takes problems of at most 100,000\n"


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "soon"])
@pytest.mark.parametrize("command", ["bench --budget", "sweep --budget", "decoders --seconds"])
def test_a_duration_that_is_no_time(capsys, command, seconds):
    code, _, err = run(capsys, *command.split(), seconds)
    assert (code, f"{seconds!r} is no time in seconds" in err) == (2, True)
