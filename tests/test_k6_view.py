"""What lanes of k6 know of their windows, in Python with numbers of 32 bits, against Python's own."""

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest

from numba_tconv import workloads
from numba_tconv.kernels import k6_config, k6_load, k6_view, k6_window
from numba_tconv.kernels.k6_split import choose
from numba_tconv.kernels.k6_window import ALIGNED
from numba_tconv.problem import Problem
from tests.test_tensor_store import cast_quickly

X_AT = 4096
LAYERS = {name: workloads.get(name).problem for name in ("kb64", "kb74", "kb79", "dac_u2", "encodec_u2")}
# Of several chunks of taps, whose windows begin at different elements of 16 bytes.
LAYERS["taps far apart"] = Problem(2, 32, 64, 9, 500, dilation=5)


@pytest.fixture(scope="module")
def in_python():
    """The device functions' makers; a warp votes as the only lane of it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (k6_load, k6_view, k6_window):
            patch.setattr(module, "device_function", lambda function: function)
        cast_quickly(patch, k6_load, k6_view, k6_window)
        patch.setattr(k6_view, "cuda", SimpleNamespace(any_sync=lambda mask, value: value))
        yield


@pytest.mark.parametrize("precision", ["tf32", "bf16", "tf32x3"])
@pytest.mark.parametrize("layer", LAYERS)
@hypothesis.given(data=st.data())
def test_view(in_python, layer, precision, data):
    whole = LAYERS[layer]
    length, batch = data.draw(st.integers(1, 900)), data.draw(st.integers(1, 4))
    problem = Problem(
        *(batch, whole.in_channels, whole.out_channels, whole.kernel_size, length),
        stride=whole.stride,
        dilation=whole.dilation,
    )
    config = choose(problem, precision)
    config = config or k6_config.configs(problem, precision)[0]
    tile, vector = config.tile, 16 // config.tile.itemsize
    first, columns = k6_config.sample_columns(problem, config)
    column_tile = data.draw(st.integers(0, k6_config.column_tiles(problem, config) - 1))
    chunk = data.draw(st.integers(0, tile.tap_chunks(problem) - 1))
    n, j = divmod(column_tile * tile.advance, columns)
    apart = columns % tile.advance == 0
    boxed, aligned = data.draw(st.booleans()), data.draw(st.booleans())
    early, stride_c = data.draw(st.integers(0, vector - 1)), data.draw(st.integers(length, length + 8))
    if aligned:
        early = 0
    column = 4 * data.draw(st.integers(0, 31))
    x_at, rounded, (some, beyond), together = k6_view.make_view(config)(
        n, j, chunk, boxed, aligned, apart, early, stride_c, (length, columns, first), column, X_AT
    )

    i = first + j - tile.overlap - tile.lead - chunk * tile.chunk_shift
    if not apart:
        i = (i - first) % columns + first
    _, start, in_box = k6_load.make_window_start(config)(n, j, chunk, boxed, apart, length, columns, first)
    assert (start - i) % columns == 0
    if precision == "tf32" or not aligned:
        assert rounded == in_box
    if aligned:
        assert x_at == X_AT
        assert (some, beyond) == (False, 0), "the copy engine makes zeros"
        assert together == (ALIGNED if precision != "tf32" or in_box else 4)
        return
    # Rows begin at elements of 16 bytes that are the same in every sample.
    assert x_at == X_AT + (early + i) % vector * tile.itemsize
    begins = early + i | stride_c
    assert together == (4 if begins % 4 == 0 else 2 if begins % 2 == 0 else 1)
    element, window = start + column + tile.lead - tile.halo, 4 + tile.halo
    before, behind = (min(max(over, 0), window) for over in (-element, element + window - length))
    if not in_box or config.split_ahead:
        before = behind = 0
    assert (some, beyond) == (before + behind > 0, before | behind << 8)
