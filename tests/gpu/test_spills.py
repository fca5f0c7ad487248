"""What the driver's compiler makes of the tensor-core rungs. Its ptxas is not that of tests/lab/test_offline.py, and
the PTX depends on the version of Python."""

import pytest
import torch
from cuda.bindings import driver

from numba_tconv.formula.precision import PRECISIONS
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.kernel import enter_context
from numba_tconv.selection.registry import RUNGS
from tests.lab.test_offline import EVERY_MATRIX_PRODUCT

from .common import able

pytestmark = pytest.mark.gpu
LOCAL = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES


@pytest.mark.parametrize(("name", "workload", "precision"), EVERY_MATRIX_PRODUCT)
def test_everything_stays_in_registers(name, workload, precision):
    rung, problem = RUNGS[name], workloads.get(workload).problem
    dtype = next(dtype for dtype, known in PRECISIONS.items() if precision in known)
    able(rung, problem, dtype, precision)
    config = rung.config(problem, dtype, precision)
    device = torch.cuda.current_device()
    enter_context(device)
    function = rung.kernel(config).handle(device, rung.shared_bytes(problem, config))
    assert driver.cuFuncGetAttribute(LOCAL, function) == (driver.CUresult.CUDA_SUCCESS, 0)
