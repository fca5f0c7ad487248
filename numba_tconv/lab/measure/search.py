"""A test of k6's cost model: all configurations of a workload, without packing."""

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from numba_tconv.kernels.common.packed_weights import FrozenWeights
from numba_tconv.kernels.k6_wgmma.choose import choose_whole
from numba_tconv.kernels.k6_wgmma.tile import Config, configs
from numba_tconv.runtime import workers
from numba_tconv.runtime.kernel import target
from numba_tconv.selection.directions import FORWARD
from numba_tconv.selection.registry import RUNGS

from . import accuracy, bench, machine, rows, timing
from .directions import Operands, torch_forward
from .workloads import Workload

RUNG = "k6_wgmma"
FILE = Path("search", f"{RUNG}.csv")
REPEATS, BUDGET_S = 9, 0.3


@dataclass(frozen=True)
class Tried:
    time: str
    commit: str
    gpu: str
    workload: str
    precision: str
    rows: int
    resident: bool
    stages: int
    bulk_channels: int
    round_channels: int
    buffers: int
    aligned: bool
    tail: bool
    chosen: bool
    ms_p50: float


COLUMNS = tuple(field.name for field in fields(Tried))


def append(path: str | os.PathLike, tried: list[Tried]) -> None:
    """Replaces rows of the same workloads and precisions. Raises RowsError."""
    renewed = {(row.workload, row.precision) for row in tried}
    kept = [row for row in rows.existing(path, Tried) if (row.workload, row.precision) not in renewed]
    rows.replace(path, [*kept, *tried], Tried)


def described(config: Config) -> dict:
    return dict(
        rows=config.tile.rows,
        resident=config.resident,
        stages=config.stages,
        bulk_channels=config.bulk_channels,
        round_channels=config.tile.round_channels,
        buffers=config.buffers,
        aligned=config.tile.aligned,
        tail=config.tail,
    )


def is_of(tried: Tried, config: Config) -> bool:
    return all(getattr(tried, column) == value for column, value in described(config).items())


def compile_all(found: list[Config], jobs: int) -> None:
    cc = target((9, 0))
    workers.run(_compile, [(config, cc) for config in found], jobs, f"kernels: {len(found)}")


def _compile(config: Config, cc: tuple) -> None:
    RUNGS[RUNG].kernel(config).kept_ptx(cc)


def measure(workload: Workload, dtype: torch.dtype, precision: str) -> list[Tried]:
    """Rows of all configurations. Raises WrongResult if the first or last sample is wrong."""
    p, name = workload.problem, bench.peak_name(dtype, precision)
    found, chosen, rung = configs(p, name), choose_whole(p, name), RUNGS[RUNG]
    with bench.torch_switches(tf32=precision == "tf32"), torch.no_grad():
        x, weight, bias = bench.make_inputs(workload, dtype, "cuda")
        packed_once = FrozenWeights(weight)
        y = torch.empty(p.out_shape, dtype=dtype, device="cuda")
        ends = torch.tensor(sorted({0, p.batch - 1}), device="cuda")

        def contestant(config):
            def call():
                rung.run(x, packed_once.tensor, bias, y, p, config, name)
                return y

            return timing.Contestant(call, prepare=lambda: y.fill_(math.nan))

        contestants, outputs = [contestant(config) for config in found], {}
        for number, one in enumerate(contestants):
            one.prepare()
            outputs[str(number)] = one.call()[ends].clone()
        outputs["torch"] = torch_forward(x[ends], weight, bias, p)
        operands = Operands(x[ends], weight, bias)
        errors = accuracy.errors(outputs, operands, p)
        for number, config in enumerate(found):
            error = errors[str(number)]
            if not accuracy.right(FORWARD, error, errors["torch"], operands, precision, p):
                raise bench.WrongResult(f"wrong on {workload.name} ({name}): {config}: {error}", [])
        timing.interleave(contestants, REPEATS, BUDGET_S, f"{workload.name} {name}")
    where = {key: value for key, value in machine.measured().items() if key in COLUMNS}
    common = dict(**where, workload=workload.name, precision=name)
    return [
        Tried(**common, **described(config), chosen=config == chosen, ms_p50=timing.quantile(one.times(), 0.5))
        for config, one in zip(found, contestants, strict=True)
    ]
