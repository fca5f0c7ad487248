"""What the driver's compiler makes of the rungs on tensor cores. It is not the ptxas of tests/test_offline.py, and the
PTX may be another: that depends on the version of Python."""

import pytest
import torch
from cuda.bindings import driver

from numba_tconv import workloads
from numba_tconv.functional import PRECISIONS
from numba_tconv.kernels import RUNGS
from numba_tconv.launch import enter_context
from tests.gpu.common import able
from tests.test_offline import EVERY_MATRIX_PRODUCT

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
