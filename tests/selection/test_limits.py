"""Each limit of rungs, steps and activations: the last size that they take, and the first that they refuse."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients.alias_free import plan as activation_gradients
from numba_tconv.kernels.alias_free import plan as activations
from numba_tconv.kernels.streaming import depthwise, mma_tile, tile
from numba_tconv.ptx import SIMULATOR
from numba_tconv.runtime.device import H200
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.registry import RUNGS

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
F32, HALF = torch.float32, torch.bfloat16
M31, M30 = 2**31 - 1, 2**30
ROW, LAYER = Problem(1, 1, 1, 4, 100, stride=2), Problem(2, 64, 64, 8, 100, stride=4)
TWO_GROUPS = dict(in_channels=2, out_channels=2, groups=2)


def supports(name, dtype=F32, precision="ieee"):
    return lambda p: (RUNGS | GRADIENTS)[name].supports(p, dtype, precision)


def unsuited(name, dtype=F32, precision="ieee", device=H200):
    return lambda p: (RUNGS | GRADIENTS)[name].unsuited(p, dtype, precision, device)


DEPTHWISE = supports("depthwise")
TENSOR_CORES = {name: supports(name, F32, "tf32") for name in ("k5_mma", "k6_wgmma")}
INPUT, WEIGHT = (supports(f"grad_{of}_wgmma", F32, "tf32") for of in ("input", "weight"))
FEW_INPUT, FEW_WEIGHT = (supports(f"grad_{of}_depthwise") for of in ("input", "weight"))
GROUP, COUNTS = "it takes up to 8 input and 8 output channels a group", "it counts samples, channels, phases"
STEP = Problem(16, 64, 64, 4, 2, 2, groups=64)
PRODUCTS = partial(mma_tile.refusal, dtype=HALF, precision="bf16", limit=H200.shared_per_block)
DENSE = Problem(16, 128, 64, 8, 2, 4)
# Of what is asked: a problem, sizes that are taken, those that are refused, and the reason.
LIMITS = {
    "depthwise: inputs": (DEPTHWISE, ROW, dict(in_channels=8), dict(in_channels=9), GROUP),
    "depthwise: outputs": (DEPTHWISE, ROW, dict(out_channels=8), dict(out_channels=9), GROUP),
    "depthwise: rows": (DEPTHWISE, ROW, dict(batch=M31), dict(batch=M31 + 1), "it takes up to 2147483647 pairs"),
    "depthwise: groups": (
        *(DEPTHWISE, replace(ROW, **TWO_GROUPS), dict(batch=M30 - 1), dict(batch=M30)),
        "it takes up to 2147483647 pairs of a sample and a group",
    ),
    "grad_input_depthwise: inputs": (FEW_INPUT, ROW, dict(in_channels=8), dict(in_channels=9), GROUP),
    "grad_input_depthwise: outputs": (FEW_INPUT, ROW, dict(out_channels=8), dict(out_channels=9), GROUP),
    "grad_input_depthwise: taps": (
        *(FEW_INPUT, ROW, dict(kernel_size=32), dict(kernel_size=33), "it takes up to 32 taps, not 33"),
    ),
    "grad_input_depthwise: span": (
        *(FEW_INPUT, ROW, dict(kernel_size=14, dilation=3), dict(kernel_size=5, dilation=10)),
        "it takes taps that span up to 40 samples",
    ),
    "grad_input_depthwise: samples": (
        *(FEW_INPUT, ROW, dict(length=M30 // 2 - 41, padding=1), dict(length=M30 // 2 - 40, padding=0)),
        f"it takes rows of up to {M30} samples",
    ),
    "grad_input_depthwise: samples with padding": (
        *(FEW_INPUT, ROW, dict(length=M30 // 2 - 42, padding=3), dict(length=M30 // 2 - 42, padding=4)),
        f"it takes rows of up to {M30} samples",
    ),
    "grad_input_depthwise: rows": (
        *(FEW_INPUT, ROW, dict(batch=M31), dict(batch=M31 + 1)),
        "it takes up to 2147483647 pairs of a sample and a channel",
    ),
    "grad_input_depthwise: rows of channels": (
        *(FEW_INPUT, replace(ROW, in_channels=2), dict(batch=M30 - 1), dict(batch=M30)),
        "it takes up to 2147483647 pairs of a sample and a channel",
    ),
    "grad_weight_depthwise: blocks": (
        *(FEW_WEIGHT, replace(ROW, length=1), dict(in_channels=M31, groups=M31, out_channels=M31)),
        *(dict(in_channels=2 * M30, groups=2 * M30, out_channels=2 * M30), "it takes up to 2147483647 blocks"),
    ),
    "grad_weight_depthwise: taps": (FEW_WEIGHT, ROW, dict(kernel_size=32), dict(kernel_size=33), "it takes up to 32"),
    "grad_input_wgmma: samples": (INPUT, LAYER, dict(batch=2**24), dict(batch=M30), COUNTS),
    "grad_input_wgmma: inputs": (INPUT, LAYER, dict(in_channels=2**20), dict(in_channels=M30), COUNTS),
    "grad_input_wgmma: outputs and phases": (
        *(INPUT, LAYER, dict(out_channels=2**28 - 8), dict(out_channels=2**28), COUNTS),
    ),
    "grad_input_wgmma: positions": (*(INPUT, LAYER, dict(length=2**28 - 2), dict(length=2**28 - 1), COUNTS),),
    "grad_weight_wgmma: positions": (*(WEIGHT, LAYER, dict(length=2**28 - 2), dict(length=2**28 - 1), COUNTS),),
    "grad_input_wgmma: tiles": (INPUT, LAYER, dict(batch=2**29), dict(batch=2**29, length=2**20), "it counts tiles"),
    "step of channels: inputs": (
        *(depthwise.refusal, STEP, {}, dict(in_channels=128), "it takes one channel a group"),
    ),
    "step of channels: outputs of a group": (
        *(depthwise.refusal, STEP, {}, dict(out_channels=128), "it takes one channel a group"),
    ),
    "step of channels: frames": (
        *(depthwise.refusal, STEP, dict(length=depthwise.MOST_FRAMES), dict(length=depthwise.MOST_FRAMES + 1)),
        f"it takes up to {depthwise.MOST_FRAMES} new frames",
    ),
    "step of channels: taps": (
        *(depthwise.refusal, replace(STEP, stride=8), dict(kernel_size=depthwise.MOST_TAPS)),
        *(dict(kernel_size=depthwise.MOST_TAPS + 1), f"it takes up to {depthwise.MOST_FRAMES} new frames"),
    ),
    "step of channels: slots": (
        *(depthwise.refusal, STEP, dict(batch=65_535), dict(batch=65_536), "it takes up to 65535 slots"),
    ),
    "step of channels: frames kept": (
        *(depthwise.refusal, replace(STEP, stride=4), dict(kernel_size=20), dict(kernel_size=24)),
        f"it takes up to {depthwise.MOST_FRAMES} new frames",
    ),
    "step of channels: outputs": (
        *(depthwise.refusal, replace(STEP, kernel_size=32), dict(stride=16, length=4)),
        *(dict(stride=17, length=4), "it computes up to 64 outputs"),
    ),
    "step of columns: dtype": (
        lambda p: tile.refusal(p, torch.int32 if p.bias else F32),
        *(DENSE, {}, dict(bias=True), "it takes float64, float32, float16, bfloat16, not int32"),
    ),
    "step of columns: taps": (
        *(partial(tile.refusal, dtype=F32), replace(DENSE, in_channels=8), dict(kernel_size=512, stride=512)),
        *(dict(kernel_size=513, stride=512), "it takes up to 512 taps"),
    ),
    "products of a step: frames": (PRODUCTS, DENSE, dict(length=64), dict(length=65), "it takes up to 64 new frames"),
    "products of a step: taps": (PRODUCTS, DENSE, dict(stride=8), dict(stride=3), "its taps are a multiple of"),
    "products of a step: dilation": (PRODUCTS, DENSE, {}, dict(dilation=2), "its taps are a multiple of"),
    "products of a step: inputs": (PRODUCTS, DENSE, {}, dict(in_channels=132), "it takes a multiple of 8 input"),
    "k3: meant for": (
        *(unsuited("k3_shared_tile"), ROW, dict(out_channels=16), dict(out_channels=15)),
        "it is for at least 16 output channels a group, not 15",
    ),
    "grad_input_depthwise: meant for": (
        *(unsuited("grad_input_depthwise"), ROW, dict(in_channels=2, out_channels=2), dict(in_channels=3)),
        "it is for up to 2 channels a group",
    ),
}
# The same, of activations and their gradients.
SIZES = AliasFree(1, 1, 64, 12, 12)
ACTIVATIONS = {
    "length": (activations.refusal, dict(length=2**28), dict(length=2**28 + 1), "it takes rows of up to 268435456"),
    "rows": (activations.refusal, dict(batch=M31), dict(batch=M31 + 1), "it takes up to 2147483647 rows"),
    "rows of channels": (
        activations.refusal,
        dict(batch=M30 - 1, channels=2),
        dict(batch=M30, channels=2),
        "it takes up",
    ),
    "gradients: length": (
        *(activation_gradients.refusal, dict(length=2**28), dict(length=2**28 + 1)),
        "they take rows of up to 268435456",
    ),
    "gradients: tiles": (
        *(activation_gradients.refusal, dict(batch=M31 // 3), dict(batch=M31 // 3 + 1)),
        "they take up to 2147483647 tiles",
    ),
    "gradients: tiles of a row": (
        *(activation_gradients.refusal, dict(batch=M31 // 7, length=383), dict(batch=M31 // 7, length=384)),
        "they take up to 2147483647 tiles",
    ),
}
for _name, _ask in TENSOR_CORES.items():
    LIMITS |= {
        f"{_name}: samples": (_ask, LAYER, dict(batch=M31), dict(batch=M31 + 1), "it counts samples in 32 bits"),
        f"{_name}: inputs of a group": (
            *(_ask, replace(LAYER, groups=8), {}, dict(in_channels=56), "it needs 8 channels a group, not 7"),
        ),
        f"{_name}: outputs of a group": (
            *(_ask, replace(LAYER, groups=8), {}, dict(out_channels=56), "it needs 8 channels a group, not 7"),
        ),
    }


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit(limit):
    ask, problem, taken, refused, why = LIMITS[limit]
    assert ask(replace(problem, **taken)) is None
    assert str(ask(replace(problem, **refused))).startswith(why)


@pytest.mark.parametrize("limit", ACTIVATIONS)
def test_a_limit_of_activations(limit):
    ask, taken, refused, why = ACTIVATIONS[limit]
    assert ask(SIZES._replace(**taken)) is None
    assert str(ask(SIZES._replace(**refused))).startswith(why)
