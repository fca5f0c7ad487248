"""README's claim."""

from collections.abc import Iterable
from statistics import geometric_mean as mean

from numba_tconv.lab.measure.rows import CALL, FROZEN, Row, grouped, latest, newest, of_main_gpu
from numba_tconv.lab.studies import decoder_modes, decoders, streaming
from numba_tconv.selection.directions import FORWARD, STEP

from .tables import EMPTY, where

ARITHMETIC = {"bfloat16": "bfloat16", "tf32": "TF32"}


def render(
    rows: Iterable[Row], decoders: Iterable[decoder_modes.Timed] = (), steps: Iterable[streaming.Timed] = ()
) -> str:
    """The selection's speed at full size, of a decoder and streaming, on the GPU with most rows."""
    picked = [row for row in rows if row.rung == "auto" and "@" not in row.workload]
    picked = of_main_gpu(row for row in picked if row.direction in (FORWARD, STEP) and row.precision in ARITHMETIC)
    shown = [row for row in latest(picked).values() if row.weights == CALL]
    if not shown:
        return EMPTY
    forward, training = ([row for row in shown if row.direction == direction] for direction in (FORWARD, STEP))
    gpu = shown[0].gpu
    sentences = [
        "Forward, against the faster of cuDNN's transposed convolution and the same layer as an expert's ordinary "
        f"`conv1d`: {_means(forward)}."
        if forward
        else "",
        _frozen(picked),
        f"A training step, against torch's: {_means(training)}." if training else "",
        "Geometric means of default calls over the layers in [the tables](plots/README.md), and their range "
        f"({where(shown)}).",
        _decoder([row for row in decoders if row.gpu == gpu]),
        _streaming([row for row in steps if row.gpu == gpu]),
    ]
    return "\n".join(filter(None, sentences))


def _decoder(rows: list[decoder_modes.Timed]) -> str:
    """The decoder with most alias-free activations, eager, at its largest batch."""
    found = [row for row in rows if row.mode == "eager" and row.activations]
    if not found:
        return ""
    last = max(found, key=lambda row: (row.activations, row.batch, row.time))
    same = [row for row in found if (row.decoder, row.batch, row.seconds) == (last.decoder, last.batch, last.seconds)]
    gains = ", ".join(
        f"{row.torch_ms_p50 / row.ms_p50:.1f} times as fast in {'TF32' if row.dtype == 'float32' else row.dtype}"
        for row in newest(same, lambda row: row.dtype).values()
    )
    which = f"{decoders.title(last.decoder)}, {last.batch} inputs of {last.seconds:g} s"
    how = "weights frozen, cuDNN without a search"
    return f"A whole decoder with alias-free activations ({which}; {how}): **{gains}**."


def _streaming(rows: list[streaming.Timed]) -> str:
    """Steps of one frame in a CUDA graph."""
    some = [row for row in rows if row.mode == streaming.GRAPH and row.frames == 1]
    last = newest(some, lambda row: (row.layer, row.dtype, row.batch)).values()
    gains = [row.by_hand_us_p50 / row.us_p50 for row in last]
    if not gains:
        return ""
    return (
        f"A streaming step of one frame in a CUDA graph, against the form by hand: **{mean(gains):.1f} times as fast** "
        f"({len({row.layer for row in last})} layers of decoders, {min(gains):.1f} to {max(gains):.1f})."
    )


def _means(rows: Iterable[Row]) -> str:
    return ", ".join(
        f"**{mean(found):.1f} times as fast in {name}** ({len(found)} layers, {min(found):.2f} to {max(found):.1f})"
        for name, found in _speedups(rows).items()
    )


def _speedups(rows: Iterable[Row]) -> dict[str, list[float]]:
    found = grouped(rows, lambda row: row.precision)
    return {
        name: [row.opponent_ms / row.ms_p50 for row in found[precision]]
        for precision, name in ARITHMETIC.items()
        if precision in found
    }


def _frozen(picked: list[Row]) -> str:
    both: dict[str, dict[tuple, Row]] = {
        weights: latest(row for row in picked if row.direction == FORWARD and row.weights == weights)
        for weights in (CALL, FROZEN)
    }
    keys = both[CALL].keys() & both[FROZEN].keys()
    called, frozen = (_speedups(some[key] for key in keys) for some in (both[CALL], both[FROZEN]))
    said = ", ".join(
        f"{mean(frozen[name]):.1f} instead of {mean(called[name]):.1f} times in {name} ({len(frozen[name])} layers)"
        for name in frozen
    )
    return said and f"With frozen weights, where both were timed: {said}."
