"""The problems in float64 on tensor cores among those for compute-sanitizer (sanitized.py)."""

from __future__ import annotations

import torch

from numba_tconv.kernels import device, k5_dmma_config

# Of the rows of sanitized.py: rows of x in vectors and in elements; tiles of columns, of rows and of groups; unequal
# and many taps; outputs that no tap reaches.
REASONS = (
    *("rows of x and y at 16 bytes", "rows at 4 bytes, every fourth alike", "several tiles a block and warpgroup"),
    *("samples that share windows, filled by elements", "tails of channels and rows", "groups of part of a stage"),
    *("x one element past 16 bytes", "x transposed", "y at 16 bytes, which k4 stores in vectors"),
    *("y one element past 16 bytes, for k4", "resident, tiles of rows", "resident, chunks of taps"),
    *("empty slots, by fours", "unequal taps, a phase a block", "a column left over", "split operands"),
)


def double_cases(rows):
    """Of each row the arguments of a Forward: with the tile that so small a problem gets, and with one whose products
    take eight channels."""
    for reason in REASONS:
        row = rows[reason]
        case = dict(reason=reason, problem=row.problem, dtype=torch.float64, precision="fp64")
        case |= dict(layout=row.layout, offset=row.offset)
        yield case
        if row.layout == "contiguous" and not row.offset:
            x_vector = 1 if row.problem.length % 2 else 2
            configs = k5_dmma_config.candidates(row.problem, x_vector, device.current_device())
            yield case | dict(config=next(configs))
