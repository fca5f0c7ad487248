"""The fuzzer in the simulator: cases follow from their numbers, are right, and mistakes are found and reproduced."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.cli import commands
from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.measure import fuzz
from numba_tconv.runtime import device
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS
from tests.parity import misstated

ABLE = {
    name: rung
    for name, rung in (RUNGS | GRADIENTS).items()
    if rung.supports(Problem(1, 2, 2, 3, 8), torch.float32, "ieee") is None
}


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    monkeypatch.setattr(device, "of", lambda index: replace(device.H200, multiprocessors=2))


def run(capsys, first, count):
    code = cli.main(["fuzz", "--seed", "5", "--first", str(first), "--count", str(count)])
    return code, capsys.readouterr().out.splitlines()


def test_cases_follow_from_their_numbers():
    cases = [fuzz.draw(5, number) for number in range(30)]
    assert cases == [fuzz.draw(5, number) for number in range(30)]
    assert len(set(cases)) == 30
    assert cases[0] != fuzz.draw(6, 0)


def test_everything_is_drawn():
    cases = [fuzz.draw(5, number) for number in range(500)]
    assert {case.rung for case in cases} == ABLE.keys()
    assert {case.dtype for case in cases} == fuzz.DTYPES.keys()
    layouts = [layout for case in cases for layout in case.layouts]
    assert len({layout.order for layout in layouts}) == 6
    assert {gap for layout in layouts for gap in layout.gaps} == {0, 1, 2, 3}
    assert {layout.shift for layout in layouts} == set(range(16))
    for name, least in (("bias", 0), ("groups", 1), ("padding", 0), ("output_padding", 0)):
        assert {getattr(case.problem, name) > least for case in cases} == {False, True}, name


def test_a_tensor_lies_as_its_layout_says():
    layout = fuzz.Layout((2, 0, 1), (0, 3, 2), 5)
    tensor = layout.random((2, 3, 4), torch.float32, torch.Generator().manual_seed(0))
    assert (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == ((2, 3, 4), (0, 3, 18), 5)


def test_the_kernels_are_right(capsys):
    assert run(capsys, 0, 40) == (0, ["seed 5, cases 0 to 39: 0 wrong"])


@pytest.mark.parametrize("name", ABLE)
def test_a_mistake_is_found_and_reproduced(capsys, monkeypatch, name):
    """Rungs are told of one more sample of padding; grad_bias, which has none, is given other numbers."""
    right, rung = type(ABLE[name]).run, ABLE[name]

    def wrong(self, *arguments):
        place = next(i for i, argument in enumerate(arguments) if isinstance(argument, Problem))
        problem, tensors = arguments[place], list(arguments[:place])
        problem = misstated(problem, padding=problem.padding + 1)
        if name == "grad_bias":
            tensors[0] = 2 * tensors[0]
        right(self, *tensors, problem, *arguments[place + 1 :])

    numbers = (number for number in range(500) if fuzz.draw(5, number).rung == name)
    lines = []
    with monkeypatch.context() as patched:
        patched.setattr(type(rung), "run", wrong)
        while not lines:
            code, (*lines, summary) = run(capsys, next(numbers), 1)
        assert code == commands.FAILED
        assert summary.endswith(": 1 wrong")
        with pytest.raises(fuzz.Mismatch):
            exec(lines[1], {})
    exec(lines[1], {})


def test_what_is_not_written_is_found(monkeypatch):
    for rung in ABLE.values():
        monkeypatch.setattr(type(rung), "run", lambda *_, **__: None)
    for number in range(20):
        with pytest.raises(fuzz.Mismatch):
            fuzz.draw(5, number).check()


def test_every_wrong_case_is_counted(capsys, monkeypatch):
    def check(case):
        raise fuzz.Mismatch("no")

    monkeypatch.setattr(fuzz.Case, "check", check)
    code, lines = run(capsys, 3, 2)
    assert (code, lines[::2]) == (commands.FAILED, ["case 3: no", "case 4: no", "seed 5, cases 3 to 4: 2 wrong"])


def test_an_interrupted_run_says_where_to_go_on(capsys, monkeypatch):
    def check(case):
        if case == fuzz.draw(5, 12):
            raise KeyboardInterrupt

    monkeypatch.setattr(fuzz.Case, "check", check)
    code, lines = run(capsys, 10, 9)
    assert code == 130
    assert lines == ["2 cases, 0 wrong; go on with --seed 5 --first 12"]
    assert run(capsys, 13, 6) == (0, ["seed 5, cases 13 to 18: 0 wrong"])


def test_what_cannot_be_computed_is_printed_and_ends_the_run(capsys, monkeypatch):
    def check(case):
        raise ZeroDivisionError

    monkeypatch.setattr(fuzz.Case, "check", check)
    with pytest.raises(ZeroDivisionError):
        run(capsys, 3, 9)
    assert capsys.readouterr().out.splitlines() == ["case 3 is not computed", fuzz.draw(5, 3).line()]
