"""Tensors that compute themselves, and how operators compute DTensors.

They are linear in each operand, so shares split the batch, output channels, or input channels (partial sums); with
groups only the batch. No process lacks channels.
"""

import sys
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import fast_path as direct
from . import gradient_operators as grad_ops
from . import operators as ops

MODULE = "torch.distributed.tensor"
TRACED = (FakeTensor, FunctionalTensor)  # under torch.compile


def compute_themselves(*tensors: torch.Tensor | None) -> bool:
    """Whether a subclass's ``__torch_dispatch__``, which may know torch's operators alone, gets the call."""
    return any(
        type(tensor) not in (*direct.PLAIN, type(None))
        and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        and not isinstance(tensor, TRACED)
        and not is_sharded(tensor)
        for tensor in tensors
    )


def is_sharded(tensor: torch.Tensor) -> bool:
    module = sys.modules.get(MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def prepare() -> None:
    """Register the rules if DTensors, slow to import, are loaded."""
    if MODULE in sys.modules:
        register()


# As in functional.py.
prepare._dynamo_marked_constant = True


@cache
def register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    whole, terms = Replicate(), Partial()
    batch, channels = Shard(0), Shard(1)  # of a signal
    by_input, by_output = Shard(0), Shard(1)  # of a weight's channels

    def rules(numbers, mesh, groups, always, *alone):
        """Placements; ``numbers`` arguments are no tensors. ``alone``: without groups, behind their channels."""
        before = mesh.size() - 1
        shared = [rule for count, *rule in alone if groups == 1 and -(-count // mesh.size()) * before < count]
        return [([y], [*of, *[None] * numbers]) for y, *of in (*always, *shared)]

    @register_sharding(ops.conv_transpose1d)
    def _forward(input, weight, bias, stride, padding, output_padding, groups, *_):
        # One share holds the bias, others zeros.
        always = (
            (whole, whole, whole, whole),
            (batch, batch, whole, whole),
            (terms, terms, whole, terms),
            (terms, whole, terms, terms),
        )
        inputs, outputs, _ = weight.shape
        alone = (outputs, channels, whole, by_output, Shard(0)), (inputs, terms, channels, by_input, terms)
        if bias is None:
            always, alone = ([(*rule[:-1], None) for rule in some] for some in (always, alone))
        return rules(7, input.mesh, groups, always, *alone)

    @register_sharding(grad_ops.grad_input)
    def _grad_input(grad_output, weight, length, stride, padding, output_padding, groups, *_):
        always = (whole, whole, whole), (batch, batch, whole), (terms, terms, whole), (terms, whole, terms)
        inputs, outputs, _ = weight.shape
        alone = (outputs, terms, channels, by_output), (inputs, channels, whole, by_input)
        return rules(7, weight.mesh, groups, always, *alone)

    @register_sharding(grad_ops.grad_weight)
    def _grad_weight(grad_output, input, kernel_size, stride, padding, output_padding, groups, *_):
        always = (whole, whole, whole), (terms, batch, batch), (terms, terms, whole), (terms, whole, terms)
        outputs, inputs = grad_output.shape[1], input.shape[1]
        alone = (outputs, by_output, channels, whole), (inputs, by_input, whole, channels)
        return rules(7, input.mesh, groups, always, *alone)

    @register_sharding(grad_ops.grad_bias)
    def _grad_bias(grad_output, precision):
        always = (whole, whole), (terms, batch), (Shard(0), channels), (terms, terms)
        return rules(1, grad_output.mesh, 1, always)
