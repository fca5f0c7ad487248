"""The search's rows, with a stand-in for the rung, and what is compiled before."""

import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma.choose import choose_whole
from numba_tconv.kernels.k6_wgmma.tile import configs
from numba_tconv.lab.measure import bench, search
from numba_tconv.lab.measure.directions import torch_forward
from numba_tconv.lab.measure.workloads import Workload, get
from tests.samples import WHERE

TINY = Workload("tiny", Problem(3, 8, 64, 4, 40, stride=2, padding=1, bias=True), "", "")
CONFIGS = configs(get("dac_u1").problem, "tf32")[:3]


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Three configurations, which take 1, 2 and 3 ms; returns which computed, and what spoils the last."""
    seen = SimpleNamespace(spoilt=None, ran=[], asked=[])

    class Rung:
        def run(self, x, weight, bias, y, p, config, precision):
            assert y.isnan().all()
            assert hasattr(weight, "packings")
            seen.ran.append((config, precision, torch.backends.cudnn.allow_tf32))
            y.copy_(torch_forward(x, weight, bias, p))
            if config == CONFIGS[-1] and seen.spoilt is not None:
                y[seen.spoilt] = 0

    def interleave(contestants, *how):
        seen.asked.append(how)
        for ms, one in enumerate(contestants, 1):
            one.prepare()
            assert one.call() is not None
            one.events = [(SimpleNamespace(elapsed_time=lambda _, ms=ms * n: ms), None) for n in (1, 2, 9)]

    make, empty, tensor = bench.make_inputs, torch.empty, torch.tensor
    monkeypatch.setattr(bench, "make_inputs", lambda workload, dtype, device: make(workload, dtype, "cpu"))
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **values: empty(*shape, **values))
    monkeypatch.setattr(torch, "tensor", lambda *given, device=None, **values: tensor(*given, **values))
    monkeypatch.setattr(search, "RUNGS", {"k6_wgmma": Rung()})
    monkeypatch.setattr(search, "configs", lambda p, name: CONFIGS)
    monkeypatch.setattr(search, "choose_whole", lambda p, name: CONFIGS[1])
    monkeypatch.setattr(search.timing, "interleave", interleave)
    monkeypatch.setattr(search.machine, "measured", lambda: WHERE)
    return seen


@pytest.mark.parametrize(
    ("dtype", "asked", "name"), [(torch.float32, "tf32", "tf32"), (torch.bfloat16, "ieee", "bf16")]
)
def test_a_row_of_each_configuration(on_the_cpu, dtype, asked, name):
    on_the_cpu.spoilt = 1  # only the first and the last sample are compared
    found = search.measure(TINY, dtype, asked)
    where = dict(time=WHERE["time"], commit=WHERE["commit"], gpu=WHERE["gpu"], workload="tiny", precision=name)
    assert [asdict(row) for row in found] == [
        where | search.described(config) | dict(chosen=at == 1, ms_p50=2.0 * (at + 1))
        for at, config in enumerate(CONFIGS)
    ]
    assert on_the_cpu.ran == [(config, name, asked == "tf32") for config in CONFIGS] * 2
    assert on_the_cpu.asked == [(search.REPEATS, search.BUDGET_S, f"tiny {name}")]


@pytest.mark.parametrize("sample", [0, 2])
def test_no_row_comes_of_a_wrong_configuration(on_the_cpu, sample):
    on_the_cpu.spoilt = sample
    with pytest.raises(bench.WrongResult, match=r"^wrong on tiny \(tf32\): Config") as caught:
        search.measure(TINY, torch.float32, "tf32")
    assert repr(CONFIGS[-1]) in str(caught.value)
    assert caught.value.rows == []
    assert not on_the_cpu.asked


def test_a_configuration_is_described_by_its_fields():
    config = choose_whole(get("dac_u1").problem, "tf32")
    tile = config.tile
    assert search.described(config) == dict(
        **dict(rows=tile.rows, resident=config.resident, stages=config.stages, bulk_channels=config.bulk_channels),
        **dict(round_channels=tile.round_channels, buffers=config.buffers, aligned=tile.aligned, tail=config.tail),
    )
    row = search.Tried("", "", "", "", "", **search.described(config), chosen=True, ms_p50=math.nan)
    others = [one for one in configs(get("dac_u1").problem, "tf32") if one != config]
    assert search.is_of(row, config)
    assert not any(search.is_of(row, one) for one in others)


def test_every_configuration_is_compiled_for_the_h200(monkeypatch):
    asked, kept = [], []
    monkeypatch.setattr(search.workers, "run", lambda *given: asked.append(given))
    search.compile_all(CONFIGS, 5)
    ((compile_one, cases, jobs, label),) = asked
    assert (jobs, label) == (5, "kernels: 3")
    monkeypatch.setattr(
        search,
        "RUNGS",
        {"k6_wgmma": SimpleNamespace(kernel=lambda c: SimpleNamespace(kept_ptx=lambda cc: kept.append((c, cc))))},
    )
    for case in cases:
        compile_one(*case)
    assert kept == [(config, search.target((9, 0))) for config in CONFIGS]
