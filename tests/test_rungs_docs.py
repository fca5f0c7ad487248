"""The measured figures in the rungs' docstrings are those of the recorded rows."""

import re
import sys
from pathlib import Path

import pytest

from numba_tconv.lab.measure import rows
from numba_tconv.selection.registry import LADDER

DATA = Path(__file__).resolve().parents[1] / "plots" / "data"
STATED = re.compile(
    r"^Measured \(H200, kb64, (float32|tf32)\): ([\d.]+) ms(?:, ([\d.]+) times (k\d+))?\.$", re.MULTILINE
)


def recorded(precision):
    """Milliseconds by rung, in the ladder's order: the newest rows of kb64 in ``precision``."""
    newest = rows.latest(row for row in rows.read_all(DATA) if "H200" in row.gpu).values()
    kb64 = ("kb64", "float32", precision)
    ms = {row.rung: row.ms_p50 for row in newest if (row.workload, row.dtype, row.precision) == kb64}
    return {rung.name: ms[rung.name] for rung in LADDER if rung.name in ms}


# By a docstring's word: rungs on CUDA cores in full precision, on tensor cores in TF32.
RECORDED = {"float32": recorded("ieee"), "tf32": recorded("tf32")}
EVERY = [(arithmetic, name) for arithmetic, ms in RECORDED.items() for name in ms]


@pytest.mark.parametrize(("arithmetic", "name"), EVERY)
def test_the_stated_gain_is_the_recorded_one(arithmetic, name):
    rung, ms = next(rung for rung in LADDER if rung.name == name), RECORDED[arithmetic]
    (stated_of, stated_ms, times, below), *more = STATED.findall(sys.modules[type(rung).__module__].__doc__)
    assert not more
    assert stated_of == arithmetic
    assert float(stated_ms) == pytest.approx(ms[name], rel=0.05)
    names = list(ms)
    lower = names[names.index(name) - 1] if name != names[0] else ""
    assert below == lower.partition("_")[0]
    if lower:
        assert float(times) == pytest.approx(ms[lower] / ms[name], rel=0.05)
