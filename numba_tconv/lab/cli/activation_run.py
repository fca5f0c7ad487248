"""Command ``activations``."""

from __future__ import annotations

from numba_tconv.lab.measure import rows
from numba_tconv.lab.studies import activations

from . import commands


def run_activations(arguments) -> int:
    dtypes = list(dict.fromkeys(arguments.dtype or activations.DTYPES))
    commands.require_gpu()
    rows.check_writable(arguments.out, activations.Timed)
    activations.compile_all(dtypes)
    cases = activations.cases(dtypes)
    return commands.record_each(cases, activations.measure, activations.describe, arguments.out)
