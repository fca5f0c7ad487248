"""What Numba is asked while a kernel compiles, and that it is answered as without."""

import operator
import os
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from numba import types
from numba.core.errors import TypingError
from numba.cuda.descriptor import cuda_target

from numba_tconv.kernels import k3_shared_tile
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.numba_patches import remembered_call_types
from numba_tconv.selection.registry import RUNGS

CONTEXT = cuda_target.typing_context


@pytest.fixture
def add():
    CONTEXT.refresh()
    return CONTEXT.resolve_value_type(operator.add)


def test_a_call_of_known_types_is_not_asked_for_again(add, monkeypatch):
    owner = next(base for base in type(add).__mro__ if "get_call_type" in vars(base))
    original, asked = owner.get_call_type, []

    def get_call_type(self, context, args, kws):
        asked.append(args)
        return original(self, context, args, kws)

    monkeypatch.setattr(owner, "get_call_type", get_call_type)
    pairs = [(types.int32, types.int32), (types.int64, types.int32), (types.float32, types.float32)]
    pairs += [(types.literal(number), types.int32) for number in (1, 2)]  # a literal is a type of its own
    plain = [add.get_call_type(CONTEXT, pair, {}) for pair in pairs]
    asked.clear()
    with remembered_call_types():
        for _ in range(3):
            assert [add.get_call_type(CONTEXT, pair, {}) for pair in pairs] == plain
    assert asked == pairs
    with remembered_call_types():
        add.get_call_type(CONTEXT, pairs[0], {})
    assert asked == [*pairs, pairs[0]], "kept for one kernel"
    assert owner.get_call_type is get_call_type


def test_errors_are_raised_each_time(add):
    with remembered_call_types():
        for _ in range(2):
            with pytest.raises(TypingError, match="No implementation of function"):
                add.get_call_type(CONTEXT, (types.int32, types.none), {})


def test_it_ends_with_what_it_surrounds(add):
    before = type(add).get_call_type

    def fail():
        with remembered_call_types():
            assert type(add).get_call_type is not before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert type(add).get_call_type is before


def new_kernel():
    config = RUNGS["k3_shared_tile"].config(workloads.get("kb64").problem, torch.float32, "ieee")
    return k3_shared_tile.make_kernel.__wrapped__(config)


def nameless(ptx):
    """Without the names that Numba numbers."""
    return re.sub(r"[\w$]*numba_tconv[\w$]*|_cudapy_smem_\d+", "name", ptx)


@pytest.mark.parametrize("variable", ["NUMBA_CUDA_DEBUGINFO=1", "NUMBA_OPT=0"])
def test_kernels_are_the_same_whatever_numba_is_told(variable):
    """They would be refused, or kept without optimisation for later processes."""
    script = "from tests.runtime.test_call_types import *; print(nameless(new_kernel().ptx((9, 0, 'a'))))"
    environment = os.environ | dict([variable.split("=")])
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == nameless(new_kernel().ptx((9, 0, "a"))).rstrip()


@pytest.mark.parametrize("patch", ["remembered_call_types", "shortened"])
def test_kernels_are_the_same(patch, monkeypatch):
    """But for names."""

    def ptx():
        return nameless(new_kernel().ptx((9, 0, "a")))

    @contextmanager
    def as_ever():
        asked.append("anew")
        yield

    asked, remembering = [], ptx()
    monkeypatch.setattr(f"numba_tconv.runtime.kernel.{patch}", as_ever)
    assert ptx() == remembering
    assert asked == ["anew"], "kernels are compiled within it"
    assert "fma.rn.f32" in remembering
