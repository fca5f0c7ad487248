"""The last step of k6 on the CPU: staged and written lane by lane in plain Python, every output is its own sum.

The device functions run as they are, with the few instructions that Python has no word for replaced by their meanings,
which also refuse addresses that the instructions refuse.
"""

from collections import Counter
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from numba_tconv.kernels import k6_config, tensor_store
from numba_tconv.kernels.tensor_tile import DTYPES, SECTOR
from numba_tconv.problem import Problem

WARPS, LANES = 4, 32
# Stride, kernel size, dilation, output channels: one phase, two, eight; phases without taps; a dilation; parts; single.
# Of most the channels fill their tile, so that runs inside of a sample go by ``store_inside``.
SHAPES = [
    (1, 3, 1, 16),
    (2, 4, 1, 8),
    (2, 4, 1, 9),
    (8, 16, 1, 5),
    (5, 3, 1, 4),
    (3, 7, 2, 6),
    (130, 140, 1, 2),
    (2, 3, 2, 8),
]


@pytest.fixture
def in_python(monkeypatch):
    """tensor_store with Python's meanings; ``staged`` and ``written`` count what was written where."""

    def same(value):
        return value

    def ld_shared(count, kind):
        def load(address):
            assert address % (4 * count) == 0
            return tuple(state.shared[address // 4 + z] for z in range(count))

        return load

    def st_shared(address, *values):
        assert address % 16 == 0
        state.shared[address // 4 : address // 4 + 4] = values

    def st_global(count):
        def store(y, index, *words):
            outputs = [value for word in words for value in (word if isinstance(word, tuple) else (word,))]
            assert (state.shift + index) * state.itemsize % (4 * count) == 0
            for z, value in enumerate(outputs):
                y[index + z] = value

        return store

    class Output(dict):
        def __setitem__(self, index, value):
            state.written[int(index)] += 1
            super().__setitem__(int(index), float(value))

    state = SimpleNamespace(shared=None, shift=0, itemsize=4, written=Counter(), Output=Output)
    element = SimpleNamespace(load=same, store=same)
    monkeypatch.setattr(tensor_store, "ELEMENTS", dict.fromkeys(DTYPES.values(), element))
    for name in ("device_function", "bits_of"):
        monkeypatch.setattr(tensor_store, name, same)
    for name in ("pack_f16", "pack_bf16"):
        monkeypatch.setattr(tensor_store, name, lambda low, high: (low, high))
    for meaning in (ld_shared, st_shared, st_global):
        monkeypatch.setattr(tensor_store, meaning.__name__, meaning)
    monkeypatch.setattr(tensor_store.cuda, "jit", lambda **options: same)
    return state


def code(sample, column, channel, row):
    """A number that tells whose sum it is."""
    return 1.0 + row + 200 * (channel + 50 * (column + 5000 * sample))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_output_is_its_own_sum(in_python, shape, precision):
    @hypothesis.settings(max_examples=6, suppress_health_check=hypothesis.HealthCheck, deadline=None)
    @hypothesis.given(data=st.data())
    def run(data):
        stride, kernel_size, dilation, channels = shape
        # A few columns, or some tiles of them.
        length = data.draw(
            st.integers(1, 4) | (st.integers(250, 290) if stride < 100 else st.integers(5, 8)), label="length"
        )
        padding = data.draw(
            st.integers(0, min(2 * stride, ((length - 1) * stride + kernel_size - 1) // 2)), label="pad"
        )
        problem = Problem(
            *(data.draw(st.integers(1, 2), label="batch"), 8, channels, kernel_size, length),
            stride=stride,
            dilation=dilation,
            padding=padding,
        )
        check(in_python, problem, precision, data.draw(st.integers(0, SECTOR // 4), label="shift"))

    run()


def check(state, problem, precision, shift):
    p, config = problem, k6_config.choose(problem, precision)
    tile, (first, columns) = config.tile, k6_config.sample_columns(problem, config)
    state.itemsize, state.shift = tile.itemsize, shift * 4 // tile.itemsize
    state.shared, state.written = np.zeros(tile.staging), Counter()
    y = state.Output()
    output = SimpleNamespace(
        data_ptr=lambda: shift * 4, element_size=lambda: tile.itemsize
    )  # an output that begins ``shift`` words after a sector's boundary
    alignment = tensor_store.alignment_of(output, p, tile)
    stage_rows = tensor_store.make_stage_rows(tile)
    aim, aim_inside, store_inside, store_any = tensor_store.make_store(tile, WARPS, add_bias=True)
    staged_rows, out_channels = tile.rows // tile.rounds, p.out_channels
    for row_tile in range(tile.row_tiles(p)):
        row = row_tile % tile.row_parts * tile.phases
        co = row_tile // tile.row_parts * tile.channels
        left = min(tile.channels, out_channels - co)
        for column_tile in range(k6_config.column_tiles(p, config)):
            n, j = divmod(column_tile * tile.advance, columns)
            begin, n_next, begin_next, inside = aim(n, j, p.batch, columns, first, p.out_length, p.padding)
            whole = inside and left >= tile.channels
            heads = [aim_inside(n, begin, warp, co, out_channels, p.out_length) for warp in range(WARPS)]
            for round_ in range(tile.rounds):
                m0, done = round_ * staged_rows, round_ * tile.round_channels
                for warp in range(WARPS):
                    for lane in range(LANES):
                        values = sums_of(tile, problem, config, column_tile, row, co, m0, staged_rows, warp, lane)
                        stage_rows(values, 0, staged_rows, state.shared, 0, 0, 0, alignment[2], warp, lane)
                store = store_inside if whole else store_any
                for warp in range(WARPS):
                    for lane in range(LANES):
                        next_head = store(
                            *(heads[warp], y, state.shared, 0, 0, None, False, warp, lane, n, j, begin, n_next),
                            *(begin_next, row, co + done, left - done, p.batch, columns, first, out_channels),
                            *(p.out_length, p.padding, alignment),
                        )
                    heads[warp] = next_head
    every = p.batch * out_channels * p.out_length
    assert state.written == Counter(range(every)), "each output once, and nothing else"
    for index, value in y.items():
        rest, o = divmod(index, p.out_length)
        sample, channel = divmod(rest, out_channels)
        assert value == expected(problem, first, sample, channel, o)


def sums_of(tile, problem, config, column_tile, row, co, m0, count, warp, lane):
    """A lane's sums of ``count`` rows from ``m0`` on, in the order in which wgmma leaves them: see make_stage_rows."""
    columns = k6_config.sample_columns(problem, config)[1]
    values = np.zeros(count)
    for r in range(count // 4):
        m = m0 + r // 2 * 8 + (lane & 3) * 2 + r % 2
        channel, phase = divmod(m, tile.phases)
        for q in range(4):
            column = 32 * warp + lane // 4 * 4 + q
            sample, j = divmod(column_tile * tile.advance - tile.overlap + column, columns)
            values[4 * r + q] = code(sample, j, co + channel, row + phase)
    return values


def expected(problem, first, sample, channel, o):
    """The sum that reaches an output: zero where no row of taps that has taps does (taps.py)."""
    t, u = problem.taps, o + problem.padding
    if u % t.gap:
        return 0
    a = next(a for a in range(t.rows) if (u - a * problem.dilation) % problem.stride == 0)
    if a >= problem.kernel_size:
        return 0
    return code(sample, (u - a * problem.dilation) // problem.stride - first, channel, a)


def test_alignment_of_an_output():
    problem = Problem(1, 8, 8, 4, 100, stride=2, padding=1)
    tile = k6_config.choose(problem, "tf32").tile
    y = torch.empty(problem.out_channels * problem.out_length)
    assert problem.out_length % 4 == 0
    assert tensor_store.alignment_of(y, problem, tile) == (0, 4, 3)
    assert tensor_store.alignment_of(y, problem, tile, in_fours=True) == (0, 1, 0)
