"""k5_dmma's problems in float64 for compute-sanitizer (sanitized.py)."""

from dataclasses import replace

import torch

from numba_tconv.kernels.k5_dmma.tile import RING, candidates, make
from numba_tconv.runtime.device import current_device

# Rows of sanitized.py: x in vectors and in elements; tiles of columns, rows and groups; unequal and many taps; outputs
# without taps.
REASONS = (
    *("rows of x and y at 16 bytes", "rows at 4 bytes, every fourth alike", "several tiles a block and warpgroup"),
    *("samples that share windows, filled by elements", "tails of channels and rows", "groups of part of a stage"),
    *("x one element past 16 bytes", "x transposed", "y at 16 bytes, which k4 stores in vectors"),
    *("y one element past 16 bytes, for k4", "resident, tiles of rows", "resident, chunks of taps"),
    "rows in rounds, a deeper ring",  # channels that fill the ring more than once
    *("empty slots, by fours", "unequal taps, a phase a block", "a column left over", "split operands"),
)


def double_cases(rows):
    """Each row's Forward arguments: the chosen tile, products of eight channels, and a ring of two such stages."""
    for reason in REASONS:
        row = rows[reason]
        case = dict(reason=reason, problem=row.problem, dtype=torch.float64, precision="fp64")
        case |= dict(layout=row.layout, offset=row.offset)
        yield case
        lies_well = row.layout == "contiguous" and not row.offset
        x_vector = 2 if lies_well and row.problem.length % 2 == 0 else 1
        if lies_well:
            yield case | dict(config=next(candidates(row.problem, x_vector, current_device())))
        if current_device().cc == (9, 0):
            ring = make(row.problem, RING.depth, RING, x_vector, ring=True)
            yield case | dict(config=replace(ring, y_vector=1) if row.offset else ring)
