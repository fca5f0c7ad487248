"""The GPU that the simulator stands for has few multiprocessors, as its blocks run one after the other."""

import torch

from numba_tconv.gradients.weight.split import choose
from numba_tconv.lab.measure import check
from numba_tconv.runtime import device


def test_tensors_are_on_the_simulated_gpu():
    assert device.of(torch.empty(1).get_device()) is device.SIMULATED
    assert device.of(None) is device.H200


def test_sums_are_split_among_few_multiprocessors():
    for problem in check.SMALL[1:]:
        config = choose.choose(problem, torch.float32, device.SIMULATED)
        splits, _ = choose.splits_of(problem, config, device.SIMULATED)
        assert splits <= device.SIMULATED.multiprocessors
