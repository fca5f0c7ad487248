"""Tiles of the tensor-core rungs on the CPU: every output has one owner, and the owner has all that the output needs.

Ownership is emulated as in kernels/common/tensor_core/store_any.py: of each channel a tile owns the run [start - early,
start of the next - early of the next), where ``early`` is a start's distance from its sector.
"""

import itertools
from collections import Counter
from functools import lru_cache

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core.outputs import Output
from numba_tconv.kernels.common.tensor_core.store_any import alignment_of, make_aim
from numba_tconv.kernels.common.tensor_core.tile import (
    COLUMNS,
    LONGEST_STAGED_SPAN,
    ROWS,
    SECTOR,
    make_tile,
    round_sizes,
)
from numba_tconv.kernels.k6_wgmma import choose as k6_choose
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.lab.measure import workloads
from tests.gpu.common import TENSOR_CORES
from tests.thorough import at_most, thorough

SHARED_OF_AN_H200 = 227 * 1024  # bytes that a block may have
precisions = pytest.mark.parametrize("precision", thorough(DTYPES, always=["tf32x3", "bf16"]))
rungs = pytest.mark.parametrize("rung", TENSOR_CORES, ids=lambda rung: rung.name)


@st.composite
def problems(draw):
    """Sizes of several tiles, with few channels, since Python walks every output."""
    stride = draw(st.integers(1, 12) | st.sampled_from([16, 96, 97, 100, 130, 256]))
    dilation = draw(st.integers(1, 12) | st.sampled_from([16, 97, 130, 260]))
    kernel_size = draw(st.integers(1, 12) | st.sampled_from([31, 2 * stride, 2 * stride + 1]))
    length = draw(st.integers(1, 5) | st.integers(1, max(5, 600 // stride)))
    output_padding = draw(st.integers(0, max(stride, dilation) - 1))
    uncropped = (length - 1) * stride + dilation * (kernel_size - 1) + output_padding + 1
    cropped = st.integers(0, min(3 * stride, (uncropped - 1) // 2)) | st.integers(0, (uncropped - 1) // 2)
    # No input channel is walked, and few output channels.
    channels = draw(st.integers(1, 20)), draw(st.integers(1, 3) | st.sampled_from([16, 40, 129]))
    batch = draw(st.integers(1, 3))
    return Problem(
        *(batch, *channels, kernel_size, length, stride),
        padding=draw(cropped),
        output_padding=output_padding,
        dilation=dilation,
    )


def config_of(rung, problem, precision):
    """A rung's tile for a problem; skips examples that are refused for having none."""
    config = rung.choose(problem, precision)
    hypothesis.assume(config is not None)
    return config


@lru_cache
def columns_of(config, problem):
    if isinstance(config, k6_config.Config):
        return k6_config.sample_columns(problem, config), k6_config.column_tiles(problem, config)
    return config.tile.columns(problem), config.tile.column_tiles(problem)


def start(config, problem, column_tile):
    """Sample, column and output where a tile's outputs begin; the output need not exist."""
    tile, ((first, columns), _) = config.tile, columns_of(config, problem)
    n, j = divmod(column_tile * tile.advance, columns)
    return n, j, (first + j) * problem.stride - problem.padding


def early(tile, problem, n, channel, output, shift):
    return ((n * problem.out_channels + channel) * problem.out_length + output + shift) % tile.sector


def owned(config, problem, column_tile, row, channel, shift):
    """Samples, outputs and staging positions of all outputs of a channel that a tile owns."""
    tile, p, ((first, columns), _) = config.tile, problem, columns_of(config, problem)
    n, j, begin = start(config, p, column_tile)
    n_next, _, begin_next = start(config, p, column_tile + 1)
    stop = tile.advance * tile.span - early(tile, p, n_next, channel, begin_next, shift)
    whole, before = tile.whole, tile.overlap * tile.span
    e = np.arange(-early(tile, p, n, channel, begin, shift), stop)
    column, rest = np.divmod(e, tile.span)
    sample, i = n + (j + column) // columns, (j + column) % columns
    o = (first + i) * p.stride - p.padding + rest + (0 if whole else row * p.dilation)
    beyond = not whole and p.dilation == 1 and row + rest >= p.taps.rows
    there = (sample >= 0) & (sample < p.batch) & (o >= 0) & (o < p.out_length) & np.logical_not(beyond)
    return sample[there], o[there], e[there] + before


def row_and_column(problem, o):
    """The row of taps and the column that reach an output, or None (formula/taps.py)."""
    t, u = problem.taps, o + problem.padding
    if u % t.gap:
        return None
    a = next(a for a in range(t.rows) if (u - a * problem.dilation) % problem.stride == 0)
    return a, (u - a * problem.dilation) // problem.stride


@rungs
@precisions
@at_most(40)
@hypothesis.given(data=st.data())
def test_every_output_has_one_owner_that_computes_it(rung, precision, data):
    problem = data.draw(problems())
    config = config_of(rung, problem, precision)
    tile, ((first, columns), column_tiles) = config.tile, columns_of(config, problem)
    shift = data.draw(st.integers(0, SECTOR // tile.itemsize - 1))
    # Where column c and phase a are staged.
    staged = {c * tile.span + a * tile.spread: (c, a) for c in range(COLUMNS) for a in range(tile.phases)}
    assert len(staged) == COLUMNS * tile.phases
    places = np.array([row_and_column(problem, o) or (-1, 0) for o in range(problem.out_length)])
    for channel in {0, problem.out_channels // 2, problem.out_channels - 1}:
        owners = np.zeros((problem.batch, problem.out_length), int)
        for column_tile, part in itertools.product(range(column_tiles), range(tile.row_parts)):
            row = part * tile.phases
            sample, o, u = owned(config, problem, column_tile, row, channel, shift)
            np.add.at(owners, (sample, o), 1)
            (a, column), is_staged = places[o].T, np.isin(u, [*staged])
            reached = a >= 0
            assert np.all((column >= first) & (column - first < columns) | ~reached)
            computed = reached & (row <= a) & (a < row + tile.phases)
            assert np.all(is_staged == computed)
            # Without a tap the sum is zero.
            assert np.all(a[reached & ~computed] >= problem.kernel_size)
            c = sample * columns + column - first - (column_tile * tile.advance - tile.overlap)
            there = np.array([staged[place] for place in u[computed].tolist()]).reshape(-1, 2)
            assert np.array_equal(there, np.stack((c, a - row), axis=1)[computed])
        assert np.all(owners == 1)


@precisions
def test_columns_before_a_tile_hold_its_first_phases_and_early_sector(precision):
    seen = set()
    for stride, dilation in itertools.product(range(1, 20), repeat=2):
        problem = Problem(1, 8, 8, 8, 64, stride=stride, dilation=dilation)
        tile = make_tile(problem, precision)
        if tile and tile.whole:
            late = (problem.taps.rows - 1) * dilation // stride  # columns on, the last phase's outputs
            assert tile.overlap * tile.span >= late * stride + tile.sector - 1, problem
            seen.add(problem.taps.rows == 1)
    assert seen == {False, True}


@rungs
@pytest.mark.parametrize("precision", thorough(DTYPES, always=["bf16"]))
def test_tiles_that_are_stored_as_of_one_sample_own_outputs_of_no_other(rung, precision):
    """Wherever seams between samples meet tiles; one output a column, and two."""
    straight_tiles = 0
    for length, stride in itertools.product(range(300, 340), (1, 2)):
        problem = Problem(4, 32, 16, 2, length, stride=stride, padding=1)
        config = rung.choose(problem, precision)
        tile, ((first, columns), column_tiles) = config.tile, columns_of(config, problem)
        aim = make_aim(tile)[0].py_func
        for column_tile, shift in itertools.product(range(column_tiles), (0, 5)):
            n, j, _ = start(config, problem, column_tile)
            alignment = alignment_of(shift * tile.itemsize, problem, tile)
            sizes = problem.out_channels, problem.out_length, problem.padding
            out = Output(None, None, False, problem.batch, columns, first, *sizes, alignment)
            # A sample's last tile takes all of it.
            if aim(n, j, out)[1] and j > 0:
                straight_tiles += 1
                for channel in range(problem.out_channels):
                    samples, _, _ = owned(config, problem, column_tile, 0, channel, shift)
                    assert np.all(samples == n), (problem, column_tile, channel)
    assert straight_tiles


@rungs
@precisions
@hypothesis.given(data=st.data())
def test_windows_hold_every_input_and_zeros_between_samples(rung, precision, data):
    problem = data.draw(problems())
    config, t = config_of(rung, problem, precision), problem.taps
    tile, ((first, columns), _) = config.tile, columns_of(config, problem)
    chunks, vector = tile.tap_chunks(problem), 16 // tile.itemsize
    assert chunks * tile.tap_chunk >= t.taps_per_row
    assert chunks == 1 or tile.several_chunks
    # A window begins ``lead`` columns before the tile.
    assert tile.lead >= (tile.tap_chunk - 1) * t.step
    assert tile.lead % vector == tile.overlap % vector == tile.advance % vector == 0
    assert first <= 0
    assert first % vector == columns % vector == 0
    if tile.several_chunks:
        assert tile.chunk_shift == tile.tap_chunk * t.step
    assert (chunks - 1) * tile.tap_chunk + tile.last_taps(problem) == t.taps_per_row
    assert 1 <= tile.last_taps(problem) <= tile.tap_chunk
    # From a sample's first column, all chunks' taps read no input of the sample before, unless a tile has columns of
    # both.
    back = (chunks * tile.tap_chunk - 1) * t.step
    assert first + columns - back >= problem.length or (rung.name == "k6_wgmma" and columns % tile.advance == 0)
    assert tile.advance > 0
    assert tile.advance + tile.overlap == COLUMNS


@rungs
@precisions
@hypothesis.given(data=st.data())
def test_rows_are_every_channel_and_every_phase_with_taps(rung, precision, data):
    problem = data.draw(problems())
    tile = config_of(rung, problem, precision).tile
    assert tile.channels * tile.phases <= tile.rows <= ROWS
    computed = Counter()
    for row_tile in range(tile.row_tiles(problem)):
        for m in range(tile.channels * tile.phases):
            channel = row_tile // tile.row_parts * tile.channels + m // tile.phases
            a = row_tile % tile.row_parts * tile.phases + m % tile.phases
            if channel < problem.out_channels_per_group and a < problem.taps.rows:
                computed[channel, a] += 1
    assert set(computed.values()) == {1}
    active = min(problem.taps.rows, problem.kernel_size)
    assert computed.keys() >= set(itertools.product(range(problem.out_channels_per_group), range(active)))


@pytest.mark.parametrize(
    ("out_channels", "stride", "channels", "rows"),
    [(1, 1, 1, 8), (1, 97, 1, 104), (3, 3, 3, 16), (8, 1, 8, 8), (9, 1, 16, 16), (30, 6, 16, 96), (30, 5, 16, 80)],
)
def test_channels_beyond_a_core_matrix_come_in_whole_ones(out_channels, stride, channels, rows):
    tile = make_tile(Problem(1, 8, out_channels, 2 * stride, 64, stride=stride), "tf32")
    assert (tile.channels, tile.rows) == (channels, rows)


@pytest.mark.parametrize(("most_rows", "stride", "phases"), [(64, 64, 64), (64, 65, 64), (16, 40, 16), (128, 65, 65)])
def test_a_tile_has_no_more_rows_than_asked(most_rows, stride, phases):
    tile = make_tile(Problem(1, 8, 3, 2 * stride, 64, stride=stride), "tf32", most_rows)
    assert (tile.phases, tile.span) == (phases, phases)
    assert tile.rows <= most_rows


@rungs
@precisions
@hypothesis.given(data=st.data())
def test_channels_are_staged_in_equal_rounds_that_fit(rung, precision, data):
    problem = data.draw(problems())
    tile = config_of(rung, problem, precision).tile
    assert tile.channels == tile.rounds * tile.round_channels
    assert tile.round_channels in round_sizes(tile)
    # ``skip`` stays inside the channel's share of the buffer.
    last = (COLUMNS - 1) * tile.span + (tile.phases - 1) * tile.spread
    assert last + (last >> 5) * tile.skip < tile.pitch
    assert tile.round_channels * tile.pitch <= tile.staging


def check_k6(problem, precision):
    configs = k6_config.configs(problem, precision)
    if not configs:
        # Outputs too far apart for one tile; more rows a channel than tf32x3 has sums; no space for one round.
        tile = make_tile(problem, precision)
        if tile is None:
            assert problem.taps.gap > LONGEST_STAGED_SPAN
        else:
            assert (precision == "tf32x3" and tile.phases > 64) or tile.staging * 4 > SHARED_OF_AN_H200 // 4
            assert not tile.by_phases
        assert k6_choose.choose_whole(problem, precision) is None
        return
    assert k6_choose.choose_whole(problem, precision) in configs
    for config in configs:
        tile = config.tile
        assert config.shared_bytes <= SHARED_OF_AN_H200
        assert config.stages * config.depths >= 4
        assert config.depths in (1, config.unroll)
        most = config.stages * config.depths == k6_config.MOST_STAGES
        assert (config.depths == config.unroll) == (config.unroll == 1 or most)
        assert config.ring % 128 == config.stage_bytes % 128 == config.staging % 16 == config.own_staging % 16 == 0
        assert config.biases_at % 16 == config.bias_bytes % 16 == config.barriers % 8 == config.map % 128 == 0
        assert tile.rows % tile.rounds == 0
        assert config.bulk_channels == 0 or tile.channels % config.bulk_channels == 0
        assert tile.staging * 4 <= config.staging_bytes or config.buffers == 0
        assert tile.by_phases == (config.buffers == 0)
        chunks = k6_config.channel_chunks(problem, config)
        assert chunks * tile.depth >= problem.in_channels_per_group
        assert chunks % config.unroll == 0
        assert problem.groups == 1 or chunks == tile.channel_chunks(problem), "the next group's"
        if config.resident:
            assert config.weights == tile.tap_chunks(problem) * chunks * tile.depth_weights


@precisions
@pytest.mark.parametrize("name", thorough(workloads.WORKLOADS, always=[*workloads.WORKLOADS][::3]))
def test_k6_fits_every_workload(precision, name):
    check_k6(workloads.get(name).problem, precision)


@precisions
@hypothesis.given(problem=problems())
def test_k6_fits(precision, problem):
    check_k6(problem, precision)


# Taps of a row, their distance, taps of a chunk.
@pytest.mark.parametrize(
    ("taps", "step", "chunk"),
    [(3, 1, 3), (5, 1, 5), (6, 1, 4), (64, 1, 4), (5, 2, 5), (5, 3, 5), (5, 4, 3), (5, 5, 3), (5, 7, 2)],
)
def test_windows_of_split_operands_fit_into_registers(taps, step, chunk):
    """The compiler spills nothing in these stage loops."""
    problem = Problem(2, 16, 64, taps, 4096, dilation=step)
    assert {config.tile.tap_chunk for config in k6_config.configs(problem, "tf32x3")} == {chunk}
