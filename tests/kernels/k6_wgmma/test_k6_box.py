"""How k6 fetches windows, on the CPU: boxes hold what windows need, wherever the rows of x lie."""

from dataclasses import replace
from math import gcd

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma import boxes as k6_box
from numba_tconv.kernels.k6_wgmma.boxes import (
    ALIGNMENT,
    LARGEST_BOX,
    RowAlignment,
    geometry,
    place,
    row_alignment,
    wavefronts,
)
from numba_tconv.kernels.k6_wgmma.choose import choose_whole
from numba_tconv.kernels.k6_wgmma.operands import make_beyond
from numba_tconv.kernels.k6_wgmma.schedule import make_schedule
from numba_tconv.kernels.k6_wgmma.tile import (
    MOST_PADDING,
    MOST_PADDING_OF_ELEMENTS,
    column_tiles,
    last_column,
    sample_columns,
)
from numba_tconv.kernels.k6_wgmma.windows import make_window_start
from numba_tconv.lab.measure import workloads
from numba_tconv.selection.registry import RUNGS
from tests.gpu.common import TENSOR_CORES
from tests.thorough import at_most

pytestmark = pytest.mark.skipif(RUNGS["k6_wgmma"] not in TENSOR_CORES, reason="the simulator has no tensor cores")

CONFIGS = {
    (workload, precision): choose_whole(workloads.get(workload).problem, precision)
    for workload in ("kb64", "kb74", "kb79", "hifigan_u1", "dac_u1")
    for precision in DTYPES
}
configs = pytest.mark.parametrize("which", CONFIGS, ids=" ".join)


