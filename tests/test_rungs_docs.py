"""The measured figures that a rung's file opens with are those of the recorded rows."""

import re
import sys
from pathlib import Path

import pytest

from numba_tconv import rows
from numba_tconv.kernels import LADDER

DATA = Path(__file__).resolve().parents[1] / "plots" / "data"
STATED = re.compile(r"^Measured \(H200, kb64, float32\): ([\d.]+) ms(?:, ([\d.]+) times (k\d+))?\.$", re.MULTILINE)


def recorded():
    """Milliseconds by rung, in the order of the ladder: the newest rows of kb64 in full precision."""
    newest = rows.latest(row for row in rows.read_all(DATA) if "H200" in row.gpu).values()
    kb64 = ("kb64", "float32", "ieee")
    ms = {row.rung: row.ms_p50 for row in newest if (row.workload, row.dtype, row.precision) == kb64}
    return {rung.name: ms[rung.name] for rung in LADDER if rung.name in ms}


RECORDED = recorded()


@pytest.mark.parametrize("rung", [rung for rung in LADDER if rung.name in RECORDED], ids=lambda rung: rung.name)
def test_the_stated_gain_is_the_recorded_one(rung):
    (ms, times, below), *more = STATED.findall(sys.modules[type(rung).__module__].__doc__)
    assert not more
    assert float(ms) == pytest.approx(RECORDED[rung.name], rel=0.05)
    names = list(RECORDED)
    lower = names[names.index(rung.name) - 1] if rung.name != names[0] else ""
    assert below == lower.partition("_")[0]
    if lower:
        assert float(times) == pytest.approx(RECORDED[lower] / RECORDED[rung.name], rel=0.05)
