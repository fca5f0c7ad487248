"""Every way in which weights change between calls; many leave ``weight._version`` as it was.

A change is a generator: it prepares, yields for the calls that make the layer hot, and writes.
"""

import torch
from numba import cuda
from torch import nn

from .weights_now import PROBLEM

CHANGES = []


def change(function):
    CHANGES.append(function)
    return function


def another(tensor):
    """Other values of the same shape, some three times as large as a new layer's."""
    return (0.1 * torch.randn(tensor.shape, device="cuda")).to(tensor.dtype)


# --- writes that torch counts -----------------------------------------------------------------------------------------


@change
def multiplied_without_gradients(module):
    yield
    with torch.no_grad():
        module.weight.mul_(1.5)


@change
def a_part_through_a_view(module):
    yield
    with torch.no_grad():
        module.weight.flatten()[:1000].zero_()


@change
def a_loaded_state_dict(module):
    yield
    module.load_state_dict({name: another(value) for name, value in module.state_dict().items()})


@change
def another_parameter(module):
    yield
    module.weight = nn.Parameter(another(module.weight))


# --- through .data ----------------------------------------------------------------------------------------------------


@change
def other_data(module):
    yield
    module.weight.data = another(module.weight)


@change
def clamped_as_in_wgan(module):
    yield
    module.weight.data.clamp_(-0.01, 0.01)


@change
def averaged_by_hand(module):
    yield
    module.weight.data.mul_(0.5).add_(another(module.weight), alpha=0.5)


@change
def averaged_by_foreach(module):
    yield
    with torch.no_grad():
        torch._foreach_lerp_([module.weight.data], [another(module.weight)], 0.5)


@change
def copied_data(module):
    yield
    module.weight.data.copy_(another(module.weight))


@change
def added_data(module):
    yield
    module.weight.data += another(module.weight)


@change
def one_row(module):
    yield
    module.weight.data[3] = 1.0


@change
def a_factor_of_low_rank(module):
    yield
    p = PROBLEM
    down = 0.2 * torch.randn(p.in_channels, 4, device="cuda")
    up = 0.2 * torch.randn(4, p.out_channels * p.kernel_size, device="cuda")
    module.weight.data += (down @ up).view_as(module.weight).to(module.weight.dtype)


# --- memory that others write -----------------------------------------------------------------------------------------


def in_one_buffer(module):
    """Lay the parameters side by side in one buffer; they become its views, and it is returned."""
    flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    first = 0
    for parameter in module.parameters():
        parameter.data = flat[first : first + parameter.numel()].view_as(parameter)
        first += parameter.numel()
    return flat


@change
def a_flat_buffer_written_as_a_whole(module):
    flat = in_one_buffer(module)
    yield
    flat.copy_(another(flat))


@change
def a_flat_buffer_written_by_a_fused_optimizer(module):
    flat = nn.Parameter(in_one_buffer(module))
    optimizer = torch.optim.AdamW([flat], lr=0.05, fused=True)
    yield
    flat.grad = torch.randn_like(flat)
    optimizer.step()


@change
def a_view_by_set(module):
    memory = torch.cat([another(module.weight).flatten() for _ in range(2)])
    size, strides = module.weight.shape, module.weight.stride()
    view = torch.empty(0, device="cuda", dtype=memory.dtype)
    module.weight = nn.Parameter(view.set_(memory.untyped_storage(), memory.numel() // 2, size, strides))
    yield
    memory.copy_(another(memory))


@change
def a_buffer_used_again_for_other_weights(module):
    """Two tensors use the same memory one after the other, with equal counts of writes."""
    memory = another(module.weight)

    def weights():
        view = torch.empty(0, device="cuda", dtype=memory.dtype)
        return nn.Parameter(view.set_(memory.untyped_storage(), 0, module.weight.shape, module.weight.stride()))

    module.weight = weights()
    yield
    memory.copy_(another(memory))
    module.weight = weights()


@change
def written_through_dlpack(module):
    alias = torch.from_dlpack(module.weight.detach())
    assert alias.data_ptr() == module.weight.data_ptr()
    yield
    alias.copy_(another(alias))


@change
def weights_that_came_by_dlpack(module):
    memory = another(module.weight)
    module.weight = nn.Parameter(torch.from_dlpack(memory))
    yield
    memory.copy_(another(memory))


def as_bytes(tensor):
    return cuda.as_cuda_array(tensor.detach().view(torch.uint8).flatten())


@change
def copied_by_the_driver(module):
    yield
    source = another(module.weight)
    torch.cuda.synchronize()
    as_bytes(module.weight).copy_to_device(as_bytes(source))
    cuda.synchronize()


@cuda.jit
def _copy(target, source):
    i = cuda.grid(1)
    if i < target.size:
        target[i] = source[i]


@change
def written_by_a_foreign_kernel(module):
    yield
    target, source = as_bytes(module.weight), as_bytes(another(module.weight))
    torch.cuda.synchronize()
    _copy[-(-target.size // 256), 256](target, source)
    cuda.synchronize()
