"""Tuples that the device functions share."""

from typing import NamedTuple


class Sizes(NamedTuple):
    length: int
    out_length: int
    channels: int
    passes: int  # tiles of a block
    blocks: int
    splits: int  # parts of a channel's sums


class UpSamples(NamedTuple):
    """A thread's, in registers."""

    values: object  # then their gradients
    slopes: object  # gradients of their activations
    sums: object  # gradients of alpha and beta


class Edge(NamedTuple):
    """A thread's slopes at a row's end, and what ends receive."""

    slopes: object
    first: int  # up-sample of the thread
    up_length: int
    head: float
    tail: float


class Registers(NamedTuple):
    """A thread's for its outputs."""

    down_values: object  # windows of all planes
    results: object
    up: object  # the filter up


class Output(NamedTuple):
    """A row of x's gradient."""

    data: object
    target: int  # the element of its first sample
    length: int
