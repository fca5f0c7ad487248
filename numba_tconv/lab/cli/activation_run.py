"""Command ``activations``."""

from __future__ import annotations

import sys

from numba_tconv.lab.measure import bench, rows
from numba_tconv.lab.studies import activations

from . import commands


def run_activations(arguments) -> int:
    dtypes = list(dict.fromkeys(arguments.dtype or activations.DTYPES))
    commands.require_gpu()
    rows.check_writable(arguments.out, activations.Timed)
    activations.compile_all(dtypes)
    wrong = False
    for case in activations.cases(dtypes):
        try:
            row = activations.measure(*case)
        except bench.WrongResult as error:
            wrong = True
            print(f"numba_tconv: {error}", file=sys.stderr)
            continue
        rows.append(arguments.out, [row], activations.Timed)
        print(activations.describe(row), flush=True)
    print(f"rows added to {arguments.out}")
    return commands.FAILED if wrong else 0
