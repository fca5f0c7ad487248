"""Sums of products from shared memory, and copies in vectors.

Threads of a warp load the same weights, which is one broadcast. Granules without a product are not loaded."""

from functools import partial

from llvmlite import ir
from numba import types

from numba_tconv.ptx.core import ANY, asm, get, i32, i64, instruction, item, local_of, put, shared_item
from numba_tconv.ptx.simulator.meanings import copied_vectors, gathered, multiplied_window

from .runs import load_as, pack_vector, store_as, widened

GRANULE = 4  # elements of a load


def multiply_window(element, products, apart):
    """(sums, inputs, at, weights, first): ``sums[s] += weights[first + i] * inputs[at + j]``.

    For every (s, i, j) of ``products``; with ``apart`` a sum's products are added up first. ``inputs`` (stored
    elements) and ``weights`` (accumulators) are shared. ``at`` is a multiple of GRANULE; both first elements are
    aligned to 16 bytes, or to a granule if less."""
    size = element.storage.bitwidth // 8
    each = 128 // element.accumulator.bitwidth

    @instruction(partial(multiplied_window, element, products, apart), ANY, ANY, types.intp, ANY, types.intp)
    def multiply_window_of(context, builder, sig, args):
        local = local_of(context, builder, sig, args, 0)
        kind = context.get_value_type(element.accumulator)
        factors, window, totals = {}, {}, {}

        def load_weights(i):
            pointer = item(context, builder, sig.args[3], args[3], builder.add(args[4], ir.Constant(i64, i)))
            vector = load_as(builder, pointer, ir.VectorType(kind, each))
            for z in range(each):
                factors[i + z] = builder.extract_element(vector, ir.Constant(i32, z))

        def load_window(j):
            pointer = item(context, builder, sig.args[1], args[1], builder.add(args[2], ir.Constant(i64, j)))
            if size == 2:
                words = load_as(builder, pointer, ir.VectorType(i32, GRANULE // 2), 8)
                for z in range(GRANULE):
                    word = builder.extract_element(words, ir.Constant(i32, z // 2))
                    window[j + z] = widened(builder, element.name, word, z % 2)
                return
            lanes = 16 // size
            for v in range(0, GRANULE, lanes):
                place = builder.gep(pointer, [ir.Constant(i64, v)])
                vector = load_as(builder, place, ir.VectorType(kind, lanes))
                for z in range(lanes):
                    window[j + v + z] = builder.extract_element(vector, ir.Constant(i32, z))

        for s, i, j in products:
            if i not in factors:
                load_weights(i // each * each)
            if j not in window:
                load_window(j // GRANULE * GRANULE)
            if s not in totals and not apart:
                totals[s] = get(builder, local, s)
            if s in totals:
                totals[s] = builder.fma(factors[i], window[j], totals[s])
            else:
                totals[s] = builder.fmul(factors[i], window[j])
        for s, total in totals.items():
            put(builder, local, s, builder.fadd(get(builder, local, s), total) if apart else total)

    return multiply_window_of


def spread(runs, length):
    """(sums, values): ``sums[r*length:][:length] = values[r]`` for r below ``runs``."""

    def meaning(sums, values):
        for r in range(runs):
            sums[r * length : (r + 1) * length] = values[r]

    @instruction(meaning, ANY, ANY)
    def spread_of(context, builder, sig, args):
        target, source = (local_of(context, builder, sig, args, k) for k in range(2))
        for r in range(runs):
            value = get(builder, source, r)
            for z in range(length):
                put(builder, target, r * length + z, value)

    return spread_of


def store_runs(runs, length, stride):
    """(shared, index, sums): ``shared[index + r*stride:][:length] = sums[r*length:][:length]``, r < ``runs``."""

    def meaning(shared, index, sums):
        for r in range(runs):
            shared[index + r * stride :][:length] = sums[r * length : (r + 1) * length]

    @instruction(meaning, ANY, types.intp, ANY)
    def store_runs_of(context, builder, sig, args):
        source = local_of(context, builder, sig, args, 2)
        target = item(context, builder, sig.args[0], args[0], args[1])
        for r in range(runs):
            for z in range(length):
                put(builder, target, r * stride + z, get(builder, source, r * length + z))

    return store_runs_of


def copy_vectors(count, hop):
    """(shared, s, source, g): cp.async of 16 bytes from ``source[g + v*hop:]`` to ``shared[s + v*hop:]``.

    For v below ``count``; all are 16-byte aligned."""

    @instruction(partial(copied_vectors, count, hop), ANY, types.intp, ANY, types.intp)
    def copy_vectors_of(context, builder, sig, args):
        target = shared_item(context, builder, sig.args[0], args[0], args[1])
        origin = builder.ptrtoint(item(context, builder, sig.args[2], args[2], args[3]), i64)
        size = sig.args[0].dtype.bitwidth // 8
        for v in range(count):
            text = f"cp.async.cg.shared.global [$0+{v * hop * size}], [$1+{v * hop * size}], 16;"
            asm(builder, ir.VoidType(), [target, origin], text, "r,l,~{memory}")

    return copy_vectors_of


def store_gathered(element, count, shared_hop, hop):
    """(target, index, shared, places): 16 bytes to ``target[index + v*hop:]`` for v below ``count``.

    Element z is ``shared[places[z] + v*shared_hop]``, narrowed. Places in ``target`` are 16-byte aligned."""
    vector = 128 // element.storage.bitwidth

    @instruction(partial(gathered, element, count, shared_hop, hop), ANY, types.intp, ANY, ANY)
    def store_gathered_of(context, builder, sig, args):
        local = local_of(context, builder, sig, args, 3)
        sources = [
            item(context, builder, sig.args[2], args[2], builder.sext(get(builder, local, z), i64))
            for z in range(vector)
        ]
        goes_to = item(context, builder, sig.args[0], args[0], args[1])
        for v in range(count):
            value = pack_vector(builder, element, [get(builder, source, v * shared_hop) for source in sources])
            store_as(builder, value, builder.gep(goes_to, [ir.Constant(i64, v * hop)]))

    return store_gathered_of
