"""A model launches only kernels that ``warm`` has compiled, in a process that has compiled nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import numba_tconv
from numba_tconv.runtime.kernel import Kernel

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def model_and_input():
    """A small vocoder: a dense layer under weight_norm, a depthwise one, and one to a single channel."""
    model = nn.Sequential(
        nn.Conv1d(40, 64, 3, padding=1),
        nn.utils.parametrizations.weight_norm(nn.ConvTranspose1d(64, 32, 8, 4, 2)),
        nn.ConvTranspose1d(32, 32, 4, 2, 1, groups=32),
        nn.ConvTranspose1d(32, 1, 16, 8, 4),
    )
    return model.cuda(), torch.randn(4, 40, 256, device="cuda")


def step(precision):
    """A process's first training step, after ``warm``: no kernel is compiled."""
    torch.backends.cudnn.allow_tf32 = precision != "ieee"
    model, x = model_and_input()
    assert numba_tconv.convert(model).replaced == 3
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        assert numba_tconv.warm(model, x, training=True) > 0
        assert numba_tconv.warm(model, x, training=True) == 0

        def compiled(kernel, cc):
            raise AssertionError(f"{kernel.name} was compiled: {kernel.key}")

        Kernel.ptx = compiled
        y = model(x)
    y.float().square().mean().backward()
    torch.cuda.synchronize()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
def test_a_step_compiles_nothing(precision, tmp_path):
    main = f"from tests.gpu import test_warm\nif __name__ == '__main__':\n    test_warm.step({precision!r})\n"
    (tmp_path / "main.py").write_text(main)
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py"],
        env=os.environ | {
            "NUMBA_TCONV_CACHE": str(tmp_path / "kernels"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
