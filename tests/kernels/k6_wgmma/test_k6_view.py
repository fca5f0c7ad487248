"""What k6's lanes know of their windows, in Python with 32-bit numbers, against Python's own."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.k6_wgmma import operands as k6_operands
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.kernels.k6_wgmma import windows as k6_windows
from numba_tconv.kernels.k6_wgmma.arguments import Fetch, Input, Samples
from numba_tconv.kernels.k6_wgmma.choose import choose
from numba_tconv.kernels.k6_wgmma.operands import ALIGNED
from numba_tconv.kernels.k6_wgmma.tile import WIDEST
from numba_tconv.lab.measure import workloads
from tests.kernels.test_tensor_store import cast_quickly
from tests.thorough import thorough

X_AT = 4096
precisions = pytest.mark.parametrize("precision", ["tf32", "bf16", "tf32x3"])
LAYERS = {name: workloads.get(name).problem for name in ("kb64", "kb74", "kb79", "dac_u2", "encodec_u2")}
# Several chunks of taps, whose windows begin at different elements of 16 bytes.
LAYERS["taps far apart"] = Problem(2, 32, 64, 9, 500, dilation=5)
layers = pytest.mark.parametrize("layer", thorough(LAYERS, always=["kb74", "encodec_u2", "taps far apart"]))


@pytest.fixture(scope="module")
def in_python():
    """The device functions' makers; a warp has one lane."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (k6_windows, k6_operands):
            patch.setattr(module, "device_function", lambda function: function)
        cast_quickly(patch, k6_windows, k6_operands)
        patch.setattr(k6_operands, "cuda", SimpleNamespace(any_sync=lambda mask, value: value))
        yield


def configured(layer, precision, length, batch, crop):
    """A problem with the layer's taps, of which at most ``crop`` outputs are cropped at each end."""
    p = LAYERS[layer]
    longest = (length - 1) * p.stride + (p.kernel_size - 1) * p.dilation + 1
    problem = Problem(
        *(batch, p.in_channels, p.out_channels, p.kernel_size, length),
        stride=p.stride,
        dilation=p.dilation,
        padding=min(crop, (longest - 1) // 2),
    )
    return problem, choose(problem, precision) or k6_config.configs(problem, precision)[0]


def check(problem, config, column_tile, chunk, column, boxed, early, stride_c):
    """``early``: None if windows begin at multiples of 16 bytes."""
    tile, vector = config.tile, 16 // config.tile.itemsize
    first, columns = k6_config.sample_columns(problem, config)
    samples = Samples(problem.batch, problem.length, columns, first)
    if config.joined:
        samples = Samples(1, problem.batch * columns, problem.batch * columns + WIDEST, 0)
    _, length, columns, first = samples
    n, j = divmod(column_tile * tile.advance, columns)
    apart, aligned = columns % tile.advance == 0, early is None
    fetch = Fetch(boxed, aligned, apart, False)
    x = Input(None, 0, 0, stride_c, early or 0, None, fetch, samples)
    view = k6_operands.make_view(config)(n, j, chunk, x, column, X_AT)
    outside = view.some_outside, view.beyond
    _, start, in_box = k6_windows.make_window_start(config)(n, j, chunk, boxed, apart, length, columns, first)
    rounds = tile.precision == "tf32"
    if rounds:
        assert view.rounded == in_box
    if aligned:
        assert view.address == X_AT
        assert outside == (False, 0), "the copy engine makes zeros"
        assert view.together == (ALIGNED if in_box or not rounds else 4)
        return
    # Rows begin at elements of 16 bytes that are the same in every sample.
    i = first + j - tile.overlap - tile.lead - chunk * tile.chunk_shift
    assert view.address == X_AT + (early + i) % vector * tile.itemsize
    begins = early + i | stride_c
    assert view.together == (4 if begins % 4 == 0 else 2 if begins % 2 == 0 else 1)
    element, window = start + column + tile.lead - tile.halo, 4 + tile.halo
    before, behind = (min(max(over, 0), window) for over in (-element, element + window - length))
    if not in_box or config.split_ahead:
        before = behind = 0
    assert outside == (before + behind > 0, before | behind << 8)


@precisions
@layers
@hypothesis.given(data=st.data())
def test_view(in_python, layer, precision, data):
    length, batch, crop = (data.draw(st.integers(*limits)) for limits in ((1, 900), (1, 4), (0, 300)))
    problem, config = configured(layer, precision, length, batch, crop)
    column_tile = data.draw(st.integers(0, k6_config.column_tiles(problem, config) - 1))
    chunk, column = data.draw(st.integers(0, config.tile.tap_chunks(problem) - 1)), 4 * data.draw(st.integers(0, 31))
    early = data.draw(st.none() | st.integers(0, 16 // config.tile.itemsize - 1))
    check(problem, config, column_tile, chunk, column, data.draw(st.booleans()), early, length + column % 9)


@precisions
@layers
@pytest.mark.parametrize("crop", [0, 64, 200])
def test_every_window(in_python, layer, precision, crop):
    """Signals shorter than a window, as long, and longer: windows inside one sample, and beyond its ends.

    Also samples that lie end to end, of which zeros follow the last."""
    for length, joined in ((40, False), (137, False), (610, False), (137, True)):
        problem, config = configured(layer, precision, length, 3, crop)
        config = replace(config, joined=joined)
        tiles, chunks = k6_config.column_tiles(problem, config), config.tile.tap_chunks(problem)
        for column_tile, chunk, column, early in product(range(tiles), range(chunks), (0, 124), (None, 0, 1)):
            check(problem, config, column_tile, chunk, column, True, early, length)
