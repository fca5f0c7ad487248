"""The study of steps on the CPU: both sides, what their errors are measured against, and the rows of a layer."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.lab.studies import streaming

TINY = {
    "frames overlap": Problem(1, 6, 4, 8, 1, 4, bias=True),
    "without a bias, groups": Problem(1, 6, 4, 7, 1, 3, groups=2),
    "nothing kept": Problem(1, 6, 4, 3, 1, 3, bias=True),
}


@pytest.fixture
def on_the_cpu(monkeypatch):
    make, random = torch.Generator, torch.randn
    monkeypatch.setattr(torch, "Generator", lambda device: make())
    monkeypatch.setattr(torch, "randn", lambda *shape, device, **options: random(*shape, **options))
    monkeypatch.setattr(streaming, "LAYERS", TINY)


@pytest.mark.parametrize("wrong", [None, 0, 1])
@pytest.mark.parametrize("layer", TINY)
def test_rows_have_the_times_and_errors_of_both_sides(layer, wrong, on_the_cpu, monkeypatch):
    """Both compute every output of the whole signal, from states that begin as zeros."""
    sides, asked = streaming.sides, []

    def spoiled(*arguments):
        made = sides(*arguments)
        for one in made:
            one.kept.fill_(7.0)  # as after other steps
        if wrong is not None:
            run = made[wrong].run
            made[wrong] = replace(made[wrong], run=lambda: 1.01 * run())
        return made

    def microseconds(calls, mode, repeats, label):
        asked.append((len(calls), mode, repeats, label))
        return [1.0, 3.0] if mode == streaming.EAGER else [0.5, 1.5]

    monkeypatch.setattr(streaming, "sides", spoiled)
    monkeypatch.setattr(streaming, "microseconds", microseconds)
    eager, graph = streaming.measure(layer, "float32", 3, 2, repeats=5)
    assert asked == [(2, mode, 5, f"{layer} float32 3 x 2") for mode in ("eager", "graph")]
    assert (eager.us_p50, eager.by_hand_us_p50, graph.us_p50, graph.by_hand_us_p50) == (1.0, 3.0, 0.5, 1.5)
    for row in (eager, graph):
        assert (row.layer, row.dtype, row.batch, row.frames) == (layer, "float32", 3, 2)
        for side, error in enumerate((row.relerr, row.by_hand_relerr)):
            assert error == pytest.approx(0.01, rel=1e-3) if side == wrong else 0 < error < 1e-6


def test_the_same_numbers_are_drawn_again(on_the_cpu, monkeypatch):
    monkeypatch.setattr(streaming, "microseconds", lambda *_: [1.0, 1.0])
    first, second = (streaming.measure("frames overlap", "bfloat16", 3, 2)[0] for _ in range(2))
    assert (first.relerr, first.by_hand_relerr) == (second.relerr, second.by_hand_relerr)
    assert first.relerr > 1e-4
