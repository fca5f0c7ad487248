"""What ptx/unrolled computes, for the simulator."""

import numpy as np


def _wide(element, values):
    if element.name == "bfloat16":
        return (np.asarray(values, dtype=np.uint32) << 16).view(np.float32)
    return values


def _whole(array, index, count, size):
    """Raise unless ``count`` elements follow, aligned to ``size`` bytes."""
    if index < 0 or index + count > array.size:
        raise IndexError(f"elements {index} to {index + count} of {array.size}")
    if address(array, index) % size:
        raise ValueError(f"misaligned address: {size} bytes at element {index}")


def address(array, index):
    return array.__array_interface__["data"][0] + int(index) * array.itemsize


def run(element, count, window, source, first, skip):
    begin = int(first) + int(skip)
    vector = 128 // element.storage.bitwidth
    _whole(source, int(first), -(-(count + vector - 1) // vector) * vector, 16)
    window[:count] = _wide(element, source[begin : begin + count])


def guarded_run(element, count, window, source, at, stride, begin, length):
    for z in range(count):
        i = begin + z
        inside = 0 <= i < length
        window[z] = _wide(element, source[at + i * stride : at + i * stride + 1])[0] if inside else 0


def stored_run(element, target, index, values, at, count=None):
    count = count or 128 // element.storage.bitwidth
    _whole(target, int(index), count, count * element.storage.bitwidth // 8)
    for z in range(count):
        target[index + z] = element.store(values[at + z])


def multiplied(cases, sums, a, b, case):
    for s, i, j in cases[case]:
        sums[s] += a[i] * b[j]


def multiplied_runs(element, cases, outputs, granule, granules, runs, sums, a, source, first, hop, case):
    for r in range(runs):
        _whole(source, int(first) + r * int(hop), granules * granule, 2 * granule)
        for s, i, j in cases[case]:
            at = int(first) + r * int(hop) + j
            sums[r * outputs + s] += a[i] * _wide(element, source[at : at + 1])[0]


def multiplied_window(element, products, apart, sums, inputs, at, weights, first):
    totals = {}
    for s, i, j in products:
        place = int(at) + j
        product = weights[first + i] * _wide(element, inputs[place : place + 1])[0]
        totals[s] = (totals[s] if s in totals else (0 if apart else sums[s])) + product
    for s, total in totals.items():
        sums[s] = sums[s] + total if apart else total


def copied_vectors(count, hop, shared, s, source, g):
    size = 16 // shared.itemsize
    for v in range(count):
        _whole(source, int(g) + v * hop, size, 16)
        _whole(shared, int(s) + v * hop, size, 16)
        shared[s + v * hop :][:size] = source[g + v * hop :][:size]


def gathered(element, count, shared_hop, hop, target, index, shared, places):
    for v in range(count):
        values = [shared[place + v * shared_hop] for place in places]
        stored_run(element, target, int(index) + v * hop, values, 0)
