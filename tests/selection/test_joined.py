"""Which batches of short signals are joined."""

from dataclasses import replace

import pytest
import torch

from numba_tconv.formula.precision import TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.runtime.device import A100, H200
from numba_tconv.selection.joined import joined

SEGMENTS = Problem(32, 512, 256, 16, 32, stride=8, padding=4, bias=True)  # HiFi-GAN's first layer as it is trained


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        (dict(), 36),
        (dict(precision=TF32_ALLOWED), 36),
        (dict(precision="tf32x3"), 36),
        (dict(dtype=torch.bfloat16, precision="bf16"), 40),
        (dict(dtype=torch.float16, precision="fp16"), 40),
        (dict(precision="ieee"), None),
        (dict(dtype=torch.float64, precision="fp64"), None),
        (dict(gpu=A100), None),
        (dict(batch=1), None),
        (dict(batch=2), 36),
        (dict(length=128), None),  # a full tile
        (dict(length=64), None),  # no windows are shared, and copies cost more than half-empty tiles
        (dict(length=64, in_channels=1536, out_channels=768), 68),
        (dict(length=31), 32),
        (dict(length=31, output_padding=7), 36),
        (dict(length=32, padding=0, output_padding=7), 36),
        (dict(length=64, in_channels=1536, out_channels=768, precision="tf32x3"), None),  # windows are not shared
        (dict(length=140, in_channels=1536), 144),
        (dict(stride=1, kernel_size=7, padding=3), None),  # taps take as long as windows
        (dict(stride=1, kernel_size=3, padding=1), 36),
        (dict(batch=2900), 36),
        (dict(batch=2920), None),  # more than 1 GiB of copies
        (dict(dilation=2), None),
        (dict(kernel_size=7), None),
        (dict(kernel_size=8), 32),
        (dict(kernel_size=9), 36),
        (dict(kernel_size=17), 36),
        (dict(groups=512, in_channels=512, out_channels=512), None),
        (dict(in_channels=64, out_channels=32), None),
    ],
    ids=str,
)
def test_which(changes, apart):
    rest = dict(changes)
    dtype, precision = rest.pop("dtype", torch.float32), rest.pop("precision", "tf32")
    gpu, p = rest.pop("gpu", H200), replace(SEGMENTS, **rest)
    joint = joined(p, dtype, precision, gpu)
    assert (joint and joint.apart) == apart
    if joint:
        one = joint.problem
        assert one.length == p.batch * apart
        assert one.out_length == one.length * p.stride
        assert apart * p.stride >= max((p.length - 1) * p.stride + p.kernel_size, p.padding + p.out_length)
        assert joined(one, dtype, precision, gpu) is None


def test_no_workload_is():
    """Their signals fill tiles."""
    for name, workload in WORKLOADS.items():
        for dtype, precision in ((torch.float32, "tf32"), (torch.bfloat16, "bf16")):
            assert joined(workload.problem, dtype, precision, H200) is None, name
