"""Parity of the gradients: operands, reference, torch's gradients, lengths of sums, operators by gradient.

Verdict, small problems and memory layouts are parity.py's.
"""

import math

import torch
from torch._C import DispatchKey, DispatchKeySet

import reference
from numba_tconv.selection import gradient as gradients
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.torch_api import gradient_operators as grad_ops
from numba_tconv.torch_api import operators as ops
from numba_tconv.torch_api import torchs

from .parity import LAYOUTS, operands, verdict

OF = ("grad_input", "grad_weight", "grad_bias")
ON_CUDA_CORES = {name: rung for name, rung in GRADIENTS.items() if not rung.tensor_cores}
ON_TENSOR_CORES = {name: rung for name, rung in GRADIENTS.items() if rung.tensor_cores}
OPERATORS = {of: getattr(grad_ops, of) for of in OF}


def gradient_operands(problem, dtype, device="cpu", layout="contiguous"):
    """Fresh random grad_output, input and weight, from torch's generator."""
    x, w, _ = operands(problem, dtype, device, layout)
    return LAYOUTS[layout](torch.randn(problem.out_shape, device=device).to(dtype)), x, w


def inputs_of(of, g, x, w):
    """The operands of a gradient, in the order of its kernels."""
    return {"grad_input": (g, w), "grad_weight": (g, x), "grad_bias": (g,)}[of]


def operator_arguments(of, problem, g, x, w, precision="ieee"):
    p = problem
    rest = *p.parameters, precision
    return {
        "grad_input": (g, w, p.length, *rest),
        "grad_weight": (g, x, p.kernel_size, *rest),
        "grad_bias": (g, precision),
    }[of]


def as_on_a_gpu(of, *arguments):
    """The result of the operator's CUDA implementation, called with CPU tensors."""
    return OPERATORS[of].redispatch(DispatchKeySet(DispatchKey.CUDA), *arguments)


def forget_what_is_ready():
    """Let the gradients' operators choose anew, as on another GPU."""
    for remembered in (ops.ready_input, ops.ready_weight, ops.ready_bias, gradients.ready):
        remembered.cache_clear()


def poisoned_gradient(of, problem, dtype, device="cpu"):
    return torch.full(problem.shape_of(of), math.nan, dtype=dtype, device=device)


def computed_gradient(rung, g, x, w, problem, config=None, precision=None):
    """The rung's gradient, in memory full of NaN."""
    result = poisoned_gradient(rung.of, problem, g.dtype, g.device)
    rung.run(*inputs_of(rung.of, g, x, w), result, problem, config, precision)
    return result


def references_gradient(of, g, x, w, problem):
    """The reference's gradient, as a float64 tensor."""
    p = problem
    g, x, w = (t.double().numpy() for t in (g, x, w))
    sizes = dict(stride=p.stride, padding=p.padding, groups=p.groups, dilation=p.dilation)
    gradients = {
        "grad_input": lambda: reference.grad_input(g, w, p.length, **sizes),
        "grad_weight": lambda: reference.grad_weight(g, x, p.kernel_size, **sizes),
        "grad_bias": lambda: reference.grad_bias(g),
    }
    return torch.from_numpy(gradients[of]())


def torchs_gradient(of, g, x, w, problem):
    wanted = [of == name for name in OF]
    return torchs.gradients(g, x, w, [problem.out_channels], problem.parameters, wanted)[OF.index(of)]


def gradient_terms(of, problem) -> int:
    """Products in the longest sum of one element of the gradient."""
    return problem.terms(of)


def gradient_answers(of, g, x, w, problem):
    """torch's gradient, the reference's, and the products of its longest sum, on the CPU: for ``verdict``."""
    theirs, oracle = torchs_gradient(of, g, x, w, problem), references_gradient(of, g, x, w, problem)
    return theirs, oracle, gradient_terms(of, problem)


def check_gradient_configs(rung, problem, dtype, configs, layout="contiguous", place=lambda tensor: tensor):
    """Each configuration computes the gradient on the CPU; ``place`` moves the operands with samples."""
    assert configs
    g, x, w = gradient_operands(problem, dtype, layout=layout)
    right = gradient_answers(rung.of, g, x, w, problem)
    for config in configs:
        assert verdict(computed_gradient(rung, place(g), place(x), w, problem, config), *right) is None, config
