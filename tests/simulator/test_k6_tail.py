"""The kernel of k6's last columns, in the CUDA simulator."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common import packed_weights
from numba_tconv.kernels.common.tensor_core import pack as tensor_pack
from numba_tconv.kernels.k6_wgmma import tail as k6_tail
from numba_tconv.kernels.k6_wgmma import tile as k6_config
from numba_tconv.runtime.layout import Layout
from tests.few_blocks import few_threads
from tests.thorough import thorough


@pytest.fixture(autouse=True)
def tiny_blocks():
    with few_threads(tensor_pack, 64, packed_weights._made), few_threads(k6_tail, 72):
        yield


# Two taps and three, the last in some phases only; one column, and two tiles before it; samples and channels that fill
# no block; groups; more channels than shared memory holds at once (16); more weights than a thread's loads in flight.
PROBLEMS = {
    "two taps": Problem(3, 20, 5, 16, 128, stride=8, padding=4, bias=True),
    "three taps": Problem(2, 40, 5, 11, 256, stride=5, padding=3, output_padding=1),
    "groups": Problem(1, 32, 8, 4, 128, stride=2, padding=1, groups=2, bias=True),
    "far inputs": Problem(2, 9, 3, 24, 127, stride=4, padding=13),
    "many channels": Problem(1, 96, 16, 16, 128, stride=8, padding=4, bias=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("precision", thorough(DTYPES, always=["tf32", "bf16", "tf32x3"]))
def test_the_last_columns_outputs(monkeypatch, name, precision):
    p, dtype = PROBLEMS[name], DTYPES[precision]
    monkeypatch.setattr(k6_tail, "CHANNELS", 64 if name == "many channels" else 16)
    monkeypatch.setattr(k6_tail, "INPUTS", 2 * k6_tail.THREADS)
    config = next((c for c in k6_config.configs(p, precision) if c.tail), None)
    if (name, precision) == ("far inputs", "tf32x3"):
        assert config is None, "its taps come in chunks"
        return
    torch.manual_seed(p.length)
    x = torch.randn(p.batch, p.in_channels, p.length + 3).to(dtype)[:, :, : p.length]
    w = torch.randn(p.weight_shape)
    if precision != "tf32x3":  # which needs its second parts
        w = w.to(torch.bfloat16).to(dtype)  # exact in every precision, TF32 too: packing rounds nothing
    bias = torch.randn(p.out_channels).to(dtype) if p.bias else None
    stages = k6_config.channel_chunks(p, config)
    packing = tensor_pack.packing_of(p, config.tile, "wgmma", stages, Layout.of(w))
    packed = packing(w)
    y = torch.full(p.out_shape, torch.nan, dtype=dtype)
    launch = k6_tail.prepare(p, config, x.shape, x.stride(), dtype, stages, p.bias)
    launch(x, packed, bias if p.bias else packed, y)

    expected = torch.conv_transpose1d(
        x.double(), w.double(), None if bias is None else bias.double(),
        p.stride, p.padding, p.output_padding, p.groups
    )  # fmt: skip
    first = k6_config.tail_column(p, config) * p.stride - p.padding
    assert 0 < p.out_length - first <= p.stride
    assert y[:, :, :first].isnan().all(), "the other columns are k6's own"
    expected, y = expected[:, :, first:], y[:, :, first:].double()
    assert ((y - expected).abs() <= torch.finfo(dtype).eps / 2 * expected.abs() + 1e-4).all()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", ["whole tiles", "groups", "many channels"])
def test_unpacked_weights_give_the_same_bits(monkeypatch, name, precision):
    p = {"whole tiles": Problem(3, 32, 8, 16, 128, stride=8, padding=4, bias=True), **PROBLEMS}[name]
    monkeypatch.setattr(k6_tail, "CHANNELS", 64 if name == "many channels" else 16)
    monkeypatch.setattr(k6_tail, "INPUTS", 2 * k6_tail.THREADS)
    dtype = DTYPES[precision]
    config = next(c for c in k6_config.configs(p, precision) if c.tail)
    assert p.kernel_size == config.tile.tap_chunk * p.stride
    torch.manual_seed(p.length)
    x, w, bias = (torch.randn(size).to(dtype) for size in (p.in_shape, p.weight_shape, p.out_channels))
    stages = k6_config.channel_chunks(p, config)
    packed = tensor_pack.packing_of(p, config.tile, "wgmma", stages, Layout.of(w))(w)
    outputs = []
    for one, weights in ((config, packed), (replace(config, unpacked=True), w)):
        y = torch.full(p.out_shape, torch.nan, dtype=dtype)
        k6_tail.prepare(p, one, x.shape, x.stride(), dtype, stages, True)(x, weights, bias, y)
        outputs.append(y[:, :, k6_config.tail_column(p, config) * p.stride - p.padding :])
    assert torch.equal(*outputs)


def test_which_problems_leave_a_column_over():
    p = PROBLEMS["two taps"]

    def tails(problem, precision="bf16", **others):
        return [c for c in k6_config.configs(problem, precision, **others) if c.tail]

    assert tails(p)
    assert all(not c.tile.aligned and c.bulk_channels for c in tails(p))
    for length in (1, 127, 129, 255):
        assert not tails(replace(p, length=length))
    assert not tails(replace(p, padding=0, output_padding=0, kernel_size=24))
    assert not tails(replace(p, dilation=3))
    assert not tails(replace(p, length=64, kernel_size=4))  # phases without taps
    assert not tails(p, wide_outputs=True)
    assert tails(p, "tf32x3")
    assert not tails(PROBLEMS["far inputs"], "tf32x3")
    assert {bool(c.bulk_channels) for c in tails(p, "tf32")} == {True, False}
    assert not any(c.tile.aligned or c.bulk_channels for c in tails(p, "tf32x3"))