def all_rows(config):
    """Every layout of rows: those that begin alike are 2, 4 or 8 apart, with any fitting shear."""
    vector = ALIGNMENT // config.tile.itemsize
    sheared = [RowAlignment(vector // gcd(shear, vector), shear, False) for shear in range(1, vector)]
    return [RowAlignment(), RowAlignment(aligned=False), *sheared]


def fetch(tensor_map, at):
    """Elements in the box at ``at``, counted from the multiple of 16 bytes before the tensor; -1: a zero."""
    sizes, distances, box, itemsize = tensor_map
    places = np.zeros((1,) * len(sizes), np.int64)
    outside = np.zeros((1,) * len(sizes), bool)
    steps = (1, *(distance // itemsize for distance in distances))
    assert not any(distance % ALIGNMENT for distance in distances)
    assert min(distances) > 0
    assert box[0] <= LARGEST_BOX
    assert box[0] * itemsize % ALIGNMENT == at[0] * itemsize % ALIGNMENT == 0
    for d, (size, step, count, first) in enumerate(zip(sizes, steps, box, at, strict=True)):
        along = (first + np.arange(count)).reshape([-1 if z == d else 1 for z in range(len(sizes))])
        places, outside = places + along * step, outside | (along < 0) | (along >= size)
    return np.where(outside, -1, places).transpose().reshape(-1)


@configs
@at_most(40)
@hypothesis.given(data=st.data())
def test_a_window_stands_where_the_lanes_read_it(which, data):
    config = CONFIGS[which].compiled
    tile, itemsize, vector = config.tile, config.tile.itemsize, ALIGNMENT // config.tile.itemsize
    length = data.draw(st.integers(1, 900))
    stride = length + data.draw(st.integers(0, 3 * vector))
    channels = 8 * data.draw(st.integers(1, 5))
    shape, strides = (2, channels, length), (channels * stride, stride, 1)
    offset = data.draw(st.integers(0, vector - 1))
    rows = row_alignment(shape, strides, offset * itemsize, config, 1)
    if rows is None:
        assert stride < vector, "rows that overlap in the map"
        return
    assert (rows.alike, rows.shear) == (vector // gcd(stride, vector), stride % vector)
    i = data.draw(st.integers(-200, length + 20))
    if rows.aligned:
        i = i // vector * vector
    # One stage more than there are channels for: half a pass of the unrolled loop.
    n, stage = data.draw(st.integers(-1, 2)), data.draw(st.integers(0, (channels - 1) // config.depth + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(k6_box, "encode", lambda precision, *told: (*told, itemsize))
        tensor_map = k6_box.template_map(shape, strides, offset * itemsize, config, rows)
    # As the warps that copy do.
    begin, log, g = (offset + i) & -vector, rows.alike.bit_length() - 1, geometry(config, rows)
    region = fetch(tensor_map, (begin, 0, stage * config.depth >> log, n))
    assert len(region) * itemsize == config.depth * g.pitch <= g.region
    # No access outside the tensor but in the 16 bytes of its first element.
    assert region.max() < offset + strides[0] + (channels - 1) * stride + length
    # As the lanes that multiply do.
    early = 0 if rows.aligned else (offset + i) & (vector - 1)
    beyond_of = make_beyond(config).py_func
    first, own_columns = tile.lead - tile.halo, 4 + tile.halo  # of a lane's window; those that it reads
    columns = range(0, config.width - tile.lead, 4)
    beyond_a_row = [0 if rows.aligned else int(beyond_of(i + column + first, length)) for column in columns]
    for c in range(config.depth):
        channel, row = stage * config.depth + c, int(place.py_func(c, log, g.pitch, g.shear)) // itemsize + early
        for column, beyond in zip(columns, beyond_a_row, strict=True):
            element = i + column + first
            for q in range(tile.halo - tile.reach, own_columns):
                found = region[row + column + first + q]
                if not beyond & 255 <= q < own_columns - (beyond >> 8):
                    found = -1
                exists = 0 <= n < 2 and channel < channels and 0 <= element + q < length
                assert found == (offset + n * strides[0] + channel * stride + element + q if exists else -1)


def test_what_no_box_holds():
    config = CONFIGS["kb64", "bf16"]

    def rows(channels, stride, groups=1, splits=1, offset=0, last=1, depths=1):
        shape, strides = (1, channels, 1000), (8 * channels * stride, stride, last)
        return row_alignment(shape, strides, offset, replace(config, splits=splits, depths=depths), groups)

    assert rows(64, 1000) == RowAlignment()
    assert rows(64, 1000, offset=2) == RowAlignment(aligned=False)
    assert rows(64, 1001) == RowAlignment(8, 1, False)
    assert rows(64, 1004) == RowAlignment(2, 4, False)
    assert rows(68, 1004) == RowAlignment(2, 4, False)
    assert rows(68, 1001) is None, "rows behind the last one"
    assert rows(48, 1001, splits=6) == RowAlignment(8, 1, False)
    assert rows(48, 1001, splits=4) is None, "a part that begins with another row than the first of eight"
    assert rows(48, 1001, groups=3) == RowAlignment(8, 1, False)
    assert rows(48, 1001, groups=2) is None, "a stage would take channels of the next group"
    assert rows(48, 1001, groups=3, depths=2) is None, "the same"
    assert rows(64, 7) is None, "a distance of nothing"
    assert rows(64, 1000, last=2) is None


@configs
def test_stages_fit_into_the_ring(which):
    config = CONFIGS[which]
    for rows in all_rows(config):
        g = geometry(config, rows)
        assert g.pitch // config.tile.itemsize <= LARGEST_BOX
        assert g.pitch % 16 == g.region % 128 == g.stage_bytes % 128 == 0
        assert config.depth * g.pitch <= g.region
        assert 2 <= g.stages <= config.stages
        assert g.stages * g.stage_bytes <= config.ring_bytes
        assert config.regions * g.region <= g.stage_bytes
    assert geometry(config, None) == geometry(config, RowAlignment())


@configs
def test_lanes_read_from_different_banks(which):
    """Neighbours that begin at odd 16-bit elements by twos, but for those of every second row."""
    config = CONFIGS[which]
    itemsize = config.tile.itemsize
    for rows in all_rows(config):
        words = max(1, gcd(4, rows.shear) * itemsize // 4)
        found = wavefronts(config, rows, geometry(config, rows).pitch // itemsize)
        if itemsize == 4 or words == 2:
            assert found == words, rows
        else:
            assert found <= 2, rows


@configs
@hypothesis.given(data=st.data())
def test_a_window_is_fetched_in_boxes_only_where_other_samples_have_no_inputs(which, data):
    config = CONFIGS[which].compiled
    length, batch = data.draw(st.integers(1, 900)), data.draw(st.integers(1, 4))
    workload = workloads.get(which[0]).problem
    problem = Problem(
        *(batch, workload.in_channels, workload.out_channels, workload.kernel_size, length),
        stride=workload.stride,
        dilation=workload.dilation,
    )
    first, columns = sample_columns(problem, config)
    window_start, sample_of = make_window_start(config).py_func, make_schedule(config).sample_of.py_func
    tile = config.tile
    for column_tile in range(column_tiles(problem, config)):
        for chunk in range(tile.tap_chunks(problem)):
            n, j = sample_of(column_tile, columns)
            apart, own = columns % tile.advance == 0, n
            n, i, boxed = window_start(n, j, chunk, True, apart, length, columns, first)
            # Columns of all samples end to end: the window's position.
            at = n * columns + i - first
            assert at == column_tile * tile.advance - tile.overlap - tile.lead - chunk * tile.chunk_shift
            if apart:  # other samples' inputs are zeros to the copy engine
                assert (boxed, n) == (True, own)
                assert i + config.width <= columns + first
                continue
            used = range(at + tile.lead - tile.reach, at + config.width)
            met = {
                m for m in range(batch) if m * columns < used.stop + first and used.start + first < m * columns + length
            }
            if boxed:
                assert met <= {n}


def test_samples_of_nearly_whole_tiles_are_padded_to_whole_tiles():
    for workload in workloads.WORKLOADS.values():
        for precision in DTYPES:
            if (config := choose_whole(workload.problem, precision)) is not None:
                first, columns = sample_columns(workload.problem, config)
                needed = config.tile.columns(workload.problem)[1]
                assert columns <= MOST_PADDING_OF_ELEMENTS * needed
                assert last_column(workload.problem) - first + (not config.tail) <= columns
                assert columns == needed or columns % config.tile.advance == 0


def test_samples_get_more_columns_where_their_windows_would_be_filled_by_elements():
    problem = replace(workloads.get("hifigan_u1").problem, batch=2)
    for precision in ("tf32", "bf16"):
        config = choose_whole(problem, precision).compiled

        def columns(length, groups=1, config=config):
            p = replace(problem, length=length, in_channels=24 * groups, groups=groups)
            return sample_columns(p, config)[1]

        whole = config.tile.advance
        assert columns(24) == 32 < whole / MOST_PADDING
        assert columns(25) == columns(27) == columns(40) == whole <= MOST_PADDING_OF_ELEMENTS * 32
        assert columns(19) == 24
        # Groups whose channels fill no stage: all windows are filled, however far apart samples are.
        assert columns(27, groups=2) == (32 if precision == "bf16" else whole)
        # The last column with outputs is one more than there are inputs.
        assert columns(whole - 1) == whole
        assert columns(whole) == 2 * whole


@hypothesis.given(columns=st.integers(1, 500), tiles=st.integers(0, 50), apart=st.integers(0, 300))
def test_walking_from_tile_to_tile_comes_where_a_division_does(columns, tiles, apart):
    sample_of, walk = (function.py_func for function in make_schedule(CONFIGS["kb64", "tf32"])[2:])
    place, step = sample_of(tiles, columns), sample_of(apart, columns)
    for turn in range(5):
        assert place == sample_of(tiles + turn * apart, columns)
        place = walk(*place, *step, columns)
