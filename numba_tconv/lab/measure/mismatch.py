"""Where a forward output is wrong."""

import math
from dataclasses import dataclass

import torch

from numba_tconv.formula.problem import Problem

MOST_LISTED = 6
ALMOST_ALL = 0.99


@dataclass(frozen=True)
class Mismatch:
    """The first wrong output in memory's order, and all of them in words.

    ``phase`` is ``(position + padding) mod stride``; ``wrong`` and ``outputs`` are counts.
    """

    n: int
    channel: int
    position: int
    phase: int
    got: float
    expected: float
    wrong: int
    outputs: int
    pattern: str

    def __str__(self) -> str:
        at = f"n {self.n}, channel {self.channel}, position {self.position} (phase {self.phase})"
        values = f"got {self.got:.6g}, expected {self.expected:.6g}"
        return f"{self.wrong:,} of {self.outputs:,} outputs are wrong: {self.pattern}; the first is {at}: {values}"


def mismatch(
    got: torch.Tensor, expected: torch.Tensor, problem: Problem, tolerance: float | None = None
) -> Mismatch | None:
    """Compare two outputs (N, C_out, L_out); None where all of ``got`` is right.

        >>> expected, wrong_phase = torch.ones(1, 2, 6), torch.tensor([1.0, 0.0] * 3)
        >>> mismatch(expected * wrong_phase, expected, Problem(1, 1, 2, 2, 3, stride=2)).pattern
        'all of phase 1'

    An output is wrong if NaN, or off by more than ``tolerance`` times the largest expected magnitude. None: the larger
    of 1e-5 and twice the spacing of got's dtype; TF32 needs 1e-3. Raises ValueError for other shapes.
    """
    shape = problem.out_shape
    for name, values in (("got", got), ("expected", expected)):
        if tuple(values.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape} of {problem}'s output, got {tuple(values.shape)}")
    if not math.prod(shape):
        return None
    if tolerance is None:
        tolerance = max(1e-5, 2 * torch.finfo(got.dtype).eps)
    limit = tolerance * expected.abs().max().double()
    # By samples, to fit in memory.
    wrong = torch.stack([~((a.double() - b.double()).abs() <= limit) for a, b in zip(got, expected, strict=True)])
    if not wrong.any():
        return None
    first = int(wrong.flatten().byte().argmax())
    n, rest = divmod(first, shape[1] * shape[2])
    channel, position = divmod(rest, shape[2])
    return Mismatch(
        *(n, channel, position, (position + problem.padding) % problem.stride),
        *(got.flatten()[first].item(), expected.flatten()[first].item()),
        *(int(wrong.sum()), wrong.numel(), _pattern(wrong, problem)),
    )


def _pattern(wrong: torch.Tensor, p: Problem) -> str:
    """The smallest product of samples, groups, channels, phases and positions that holds ``wrong``, and how much of it
    is wrong."""
    wrong = wrong.unflatten(1, (p.groups, p.out_channels_per_group))

    def along(axis):
        """Places on this axis that hold a wrong output."""
        return wrong.any(dim=[other for other in range(4) if other != axis]).nonzero().flatten().tolist()

    samples, groups, channels, positions = along(0), along(1), along(2), along(3)
    phases = sorted({(o + p.padding) % p.stride for o in positions})
    eligible = [o for o in range(p.out_length) if (o + p.padding) % p.stride in phases]
    of_groups = _words(groups, p.groups, "group")
    of_channels = _words(channels, p.out_channels_per_group, "channel", ends=True)
    if of_channels and p.groups > 1:
        of_channels, of_groups = f"{of_channels} of {of_groups or 'each group'}", ""
    where, within = _range_of(positions, eligible)
    parts = _words(samples, p.batch, "sample"), of_groups, of_channels, _words(phases, p.stride, "phase"), where
    share = int(wrong.sum()) / (len(samples) * len(groups) * len(channels) * within)
    amount = "all" if share == 1 else f"{min(share, ALMOST_ALL):.0%}"
    return f"{amount} of {', '.join(filter(None, parts)) or 'the outputs'}"


def _words(values: list[int], size: int, noun: str, ends: bool = False) -> str:
    """``values`` of ``range(size)`` in words, "" for all. ``ends``: counted from the first or last."""
    low, high, count = values[0], values[-1], len(values)
    if count == size:
        return ""
    if ends and values == list(range(size - count, size)):
        return f"the last {noun}" if count == 1 else f"the last {count} {noun}s"
    if count == 1:
        return f"{noun} {low}"
    if values == list(range(low, high + 1)):
        return f"the first {count} {noun}s" if ends and not low else f"{noun}s {low} to {high}"
    if count <= MOST_LISTED:
        return f"{noun}s {', '.join(map(str, values))}"
    return _spaced(values, noun) or f"{count} of {size} {noun}s"


def _range_of(positions: list[int], eligible: list[int]) -> tuple[str, int]:
    """The range of ``positions`` among ``eligible`` in words, "" for all, and its size."""
    if positions == eligible:
        return "", len(eligible)
    first, last = eligible.index(positions[0]), eligible.index(positions[-1])
    within = last - first + 1
    if len(positions) < within and (spaced := _spaced(positions, "position")):
        return spaced, len(positions)
    if within == len(eligible):
        return "", within
    if positions[0] == positions[-1]:
        return f"position {positions[0]}", within
    if first and last == len(eligible) - 1:
        return f"positions from {positions[0]} on", within
    return f"positions {positions[0]} to {positions[-1]}", within


def _spaced(values: list[int], noun: str) -> str:
    """Three or more equally spaced values, else ""."""
    if len(values) < 3:
        return ""
    first, second = values[:2]
    even = values == list(range(first, values[-1] + 1, second - first))
    return f"{noun}s {first}, {second}, ... {values[-1]}" if even else ""
