"""Steps of decoders' layers: ours against those written by hand, in turns, eager and in CUDA graphs.

By hand, as in Moshi's Python, a step adds the last tail. STEPS steps follow each other between two
events, so weights that fit are in L2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from numba_tconv import streaming
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure import bench, machine, rows
from numba_tconv.lab.measure.timing import Contestant, captured, interleave, quantile
from numba_tconv.lab.report import tables as table

FILE = Path("streaming", "layers.csv")
STEPS = 20
FRAMES, BATCHES, DTYPES = (1, 2, 4, 8), (1, 8, 64), ("float32", "bfloat16")
EAGER, GRAPH = "eager", "graph"


def _layer(channels, kernel_size, stride, groups=1, bias=True):
    return Problem(1, *channels, kernel_size, 1, stride, groups=groups, bias=bias)


LAYERS = {
    "mimi_upsample": _layer((512, 512), 4, 2, groups=512, bias=False),
    "mimi_1": _layer((1024, 512), 16, 8),
    "mimi_2": _layer((512, 256), 12, 6),
    "mimi_3": _layer((256, 128), 10, 5),
    "mimi_4": _layer((128, 64), 8, 4),
    "qwen3_omni_upsample": _layer((1024, 1024), 2, 2),
    "qwen3_omni_1": _layer((1536, 768), 16, 8),
    "qwen3_omni_2": _layer((768, 384), 10, 5),
    "qwen3_omni_3": _layer((384, 192), 8, 4),
    "qwen3_omni_4": _layer((192, 96), 6, 3),
    "encodec_1": _layer((512, 256), 16, 8),
    "encodec_2": _layer((256, 128), 10, 5),
    "encodec_3": _layer((128, 64), 8, 4),
    "encodec_4": _layer((64, 32), 4, 2),
}


@dataclass(frozen=True)
class Timed(machine.Measured):
    """Median microseconds of a step of ``frames`` new ones a slot, and errors of STEPS outputs."""

    layer: str
    dtype: str
    batch: int
    frames: int
    mode: str
    us_p50: float
    by_hand_us_p50: float
    relerr: float
    by_hand_relerr: float


def by_hand(x, tail, weight, bias, stride: int, groups: int) -> torch.Tensor:
    """A step from ``tail`` (N, C_out, K - stride), incomplete outputs, updated in place."""
    y = torch.conv_transpose1d(x, weight, bias, stride, groups=groups)
    kept = tail.shape[2]
    if not kept:
        return y
    y[:, :, :kept] += tail
    new = y[:, :, -kept:]
    tail.copy_(new if bias is None else new - bias[:, None])
    return y[:, :, :-kept]


@dataclass
class Side:
    """``run()`` returns a step's outputs and updates ``kept``."""

    run: Callable[[], torch.Tensor]
    kept: torch.Tensor

    def error(self, x: torch.Tensor, chunks: torch.Tensor, whole: torch.Tensor) -> float:
        self.kept.zero_()
        outputs = []
        for chunk in chunks:
            x.copy_(chunk)
            outputs.append(self.run().double())
        return ((torch.cat(outputs, dim=2) - whole).norm() / whole.norm()).item()


def sides(problem: Problem, x, weight, bias) -> list[Side]:
    """Ours, and by hand."""
    p = problem
    state = streaming.initial_state(x.shape[0], weight, p.stride)
    tail = x.new_zeros((x.shape[0], p.out_channels, max(0, p.kernel_size - p.stride)))
    return [
        Side(lambda: streaming.step(x, state, weight, bias, p.stride, p.groups), state),
        Side(lambda: by_hand(x, tail, weight, bias, p.stride, p.groups), tail),
    ]


def measure(name: str, dtype: str, batch: int, frames: int, repeats: int = 20) -> list[Timed]:
    """Rows, eager and in graphs, on torch's current GPU with its default switches."""
    p, kind = LAYERS[name], bench.DTYPES[dtype]
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(kind)

    weight = random(*p.weight_shape)
    bias = random(p.out_channels) if p.bias else None
    chunks = random(STEPS, batch, p.in_channels, frames)
    x = chunks[0].clone()
    with torch.no_grad(), bench.torch_switches(tf32=True):
        both = sides(p, x, weight, bias)
        signal = torch.cat(list(chunks), dim=2).double()
        whole = torch.conv_transpose1d(
            signal, weight.double(), None if bias is None else bias.double(), p.stride, groups=p.groups
        )
        errors = [one.error(x, chunks, whole[:, :, : signal.shape[2] * p.stride]) for one in both]
        found = []
        for mode in (EAGER, GRAPH):
            times = microseconds([_many(one.run) for one in both], mode, repeats, f"{name} {dtype} {batch} x {frames}")
            sizes = dict(layer=name, dtype=dtype, batch=batch, frames=frames, mode=mode)
            medians = dict(us_p50=times[0], by_hand_us_p50=times[1])
            found.append(Timed(**machine.measured(), **sizes, **medians, relerr=errors[0], by_hand_relerr=errors[1]))
    return found


def microseconds(calls: list[Callable[[], None]], mode: str, repeats: int, label: str) -> list[float]:
    """Median microseconds a step of each of ``calls``, in turns."""
    runs = calls if mode == EAGER else [captured(call)[0].replay for call in calls]
    contestants = [Contestant(run, prepare=torch.cuda.synchronize) for run in runs]
    interleave(contestants, repeats, math.inf, f"{label} {mode}", flushes=0)
    return [1e3 / STEPS * quantile(one.times(), 0.5) for one in contestants]


def _many(run: Callable[[], object]) -> Callable[[], None]:
    def call():
        for _ in range(STEPS):
            run()

    return call


def describe(row: Timed) -> str:
    return (
        f"{row.layer} {row.dtype}, {row.batch} x {row.frames} frames, {row.mode}: {row.us_p50:.4g} us a step"
        f" (by hand {row.by_hand_us_p50:.4g}), error {row.relerr:.2e} (by hand {row.by_hand_relerr:.2e})"
    )


def markdown(results: list[Timed]) -> str:
    newest = rows.newest(results, lambda row: (row.layer, row.dtype, row.batch, row.frames, row.mode))
    lines = dict.fromkeys((layer, dtype, batch) for layer, dtype, batch, *_ in newest)
    most = sorted({row.frames for row in results})
    header = ["layer", "dtype", "batch", *(f"T = {frames}" for frames in most), f"eager, T = {most[0]}"]
    return table.markdown(header, [_cells(line, most, newest) for line in sorted(lines, key=_place)])


def render(results: list[Timed]) -> str:
    if not (results := rows.of_main_gpu(results)):
        return ""
    said = "Microseconds a step of T new frames in a CUDA graph (median), and how many times as fast as by hand"
    rest = "Weights are in the L2 cache where they fit"
    return f"## Streaming\n\n{said}, {table.where(results)}. {rest}.\n\n{markdown(results)}"


def _place(line: tuple) -> tuple:
    layer, dtype, batch = line
    names = [*LAYERS, layer]
    return names.index(layer), layer, dtype != "float32", dtype, batch


def _cells(line: tuple, most: list[int], newest: dict[tuple, Timed]) -> list[str]:
    timed = [newest.get((*line, frames, GRAPH)) for frames in most] + [newest.get((*line, most[0], EAGER))]
    cells = (f"{row.us_p50:.1f}, {row.by_hand_us_p50 / row.us_p50:.1f}x" if row else "-" for row in timed)
    return [*map(str, line), *cells]
