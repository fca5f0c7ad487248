"""Command ``streaming``."""

from __future__ import annotations

from numba_tconv.lab.measure import rows
from numba_tconv.lab.studies import streaming

from . import commands


def run_streaming(arguments) -> int:
    names = list(dict.fromkeys(arguments.layers or streaming.LAYERS))
    if unknown := set(names) - set(streaming.LAYERS):
        raise commands.Mistake(f"no layer {min(unknown)!r}; there are {', '.join(streaming.LAYERS)}")
    commands.require_gpu()
    rows.check_writable(arguments.out, streaming.Timed)
    results = []
    for name in names:
        for dtype in arguments.dtype or streaming.DTYPES:
            for batch in arguments.batch or streaming.BATCHES:
                for frames in arguments.frames or streaming.FRAMES:
                    results += (found := streaming.measure(name, dtype, batch, frames))
                    rows.append(arguments.out, found, streaming.Timed)
    print(streaming.markdown(results))
    print(f"rows added to {arguments.out}")
    return 0
