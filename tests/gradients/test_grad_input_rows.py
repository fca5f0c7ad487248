"""Which rows of grad_output grad_input_wgmma reads in place, and its splits."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.input.wgmma import choose as grad_input_wgmma_choose
from numba_tconv.gradients.input.wgmma import kernel as grad_input_wgmma
from numba_tconv.gradients.input.wgmma import producer as grad_input_wgmma_producer
from numba_tconv.gradients.input.wgmma.choose import LARGEST_SHARE_OF_WIDEST, clocks_of, splits_of
from numba_tconv.kernels.common.tensor_map import lies_in_rows
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.device import H200
from numba_tconv.runtime.layout import Layout
from numba_tconv.selection.gradient import GRADIENTS


def layout(p, dtype, stride_c=None, offset=0, stride_n=None):
    stride_c = stride_c or p.out_length
    return Layout(p.out_shape, (stride_n or p.out_channels * stride_c, stride_c, 1), dtype, 0, offset)


def test_which_rows_are_read_where_they_lie():
    p, dtype = replace(workloads.get("seamless_u1").problem, batch=2), DTYPES["bf16"]
    sheared_of = grad_input_wgmma_producer.sheared_of
    assert p.out_length == 2500
    assert sheared_of(layout(p, dtype)) == 2
    assert sheared_of(layout(p, dtype, 2504)) == 1
    assert sheared_of(layout(p, dtype, 2501)) == 8
    assert sheared_of(layout(p, dtype, offset=2)) == 0
    assert sheared_of(layout(p, dtype, stride_n=256 * 2500 + 4)) == 0
    assert sheared_of(layout(p, dtype, 4)) == 0  # rows that overlap
    assert sheared_of(layout(replace(p, out_channels=255), dtype, 2500, stride_n=256 * 2500)) == 0


@pytest.mark.parametrize(
    ("name", "precision", "sheared"),
    [
        ("seamless_u1", "bf16", 2),
        ("encodec_u4", "bf16", 4),
        ("encodec_u2", "bf16", 8),
        ("encodec_u4", "tf32", 2),
        ("hifigan_u1", "bf16", 1),
        ("seamless_u1", "tf32", 1),
    ],
)
def test_rows_of_real_layers_are_not_copied(name, precision, sheared):
    p = workloads.get(name).problem
    config = GRADIENTS["grad_input_wgmma"].config(p, DTYPES[precision], H200, precision)
    assert config.sheared == sheared
    assert not GRADIENTS["grad_input_wgmma"].unsuited(p, DTYPES[precision], precision, H200)


@pytest.mark.parametrize(("channels", "why"), [(47, "at least 48 input channels a group, not 47"), (48, None)])
def test_products_of_few_channels_are_too_short(channels, why):
    p = Problem(2, 2 * channels, 128, 8, 300, stride=4, groups=2)
    found = GRADIENTS["grad_input_wgmma"].unsuited(p, DTYPES["bf16"], "bf16", H200)
    assert why in found if why else found is None


def test_a_copy_where_boxes_would_be_too_wide():
    """Two channels of a box's eight are read."""
    p = Problem(16, 512, 64, 32, 1000, stride=16)
    plain = grad_input_wgmma_choose.choose(p, "bf16")
    assert grad_input_wgmma_choose.choose(p, "bf16", 8).g_channels == 8
    assert grad_input_wgmma_choose.choose_for(p, "bf16", 8, H200) == plain
    assert grad_input_wgmma_choose.choose_for(p, "bf16", 0, H200) == plain


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_few_tiles_are_split(precision):
    def parts(name, **sizes):
        p = replace(workloads.get(name).problem, **sizes)
        config = GRADIENTS["grad_input_wgmma"].config(p, DTYPES[precision], H200, precision)
        splits = splits_of(p, config, H200)
        assert config.split_k == (splits > 1)
        assert config.stages_of(p) % splits == 0
        assert splits == 1 or config.tiles_of(p).tiles * splits <= 2 * H200.multiprocessors
        return splits

    assert parts("head") >= 8
    assert parts("seamless_u1", batch=1) > 1
    assert parts("hifigan_u1") == parts("small") == 1


