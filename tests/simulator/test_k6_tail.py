"""The last column of every sample, which k6 leaves to a kernel on CUDA cores, in the CUDA simulator.

Needs NUMBA_ENABLE_CUDASIM=1 from the start of the process (`make test`).
"""

import pytest
import torch

from numba_tconv.kernels import k6_config, k6_tail
from numba_tconv.problem import Problem
from numba_tconv.ptx import SIMULATOR
from tests.few_blocks import few_threads
from tests.parity import operands, parameters, poisoned
from tests.simulator.test_tensor_pack import expected

pytestmark = pytest.mark.skipif(not SIMULATOR, reason="needs NUMBA_ENABLE_CUDASIM=1")

# More samples than a block takes, phases without outputs there; groups; a last tap that a phase lacks, and tiles of
# channels, the last of them not full.
PROBLEMS = {
    "a decoder's layer": Problem(3, 18, 5, 8, 128, stride=4, padding=1, bias=True),
    "groups": Problem(2, 16, 12, 4, 128, stride=2, padding=1, groups=2),
    "unequal taps, several tiles": Problem(1, 9, 72, 5, 256, stride=2, padding=2, bias=True),
}
TOLERANCES = {"tf32": 1e-3, "tf32x3": 1e-6, "bf16": 4e-3}  # relative to the largest output


@pytest.fixture(autouse=True)
def small_blocks():
    with few_threads(k6_tail, 64, k6_tail.make_kernel):
        yield


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("reason", PROBLEMS)
def test_the_last_column(reason, precision):
    p, dtype = PROBLEMS[reason], torch.bfloat16 if precision == "bf16" else torch.float32
    config = [config for config in k6_config.configs(p, precision) if config.tail][-1]
    chunks = k6_config.channel_chunks(p, config)
    x, w, bias = operands(p, dtype)
    packed = torch.from_numpy(expected(w.float(), p, config.tile, "wgmma", chunks)).to(dtype)
    y = poisoned(p, dtype)
    launch = k6_tail.prepare(p, config, tuple(x.shape), x.stride(), dtype, chunks, p.bias)
    launch(x, packed, bias if p.bias else packed, y)
    first = k6_config.tail_column(p, config) * p.stride - p.padding
    truth = torch.conv_transpose1d(x.double(), w.double(), None if bias is None else bias.double(), **parameters(p))
    assert 0 < first < p.out_length
    assert y[..., :first].isnan().all()
    far = (y[..., first:].double() - truth[..., first:]).abs().max() / truth.abs().max()
    assert far < TOLERANCES[precision]  # false for NaN, too
