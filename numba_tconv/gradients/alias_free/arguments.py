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
    """A thread's local arrays."""

    values: object  # u, then du
    dv: object
    sums: object  # gradients of alpha and beta


class Edge(NamedTuple):
    """A thread's dv at a row's ends, and what these receive."""

    dv: object
    first: int  # up-sample of the thread
    up_length: int
    head: float
    tail: float


class Registers(NamedTuple):
    """A thread's local arrays for dx."""

    down_values: object  # windows of all planes
    dx: object
    up: object  # the filter up


class Output(NamedTuple):
    """A row of dx."""

    data: object
    target: int  # the element of its first sample
    length: int
