"""The result of ``explain``."""

import html
from dataclasses import dataclass

import torch

from numba_tconv.formula.problem import COPY_BANDWIDTH, PEAK_FLOPS, Problem
from numba_tconv.lab.measure.rows import FROZEN, Row
from numba_tconv.runtime.device import Device
from numba_tconv.selection.joined import Joined
from numba_tconv.selection.registry import RUNGS

from .picture import picture

SHOWN_PHASES, SHOWN_TAPS = 8, 8


@dataclass(frozen=True)
class Candidate:
    """A rung, for one problem.

    ``refusal``: why it is not taken, or None. ``tile`` (a block's work in words) and ``config``: None where it cannot
    do the problem. ``predicted_ms``: without launch overhead; None without a cost model or for an unsuited rung.
    ``recorded``: the GPU's newest row, or None.
    """

    rung: str
    refusal: str | None
    tile: str | None = None
    config: object = None
    predicted_ms: float | None = None
    recorded: Row | None = None


@dataclass(frozen=True)
class Explanation:
    """How a problem is computed; ``str`` gives text, Jupyter a picture.

    ``candidates``: all rungs in the ladder's order. Times are in ms. A roofline share is the H200's floor / time.
    ``has_rows``: the directory of rows exists. ``assumed``: no GPU is here. ``joint``: where the batch is joined to
    one signal.
    """

    problem: Problem
    dtype: torch.dtype
    precision: str
    why_precision: str
    gpu: str
    device: Device
    candidates: tuple[Candidate, ...]
    by_torch: bool
    has_rows: bool
    assumed: bool
    joint: Joined | None

    @property
    def taken(self) -> Candidate | None:
        """The candidate that computes the problem, or None."""
        return next((one for one in self.candidates if one.refusal is None), None)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return self.problem.flops

    @property
    def bytes(self) -> int:
        """Operands read once, the output written once."""
        return self.problem.min_bytes(self.dtype.itemsize)

    @property
    def floor_ms(self) -> float:
        """The H200's roofline time."""
        return self.problem.floor_ms(self.dtype.itemsize, self.precision)

    @property
    def bound(self) -> str:
        """ "memory" or "arithmetic", whichever sets the floor."""
        memory = self.bytes / COPY_BANDWIDTH >= self.flops / PEAK_FLOPS[self.precision]
        return "memory" if memory else "arithmetic"

    @property
    def predicted_ms(self) -> float | None:
        """The taken rung's ms, or None."""
        return self.taken and self.taken.predicted_ms

    @property
    def predicted_roofline(self) -> float | None:
        """Roofline share of ``predicted_ms``."""
        return self.floor_ms / self.predicted_ms if self.predicted_ms else None

    @property
    def recorded_ms(self) -> float | None:
        """Median of the taken rung's row, or None."""
        return self.taken and self.taken.recorded and self.taken.recorded.ms_p50

    @property
    def recorded_roofline(self) -> float | None:
        """Roofline share of ``recorded_ms``, by its run's bandwidth."""
        return self.taken and self.taken.recorded and self.taken.recorded.roofline

    def __str__(self) -> str:
        facts = self._facts()
        blocks = [self._title(), _aligned(facts, max(len(name) for name, _ in facts))]
        blocks += [self._phases_title(), *(f"  {line}" for line in self._phases())]
        rungs = [(one.rung, "; ".join(_verdict(one))) for one in reversed(self.candidates)]
        return "\n".join([*blocks, "rungs", _aligned(rungs, max(len(name) for name in RUNGS), "  ")])

    def _repr_html_(self) -> str:
        title, phases = html.escape(self._title()), html.escape(self._phases_title())
        drawing = picture(self.problem)
        rungs = _table((one.rung, *_verdict(one)) for one in reversed(self.candidates))
        return f"<div><p><b>{title}</b></p>{_table(self._facts())}<p>{phases}</p>{drawing}{rungs}</div>"

    def _title(self) -> str:
        where = f"as on an {self.gpu.removeprefix('NVIDIA ')}" if self.assumed else f"on {self.gpu}"
        return f"{self.problem} in {name_of(self.dtype)} {where}"

    def _facts(self) -> list[tuple[str, str]]:
        work = f"{self.flops / 1e9:,.4g} GFLOP, {self.bytes / 1e6:,.4g} MB at least"
        facts = [
            ("precision", f"{self.precision}: {self.why_precision}"),
            ("work", f"{work}: {self.flops / self.bytes:.3g} FLOP a byte"),
            ("floor", f"{self.floor_ms:.3g} ms on an H200, limited by {self.bound}"),
        ]
        taken = self.taken
        if self.by_torch:
            return [*facts, ("taken", "none: torch's own operator computes it on such a GPU")]
        if taken is None:
            return [*facts, ("taken", f"none: no rung can do it in {self.precision}, and conv_transpose1d refuses it")]
        if self.joint:
            joint = f"{self.problem.batch} signals end to end, one each {self.joint.apart} positions"
            facts.append(("joined", f"{joint}; copies take {self.joint.copies_ms:.2g} ms besides"))
        facts += [("taken", f"{taken.rung}: {RUNGS[taken.rung].idea}"), ("tile", taken.tile)]
        if self.predicted_ms:
            share = f"{self.predicted_roofline:.0%} of the roofline"
            facts.append(
                ("predicted", f"{self.predicted_ms:.3g} ms, {share}, without the launch, by a model fitted on an H200")
            )
        else:
            facts.append(("predicted", f"none: {taken.rung} has no cost model for this problem"))
        missing = f"no row on {self.gpu}" if self.has_rows else "no rows: they are in a checkout of the repository"
        facts.append(("recorded", _recorded(taken.recorded) if taken.recorded else missing))
        return facts

    def _phases_title(self) -> str:
        p = self.problem
        u = f"(o + {p.padding})" if p.padding else "o"
        if p.stride == 1:
            return f"one phase; output o is in column j = {u}"
        return f"{p.stride} phases; output o has phase {u} mod {p.stride} and is in column j = {u} div {p.stride}"

    def _phases(self) -> list[str]:
        taps, stride = self.problem.taps, self.problem.stride
        lines = []
        for r in range(min(stride, SHOWN_PHASES)):
            own = taps.of_phase(r)
            shown = [f"tap {k} reads x[j{f' - {taps.shift(k)}' if taps.shift(k) else ''}]" for k in own[:SHOWN_TAPS]]
            more = [f"{len(own) - SHOWN_TAPS} more"] if len(own) > SHOWN_TAPS else []
            lines.append(f"{r}: {', '.join(shown + more) or 'bias alone'}")
        return lines + ([f"and {stride - SHOWN_PHASES} more"] if stride > SHOWN_PHASES else [])


def _recorded(row: Row) -> str:
    share = "" if row.roofline is None else f", {row.roofline:.0%} of the roofline"
    conv1d = "" if row.conv1d_ms_p50 is None else f", conv1d {row.conv1d_ms_p50:.3g}"
    cudnn = "" if row.cudnn_ms_p50 is None else f"; cuDNN {row.cudnn_ms_p50:.3g}{conv1d}"
    frozen = ", weights frozen" if row.weights == FROZEN else ""
    return f"{row.ms_p50:.3g} ms{frozen}{share}{cudnn} ({row.workload}, {row.time[:10]}, commit {row.commit})"


def _verdict(one: Candidate) -> list[str]:
    times = [f"predicted {one.predicted_ms:.3g} ms"] if one.predicted_ms else []
    times += [f"recorded {one.recorded.ms_p50:.3g} ms"] if one.recorded else []
    return ["taken" if one.refusal is None else one.refusal, *([", ".join(times)] if times else [])]


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name in rows: "float32"."""
    return str(dtype).removeprefix("torch.")


def _table(lines) -> str:
    rows = ("".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in line) for line in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _aligned(pairs, width: int, indent: str = "") -> str:
    return "\n".join(f"{indent}{name:<{width}}  {text}" for name, text in pairs)
