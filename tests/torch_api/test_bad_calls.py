"""Calls of bad_calls.py: refusals have torch's type; accepted calls have torch's shape and kind of result.

CPU and meta tensors go to torch. CPU tensors that count as a GPU's (as in test_errors.py) tell who refuses.
"""

import itertools

import pytest
import torch

from tests.bad_calls import (
    PAIRS,
    REPLACEMENTS,
    TORCHS,
    disagreements,
    is_huge,
    is_left_to_torch,
    pairs_of_arguments,
    tensors_of,
)
from tests.thorough import thorough

from .test_errors import taken, watched  # noqa: F401  (fixtures)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


@pytest.mark.parametrize(
    ("pair", "device"),
    thorough(
        itertools.product(PAIRS, ["cpu", "meta"]),
        always=[*((pair, "cpu") for pair in PAIRS[::2]), *((pair, "meta") for pair in PAIRS[::4])],
    ),
)
def test_what_goes_to_torch(pair, device):
    assert disagreements(pair, device) == {}


def only_on_the_cpu(arguments):
    """Whether torch's CPU backends differ: tensors without memory; a bias of another dtype; a dilation of 0."""
    x, bias = arguments["input"], arguments.get("bias")
    return (
        any(tensor.is_meta for tensor in tensors_of(arguments))
        or (isinstance(x, torch.Tensor) and isinstance(bias, torch.Tensor) and x.dtype != bias.dtype)
        or repr(arguments.get("dilation")) in ("0", "(0,)")
    )


NAMES = *REPLACEMENTS, "kernel_size", "length"


@pairs_of_arguments
def test_what_is_taken(pair, taken, watched):  # noqa: F811
    def reached(arguments, ours, theirs):
        was, watched.reached = watched.reached, False
        if isinstance(theirs, torch.Tensor):
            return None if torch.equal(ours, TORCHS(**arguments)) else "another result"
        if is_left_to_torch(arguments) or is_huge(arguments) or "Output size is too small" in str(theirs):
            return None
        if was:
            return f"only torch refused it: {theirs}"
        return None if any(name in str(ours) for name in NAMES) else f"it names no argument: {ours}"

    assert disagreements(pair, skip=only_on_the_cpu, more=reached) == {}
