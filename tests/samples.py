"""Made-up rows for tests."""

from numba_tconv.lab.measure import workloads
from numba_tconv.lab.measure.rows import Row
from numba_tconv.lab.report import readme
from numba_tconv.lab.studies.activations import Timed as Activated
from numba_tconv.lab.studies.decoder_modes import Timed as InMode
from numba_tconv.lab.studies.decoder_times import Timed
from numba_tconv.lab.studies.kernelbench import Result
from numba_tconv.lab.studies.streaming import Timed as Stepped

SLOWER = {"k1_gather": 25.0, "k2_polyphase": 12.0, "k3_shared_tile": 4.5, "k4_register_tile": 1.4}
WHERE = dict(
    time="2026-01-02T03:04:05Z",
    commit="0123abc",
    gpu="NVIDIA H200",
    driver="580.1",
    torch="2.11.0",
    cudnn="9.19.0",
    numba_cuda="0.30.4",
)


def empty(names):
    return "".join("{}\n{}\n".format(*readme.markers(name)) for name in names)


EMPTY_README, EMPTY_RESULTS = empty(readme.FRONT), empty(readme.RESULTS)


def row(workload="kb64", rung="k4_register_tile", *, slower=1.4, dtype="float32", precision="ieee", **values):
    """A row of a workload, perhaps resized, that took ``slower`` times the floor."""
    problem = (workloads.get(workload) if isinstance(workload, str) else workload).problem
    floor = problem.floor_ms(4, precision)
    ms = floor * slower
    made = dict(
        workload=workload if isinstance(workload, str) else workload.name,
        direction="forward",
        rung=rung,
        dtype=dtype,
        precision=precision if dtype == "float32" else dtype,
        weights="call",
        length=problem.length,
        ms_p20=ms * 0.99,
        ms_p50=ms,
        ms_p80=ms * 1.01,
        cudnn_ms_p50=floor * 2.5,
        conv1d_ms_p50=floor * 1.6,
        gbps=problem.min_bytes(4) / ms / 1e6,
        tflops=problem.flops / ms / 1e9,
        roofline=1 / slower,
        relerr=3e-7,
        cudnn_relerr=2e-7,
    )
    return Row(**WHERE | made | values)


def ladder(workload="kb64", **values):
    return [row(workload, rung, slower=slower, **values) for rung, slower in SLOWER.items()]


def sweep(batch=16):
    lengths = (2**10, 2**14, 2**20)
    return [row for n in lengths for row in ladder(workloads.at_length(workloads.get("kb64"), n, batch))]


def result(problem=64, **values):
    made = dict(weights="call", ms_mean=1.5, torch_ms_mean=4.5, trials=5, passed=5)
    errors = dict(relerr=2e-4, torch_relerr=3e-4, largest_error=4e-4, torch_largest_error=5e-4)
    return Result(**WHERE | made | errors | dict(problem=problem) | values)


def timed(decoder="dac", dtype="float32", **values):
    """A decoder of 40 ms, of which torch's transposed convolutions take half, and ours a third of that half."""
    made = dict(
        transformers="5.23.0",
        decoder=decoder,
        dtype=dtype,
        precision="tf32" if dtype == "float32" else dtype,
        weights="call",
        batch=4,
        seconds=4.0,
        calls=4,
        layers_ms_p50=7.0,
        torch_layers_ms_p50=21.0,
        ms_p50=26.0,
        torch_ms_p50=40.0,
        relerr=3e-4,
        torch_relerr=2e-4,
    )
    return Timed(**WHERE | made | values)


def in_mode(decoder="dac", mode="eager", **values):
    """A decoder that is four times as fast as torch's."""
    sizes = dict(decoder=decoder, mode=mode, dtype="float32", batch=4, seconds=4.0, activations=0)
    made = dict(ms_p50=10.0, torch_ms_p50=40.0, relerr=3e-4, torch_relerr=2e-4)
    return InMode(**WHERE | sizes | made | values)


def activated(direction="forward", **values):
    """An activation that is five times as fast as torch's."""
    sizes = dict(batch=4, channels=24, length=96_000, dtype="float32", direction=direction)
    made = dict(ms_p50=0.1, torch_ms_p50=0.5, relerr=1e-7, torch_relerr=2e-7)
    return Activated(**WHERE | sizes | made | values)


def stepped(layer="mimi_1", **values):
    """A step in a graph, three times as fast as by hand."""
    sizes = dict(layer=layer, dtype="float32", batch=1, frames=1, mode="graph")
    made = dict(us_p50=10.0, by_hand_us_p50=30.0, relerr=3e-7, by_hand_relerr=2e-4)
    return Stepped(**WHERE | sizes | made | values)
