"""Random alias-free activations in the simulator: some are right, and a wrong kernel is found."""

from functools import cache

import pytest
import torch

from numba_tconv.lab.cli import parser as cli
from numba_tconv.lab.measure import fuzz_activations as fuzz
from tests.thorough import thorough


def test_some_cases(capsys):
    assert cli.main(["fuzz-activations", "--seed", "5", "--count", "8"]) == 0
    assert "seed 5, cases 0 to 7: 0 wrong" in capsys.readouterr().out


computed = cache(fuzz.Case.computed)


@pytest.mark.parametrize("dtype", thorough(["float16", "float32", "float64"], always=["float32"]))
@pytest.mark.parametrize("wrong", range(4), ids=("y", "dx", "dalpha", "dbeta"))
def test_one_wrong_element_is_found(wrong, dtype, monkeypatch):
    """By the case's line too, which draws the same numbers."""
    drawn = (fuzz.draw(5, number) for number in range(500))
    case = next(case for case in drawn if case.parameters and not case.tied and case.dtype == dtype)

    def spoilt(*arguments):
        found = [one.clone() for one in computed(*arguments)]
        found[wrong].view(-1)[-1] += 0.5 + found[wrong].abs().max() / 4
        return found

    monkeypatch.setattr(fuzz.Case, "computed", computed)
    case.check()
    assert torch.equal(case.operands()[1], case.operands()[1])
    monkeypatch.setattr(fuzz.Case, "computed", spoilt)
    with pytest.raises(fuzz.Mismatch, match="elements of"):
        case.check()
    with pytest.raises(fuzz.Mismatch):
        exec(case.line(), {})


def test_everything_is_drawn():
    cases = [fuzz.draw(5, number) for number in range(500)]
    assert {case.activation for case in cases} == set(fuzz.ACTIVATIONS)
    assert {fuzz.DTYPES[case.dtype] for case in cases} == {torch.float64, torch.float32, torch.float16}
    for name in ("log_scale", "tied", "parameters", "turned"):
        assert {getattr(case, name) for case in cases} == {False, True}


def test_a_louder_signal_is_allowed_as_much_more_error():
    case = next(case for case in (fuzz.draw(5, number) for number in range(500)) if not case.parameters)
    tensors, dy = case.operands()
    of_y = [case.limits(tensors._replace(x=scale * tensors.x), dy)[0] for scale in (1, 2, 3)]
    assert of_y[2] - of_y[1] == pytest.approx(of_y[1] - of_y[0])
    assert of_y[1] > 1.5 * of_y[0]
