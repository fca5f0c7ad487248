"""Memory layouts of tensors, and fences around them, which must stay.

Fences are NaN in every dtype, so a product with anything beyond a tensor shows.
"""

import torch

FENCE = 512  # bytes; torch's new tensors begin at multiples of it
PATTERN = 0xFF

VIEWS = {
    "contiguous": lambda t: t,
    "length, batch, channels in memory": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "gaps in every dimension": lambda t: t.repeat(2, 3, 2)[::2, 1::3, ::2],
    "windows that overlap": lambda t: t.as_strided(t.shape, (3, 2, 1)),
    "windows that overlap, positions apart": lambda t: t.flatten().repeat(3).as_strided(t.shape, (1, 3, 2)),
    "one sample repeated": lambda t: t[:1].expand_as(t),
    "one position repeated": lambda t: t[..., :1].expand_as(t),
    "one number": lambda t: t[:1, :1, :1].expand_as(t),
}


class Fenced:
    """A copy of a tensor between two fences, with its strides and overlaps, ``shift`` elements further on."""

    def __init__(self, tensor: torch.Tensor, shift: int = 0):
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        fence = FENCE // tensor.itemsize
        self.memory = torch.full(
            ((2 * fence + shift + span) * tensor.itemsize,), PATTERN, dtype=torch.uint8, device=tensor.device
        )
        elements = self.memory.view(tensor.dtype)
        self.first, self.end = fence + shift, fence + shift + span
        elements[self.first : self.end] = tensor.as_strided((span,), (1,))
        self.tensor = elements.as_strided(tensor.shape, tensor.stride(), self.first)
        self._before = self.memory.clone()

    def is_untouched(self) -> bool:
        return torch.equal(self.memory, self._before)

    def is_fence_whole(self) -> bool:
        first, end = (place * self.tensor.itemsize for place in (self.first, self.end))
        return bool((self.memory[:first] == PATTERN).all()) and bool((self.memory[end:] == PATTERN).all())


def fenced(run, operands, result, shift=0):
    """The result of ``run(*operands, result)`` on fenced copies; all but the result must stay."""
    given = [None if operand is None else Fenced(operand, shift) for operand in operands]
    output = Fenced(result, shift)
    run(*(None if one is None else one.tensor for one in given), output.tensor)
    assert output.is_fence_whole(), "it wrote beyond the result"
    assert all(one is None or one.is_untouched() for one in given), "it wrote to an operand"
    return output.tensor
