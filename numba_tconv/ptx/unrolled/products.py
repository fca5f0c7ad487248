"""Products summed in registers; a switch where the pattern varies."""

from functools import partial

from llvmlite import ir
from numba import types

from numba_tconv.ptx.core import ANY, get, i16, i32, i64, instruction, item, local_of, put, switch
from numba_tconv.ptx.simulator.meanings import multiplied, multiplied_runs

from .runs import widened


def _products(builder, case, sums, a, b):
    read, totals = {}, {}
    for s, i, j in case:
        for key, value in ((("a", i), lambda i=i: get(builder, a, i)), (("b", j), lambda j=j: b(j))):
            if key not in read:
                read[key] = value()
        totals[s] = builder.fma(read["a", i], read["b", j], totals[s] if s in totals else get(builder, sums, s))
    for s, total in totals.items():
        put(builder, sums, s, total)


def multiply_add(cases):
    """(sums, a, b, case): ``sums[s] += a[i] * b[j]`` for every (s, i, j) of ``cases[case]``."""

    @instruction(partial(multiplied, cases), ANY, ANY, ANY, types.int32)
    def multiply_add_of(context, builder, sig, args):
        sums, a, b = (local_of(context, builder, sig, args, k) for k in range(3))

        def code(products):
            return lambda: _products(builder, products, sums, a, lambda j: get(builder, b, j))

        switch(builder, args[3], [code(products) for products in cases])

    return multiply_add_of


def multiply_runs(element, cases, outputs, granule, granules, runs):
    """(sums, a, source, first, hop, case): ``sums[r*outputs + s] += a[i] * source[first + r*hop + j]``.

    For r below ``runs`` and every (s, i, j) of ``cases[case]``; 16-bit elements. A run is ``granules`` aligned loads of
    ``granule`` elements; ``hop`` is a multiple of ``granule``. All loads come first."""

    meaning = partial(multiplied_runs, element, cases, outputs, granule, granules, runs)

    @instruction(meaning, ANY, ANY, ANY, types.intp, types.int32, types.int32)
    def multiply_runs_of(context, builder, sig, args):
        sums, a = (local_of(context, builder, sig, args, k) for k in range(2))
        words = [_load(context, builder, sig, args, r) for r in range(runs)]

        def wide(place):
            r, j = place
            return widened(builder, element.name, *words[r][j])

        def code(products):
            of_runs = [(r * outputs + s, i, (r, j)) for r in range(runs) for s, i, j in products]
            return lambda: _products(builder, of_runs, sums, a, wide)

        switch(builder, args[5], [code(products) for products in cases])

    def _load(context, builder, sig, args, r):
        kind = i16 if granule == 1 else i32 if granule == 2 else ir.VectorType(i32, granule // 2)
        hop = builder.mul(builder.sext(args[4], i64), ir.Constant(i64, r))
        first = item(context, builder, sig.args[2], args[2], builder.add(args[3], hop))
        pointer = builder.bitcast(first, ir.PointerType(kind))
        found = []
        for g in range(granules):
            value = builder.load(builder.gep(pointer, [ir.Constant(i64, g)]), align=2 * granule)
            if granule == 1:
                found.append((builder.zext(value, i32), 0))
            else:
                parts = [value]
                if granule > 2:
                    parts = [builder.extract_element(value, ir.Constant(i32, z)) for z in range(granule // 2)]
                found += [(part, half) for part in parts for half in range(2)]
        return found

    return multiply_runs_of
