"""Claims about speed that the recorded rows must show."""

from pathlib import Path

import pytest

from numba_tconv.lab.measure import rows

DATA = Path(__file__).resolve().parents[2] / "plots" / "data"


def newest(**wanted):
    """Milliseconds by length, of the newest rows with these columns."""
    found = rows.latest(row for row in rows.read_all(DATA) if "H200" in row.gpu).values()
    return {row.length: row.ms_p50 for row in found if all(getattr(row, name) == wanted[name] for name in wanted)}


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "tf32"), ("bfloat16", "bfloat16")])
def test_outputs_leave_in_aligned_runs_whatever_their_length(dtype, precision):
    """kb64 pads nothing: 65,534 inputs make rows of 65,536 outputs, which begin at sectors, 65,536 make 65,538."""
    ms = newest(workload="kb64@batch16", direction="forward", rung="k6_wgmma", dtype=dtype, precision=precision)
    assert ms[65536] / ms[65534] <= 1.1
