"""The layer, made and called with bad arguments: torch's types of refusals, and what torch accepts."""

import itertools
import random
import re

import pytest
import torch
from torch import nn

import numba_tconv
from numba_tconv.torch_api import streaming
from tests.bad_calls import REPLACEMENTS, disagreement, outcome
from tests.thorough import thorough

from .test_bad_calls import only_on_the_cpu
from .test_errors import taken  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element", "ignore:Sparse CSR")

KINDS = (nn.ConvTranspose1d, numba_tconv.ConvTranspose1d)
MADE_WITH = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
SIZES = [0, -1, 1, 2, 3, 4.0, "4", None, True, (2,), [2], (3, 1), (), (-1,), (2.0,), torch.tensor(2)]
VALUES = {
    **dict.fromkeys(("in_channels", "out_channels", "kernel_size", "stride", "output_padding"), SIZES),
    "padding": [size for size in SIZES if size != "4"],  # an unknown word here
    **dict.fromkeys(("groups", "dilation"), SIZES),
    "bias": [True, False, None, 0, "no", torch.ones(6), torch.ones(())],
    "padding_mode": ["zeros", "reflect", "same", None, 0],
    "device": [None, "cpu", "meta", "nowhere", "cpu:x", 1.5],
    "dtype": [None, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, "float32", float],
}


def torchs_and_ours(make):
    """What ``make`` makes or raises for torch's layer and ours, each after the same seed."""
    outcomes = []
    for kind in KINDS:
        torch.manual_seed(7)
        outcomes.append(outcome(make, {"kind": kind}))
    return outcomes


def difference(theirs, ours):
    """The difference between two layers, or two refusals, or None."""
    if not isinstance(theirs, nn.Module) or not isinstance(ours, nn.Module):
        return None if type(ours) is type(theirs) else f"torch: {theirs!r}, ours: {ours!r}"
    parameters = [{n: (p.shape, p.dtype, p.device) for n, p in one.named_parameters()} for one in (theirs, ours)]
    return None if parameters[0] == parameters[1] and repr(ours) == repr(theirs) else f"torch: {theirs}, ours: {ours}"


PAIRS = list(itertools.combinations_with_replacement(VALUES, 2))


@pytest.mark.parametrize("pair", thorough(PAIRS, always=PAIRS[::2], tuples=True), ids=" ".join)
def test_made(pair):
    drawn = random.Random(" ".join(pair))
    chosen = [{name: drawn.choice(VALUES[name]) for name in pair} for _ in range(6)]
    if pair[0] == pair[1]:
        chosen = [{pair[0]: value} for value in VALUES[pair[0]]]
    found = {}
    for arguments in chosen:
        theirs, ours = torchs_and_ours(lambda kind, arguments=arguments: kind(**MADE_WITH | arguments))
        if what := difference(theirs, ours):
            found[str(arguments)] = what
    assert found == {}


LAYERS = [{}, {"stride": 3, "padding": 2, "output_padding": 1, "groups": 2, "dilation": 2, "bias": False}]
OUTPUT_SIZES = [
    *(None, 9, "9", 9.0, [], [8], [9], (9,), [10], [19], [20], [21], [22], [2**40], [-1], [9.0], ["9"], [None], [True]),
    *([6, 9], [6, 20], [2, 6, 9], [2, 6, 20], [2, 6, 21], [0, 0, 9], [1, 2, 6, 9], torch.Size([9]), torch.tensor([9])),
]
CHANGES = [
    *({}, {"padding_mode": "reflect"}, {"padding": [1]}, {"padding": 1}, {"padding": (9,)}, {"stride": (0,)}),
    *({"stride": 2}, {"output_padding": (7,)}, {"output_padding": 1}, {"groups": 3}, {"groups": None}, {"bias": None}),
    *({"dilation": (1.5,)}, {"dilation": None}, {"kernel_size": (5,)}),
]


def output_after_change(kind, made_with, change, x, output_size):
    """The output of a layer with changed attributes."""
    layer = kind(**MADE_WITH | made_with)
    for name, value in change.items():
        setattr(layer, name, value)
    return layer(x, output_size)


@pytest.mark.parametrize(
    "made_with", [pytest.param(LAYERS[0], marks=pytest.mark.thorough), LAYERS[1]], ids=["plain", "every argument"]
)
@pytest.mark.parametrize("varied", ["input", "output_size", "change", "all"])
def test_called(made_with, varied, taken):  # noqa: F811
    good, inputs, drawn = "a parameter", list(REPLACEMENTS["input"]), random.Random(varied)
    cases = {
        "input": [(label, None, {}) for label in inputs],
        "output_size": [(good, size, {}) for size in OUTPUT_SIZES],
        "change": [(good, size, change) for change in CHANGES for size in (None, [9], [20])],
        "all": [(drawn.choice(inputs), drawn.choice(OUTPUT_SIZES), drawn.choice(CHANGES)) for _ in range(200)],
    }[varied]
    found = {}
    for label, size, change in cases:
        x = REPLACEMENTS["input"][label](torch.randn(2, 4, 7))
        if only_on_the_cpu({"input": x, "bias": None if made_with.get("bias", True) is False else torch.ones(1)}):
            continue
        theirs, ours = torchs_and_ours(
            lambda kind, change=change, x=x, size=size: output_after_change(kind, made_with, change, x, size)
        )
        if what := disagreement(ours, theirs):
            found[f"input {label}, output_size {size}, {change}"] = what
    assert found == {}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((2, [1.0]), TypeError, "weight must be a Tensor, not list"),
        ((2, torch.zeros(4, 2)), RuntimeError, "weight must be (C_in, C_out/groups, K), got shape (4, 2)"),
        ((-1, torch.zeros(4, 2, 3)), RuntimeError, "batch_size must not be negative, got -1"),
        ((2.0, torch.zeros(4, 2, 3)), TypeError, "batch_size"),
    ],
    ids=["a list", "dimensions", "negative", "a float"],
)
def test_a_state_that_no_layer_has_is_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        streaming.initial_state(*arguments)
