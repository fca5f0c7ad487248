"""The simulator has no compiler."""

import pytest
import torch
from torch import nn

import numba_tconv


def test_nothing_is_compiled():
    with pytest.raises(RuntimeError, match="the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM"):
        numba_tconv.warm(nn.ConvTranspose1d(4, 4, 4), torch.empty(1, 4, 8))
