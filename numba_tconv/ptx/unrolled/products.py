"""Products summed in registers; a switch where the pattern varies."""

from llvmlite import ir
from numba import types

from numba_tconv.ptx.core import i16, i32, i64, instruction, item
from numba_tconv.ptx.simulator.meanings import multiplied, multiplied_runs

from .runs import get, local_of, put, widened


def _switch(builder, case, codes):
    if len(codes) == 1:
        codes[0]()
        return
    after = builder.append_basic_block("multiplied")
    blocks = [builder.append_basic_block(f"case{number}") for number in range(len(codes))]
    switch = builder.switch(case, blocks[-1])
    for number, block in enumerate(blocks):
        if number < len(codes) - 1:
            switch.add_case(ir.Constant(i32, number), block)
        builder.position_at_end(block)
        codes[number]()
        builder.branch(after)
    builder.position_at_end(after)


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

    @instruction(lambda sums, a, b, case: multiplied(cases, sums, a, b, case))
    def multiply_add_of(typingctx, sums, a, b, case):
        def codegen(context, builder, sig, args):
            arrays = [local_of(context, builder, sig, args, k) for k in range(3)]
            sums, a, b = arrays

            def code(products):
                return lambda: _products(builder, products, sums, a, lambda j: get(builder, b, j))

            _switch(builder, args[3], [code(products) for products in cases])
            return context.get_dummy_value()

        return types.void(sums, a, b, types.int32), codegen

    return multiply_add_of


def multiply_runs(element, cases, outputs, granule, granules, runs):
    """(sums, a, source, first, hop, case): ``sums[r*outputs + s] += a[i] * source[first + r*hop + j]``.

    For r below ``runs`` and every (s, i, j) of ``cases[case]``; 16-bit elements. A run is ``granules`` aligned loads of
    ``granule`` elements; ``hop`` is a multiple of ``granule``. All loads come first."""

    @instruction(lambda *arguments: multiplied_runs(element, cases, outputs, granule, granules, runs, *arguments))
    def multiply_runs_of(typingctx, sums, a, source, first, hop, case):
        def codegen(context, builder, sig, args):
            totals, factors = (local_of(context, builder, sig, args, k) for k in range(2))
            words = [_load(context, builder, sig, args, r) for r in range(runs)]

            def code(products):
                return lambda: _products(
                    builder,
                    [(r * outputs + s, i, (r, j)) for r in range(runs) for s, i, j in products],
                    totals,
                    factors,
                    lambda place: widened(builder, element.name, *words[place[0]][place[1]]),
                )

            _switch(builder, args[5], [code(products) for products in cases])
            return context.get_dummy_value()

        return types.void(sums, a, source, types.intp, types.int32, types.int32), codegen

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
