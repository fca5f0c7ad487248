"""How k6 fetches windows, on the CPU: boxes that hold what the window needs, wherever the rows of x lie in memory."""

from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from numba_tconv import workloads
from numba_tconv.kernels import RUNGS
from numba_tconv.kernels.k6_boxes import ALIGNMENT, LARGEST_BOX, geometry, make_box_start, make_place
from numba_tconv.kernels.k6_config import (
    MOST_PADDING,
    MOST_PADDING_OF_ELEMENTS,
    column_tiles,
    last_column,
    sample_columns,
)
from numba_tconv.kernels.k6_cost import choose
from numba_tconv.kernels.k6_load import make_walk, make_window_start
from numba_tconv.kernels.tensor_tile import DTYPES
from numba_tconv.problem import Problem
from tests.gpu.common import TENSOR_CORES

pytestmark = pytest.mark.skipif(RUNGS["k6_wgmma"] not in TENSOR_CORES, reason="the simulator has no tensor cores")

CONFIGS = {
    (workload, precision): choose(workloads.get(workload).problem, precision)
    for workload in ("kb64", "kb74", "kb79", "hifigan_u1", "dac_u1")
    for precision in DTYPES
}
configs = pytest.mark.parametrize("which", CONFIGS, ids=" ".join)


def box_counts(config):
    return [boxes for boxes in (1, 2, 4, 8) if boxes <= ALIGNMENT // config.tile.itemsize]


def stage_of(config, boxes, early_of, memory, i, channel):
    """A stage's box region, as elements, after the copy engine has fetched the window whose column 0 is element i.

    ``early_of(c)``: elements by which row c begins after a multiple of 16 bytes; ``memory[c]``: the row, by elements
    from that multiple on (so what a tensor map calls its places), zeros elsewhere.
    """
    itemsize, g = config.tile.itemsize, geometry(config, boxes)
    box_start = make_box_start(config).py_func
    region = np.full(boxes * g.spacing // itemsize, -1)
    for box in range(boxes):
        begin = int(box_start(i, box, early_of(0), early_of(1) - early_of(0), g.shift_step))
        assert begin * itemsize % ALIGNMENT == 0, "the copy engine takes boxes at multiples of 16 bytes only"
        for row in range(config.tile.depth // boxes):
            c = channel + row * boxes + box
            at = (box * g.spacing + row * g.pitch) // itemsize
            for k in range(g.pitch // itemsize):
                region[at + k] = memory(c, begin + k)
    return region


@configs
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_a_window_stands_where_the_lanes_read_it(which, data):
    config = CONFIGS[which]
    itemsize, depth, vector = config.tile.itemsize, config.tile.depth, ALIGNMENT // config.tile.itemsize
    boxes = data.draw(st.sampled_from(box_counts(config)))
    odd = data.draw(st.integers(0, vector // boxes - 1)) * 2 + 1 if boxes > 1 else 0
    stride = odd * vector // boxes  # from a row to the next, modulo 16 bytes
    x_early = data.draw(st.integers(0, vector - 1)) if boxes > 1 else 0
    i = data.draw(st.integers(-40, 2000)) if boxes > 1 else 8 * data.draw(st.integers(-5, 250))
    g, place = geometry(config, boxes), make_place(config).py_func

    def early_of(c):
        return x_early + c * stride

    def memory(c, k):  # a number that tells row and element
        return 100_000 * c + k - early_of(c) % vector + 10_000

    region = stage_of(config, boxes, early_of, memory, i, 0)
    for c in range(depth):
        row = int(place(c, boxes.bit_length() - 1, g.pitch, g.spacing, g.shift_step)) // itemsize
        early = (early_of(c) + i) % vector
        assert boxes > 1 or early == 0
        window = region[row + early : row + early + config.width]
        assert np.array_equal(window, 100_000 * c + 10_000 + i + np.arange(config.width))


@configs
def test_stages_with_more_boxes_fit_into_the_ring(which):
    config = CONFIGS[which]
    for boxes in box_counts(config):
        g = geometry(config, boxes)
        assert g.pitch // config.tile.itemsize <= LARGEST_BOX
        assert g.pitch % 16 == g.spacing % 128 == g.slot % 128 == g.shift_step % 16 == 0
        assert config.tile.depth // boxes * g.pitch <= g.spacing
        assert 2 <= g.stages <= config.stages
        assert g.stages * g.slot <= config.ring_bytes
        assert config.regions * boxes * g.spacing <= g.slot
    assert geometry(config, 0) == geometry(config, 1)


def banks(address, size):
    return {(address + b) // 4 % 32 for b in range(0, size, 4)}


@configs
def test_a_quarter_warp_reads_aligned_rows_from_different_banks(which):
    config = CONFIGS[which]
    if config.tile.itemsize == 2:
        return  # pairs of rows are read by half-warps, 8 bytes a lane
    g, place = geometry(config, 1), make_place(config).py_func
    rows = [int(place(t, 0, g.pitch, g.spacing, 0)) for t in range(4)]
    touched = [banks(row + 16 * lane, 16) for row in rows for lane in range(2)]
    assert len(set.union(*touched)) == 32


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
    window_start, sample_of = make_window_start(config).py_func, make_walk(config)[0].py_func
    tile = config.tile
    for column_tile in range(column_tiles(problem, config)):
        for chunk in range(tile.tap_chunks(problem)):
            n, j = sample_of(column_tile, columns)
            apart, own = columns % tile.advance == 0, n
            n, i, boxed = window_start(n, j, chunk, 1, apart, length, columns, first)
            # Columns of all samples laid end to end: where the window is, however it is named.
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
            if (config := choose(workload.problem, precision)) is not None:
                first, columns = sample_columns(workload.problem, config)
                needed = config.tile.columns(workload.problem)[1]
                assert columns <= MOST_PADDING_OF_ELEMENTS * needed
                assert last_column(workload.problem) - first + (not config.tail) <= columns
                assert columns == needed or columns % config.tile.advance == 0


def test_samples_get_more_columns_where_their_windows_would_be_filled_by_elements():
    problem = replace(workloads.get("hifigan_u1").problem, batch=2)
    for precision in ("tf32", "bf16"):
        config = choose(problem, precision).compiled

        def columns(length, groups=1, config=config):
            p = replace(problem, length=length, in_channels=24 * groups, groups=groups)
            return sample_columns(p, config)[1]

        whole = config.tile.advance
        assert columns(24) == 32 < whole / MOST_PADDING
        assert columns(25) == columns(27) == columns(40) == whole <= MOST_PADDING_OF_ELEMENTS * 32
        assert columns(19) == 24
        # Of groups whose channels fill no stage all windows are filled, however far the samples are apart.
        assert columns(27, groups=2) == (32 if precision == "bf16" else whole)
        # The last column with outputs is one more than there are inputs.
        assert columns(whole - 1) == whole
        assert columns(whole) == 2 * whole


@hypothesis.given(columns=st.integers(1, 500), tiles=st.integers(0, 50), apart=st.integers(0, 300))
def test_walking_from_tile_to_tile_comes_where_a_division_does(columns, tiles, apart):
    sample_of, walk = (function.py_func for function in make_walk(CONFIGS["kb64", "tf32"]))
    place, step = sample_of(tiles, columns), sample_of(apart, columns)
    for turn in range(5):
        assert place == sample_of(tiles + turn * apart, columns)
        place = walk(*place, *step, columns)