@pytest.mark.parametrize(
    ("name", "arriving", "clocks"), [("demucs_out", 4 * 94, 4 * 94 + 80), ("hifigan_u1", 42752 / 45, 1024 + 80)]
)
def test_a_stage_arrives_box_by_box_or_byte_by_byte(name, arriving, clocks):
    """Three boxes and the weights; 42,752 bytes, beside products that take longer."""
    config = next(grad_input_wgmma_choose.candidates(workloads.get(name).problem.layer, "bf16"))
    assert config.arriving == arriving
    assert grad_input_wgmma_choose.stage_clocks(config) == clocks


@pytest.mark.parametrize(
    ("name", "channels"), [("dac_u1", 224), ("demucs_u2", 192), ("hifigan_u1", 256), ("seamless_u1", 256)]
)
def test_narrower_tiles_where_they_fill_more_multiprocessors(name, channels):
    p = workloads.get(name).problem
    config = GRADIENTS["grad_input_wgmma"].config(p, DTYPES["bf16"], H200, "bf16")
    widest = grad_input_wgmma_choose.choose(p, "bf16", config.sheared)
    assert (config.channels, widest.channels) == (channels, 256)
    took, takes = (clocks_of(p, tile, splits_of(p, tile, H200), H200) for tile in (widest, config))
    assert takes < LARGEST_SHARE_OF_WIDEST * took if channels < 256 else config == replace(widest, split_k=False)
    many = replace(p, batch=64 * p.batch)  # whose last round is one of many
    assert GRADIENTS["grad_input_wgmma"].config(many, DTYPES["bf16"], H200, "bf16").channels == 256


@pytest.mark.parametrize("name", ["dac_u1", "hifigan_u2", "encodec_u2", "head"])
def test_a_layer_has_three_widths_of_tiles_at_most(name):
    p, rung = replace(workloads.get(name).problem, batch=1), GRADIENTS["grad_input_wgmma"]
    lengths = [1 << log for log in range(3, 17)] + [3 << log for log in range(3, 15)]
    found = {rung.config(replace(p, length=8 * n), DTYPES["bf16"], H200, "bf16").channels for n in lengths}
    assert 1 < len(found) <= 3


def padded(tensor):
    """A copy in rows of whole 16 bytes, whatever the length."""
    n, c, length = tensor.shape
    return tensor.new_zeros(n, c, (length + 8) // 8 * 8)[:, :, :length].copy_(tensor)


def turned(tensor):
    return tensor.mT.contiguous().mT


LIES = {0: turned, 1: padded, 2: torch.Tensor.contiguous}  # by what ``sheared_of`` says
WEIGHTS = {
    "where it lies": torch.Tensor.contiguous,
    "turned": turned,
    "within 16 bytes": lambda tensor: tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor),
}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("given", LIES)
@pytest.mark.parametrize("sheared", [1, 2])
def test_operands_that_lie_badly_are_copied_as_the_tile_reads_them(sheared, given, weight, monkeypatch):
    p, read, launched = Problem(2, 64, 64, 8, 312, stride=4), [], []
    config = grad_input_wgmma_choose.choose(p, "bf16", sheared)
    monkeypatch.setattr(grad_input_wgmma.gpu, "of", lambda index: H200)
    monkeypatch.setattr(grad_input_wgmma, "in_rows", lambda x: x if lies_in_rows(Layout.of(x)) else padded(x))

    def prepared(p, own, g, w, device):
        read.extend((g, w))
        return 1, lambda *addresses: launched.append(addresses), None

    monkeypatch.setattr(grad_input_wgmma, "_prepared", prepared)
    g = LIES[given](torch.randn(p.out_shape).bfloat16())
    w = WEIGHTS[weight](torch.randn(p.weight_shape).bfloat16())
    tensors = g, w, torch.empty(p.in_shape, dtype=torch.bfloat16)
    GRADIENTS["grad_input_wgmma"].prepare(*map(Layout.of, tensors), p, config=config)(*tensors)
    of_g, of_w = read
    assert grad_input_wgmma_producer.sheared_of(of_g) == sheared
    assert lies_in_rows(of_w)
    ((g_at, w_at, _, stored),) = launched
    assert (g_at == g.data_ptr()) == (given == sheared)
    assert (w_at == w.data_ptr()) == (weight == "where it lies")
    assert stored is tensors[2]
