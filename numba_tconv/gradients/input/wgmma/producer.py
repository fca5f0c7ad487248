"""How grad_input_wgmma reads grad_output's rows: in place, by a plain or a sheared map, or from a copy.

Every ``sheared``-th row begins alike modulo 16 bytes. A sheared map (kernels/k6_wgmma/boxes.py) has these rows as one
dimension and the rows between two of them as another, each ``shear`` elements further to the right. All strides are
then multiples of 16 bytes. The boxes are wider, so a copy with aligned rows may be quicker."""

from __future__ import annotations

from functools import lru_cache

from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_map import ALIGNMENT, encode, row_bytes, rows_alike
from numba_tconv.runtime.device import Device
from numba_tconv.runtime.layout import Layout

from .split import COPYING, LAUNCH_CLOCKS, filling
from .tile import Config, choose


def sheared_of(g: Layout) -> int:
    """The distance of rows of grad_output that begin alike modulo 16 bytes; 1: a plain map suffices; 0: it must be
    copied."""
    alike = 0 if g.offset % ALIGNMENT else rows_alike(g.shape, g.strides, g.dtype.itemsize)
    overlapping = alike > 1 and g.strides[1] < ALIGNMENT // g.dtype.itemsize
    return 0 if overlapping or (alike and g.shape[1] % alike) else alike


def shear_of(strides: tuple, config: Config) -> int:
    """Elements by which each row stands further to the right in the map."""
    return strides[1] % (ALIGNMENT // config.itemsize) if config.sheared > 1 else 0


@lru_cache(maxsize=1024)
def template(shape: tuple, strides: tuple, config: Config) -> tuple[int, ...]:
    """The sheared map of a grad_output (N, C_out, L_out), ``strides`` in elements, at any address."""
    (batch, channels, length), itemsize, sheared = shape, config.itemsize, config.sheared
    n_bytes, c_bytes = row_bytes(shape, strides, itemsize)
    shear = shear_of(strides, config)
    return encode(
        config.precision,
        (length + (sheared - 1) * shear, sheared, channels // sheared, batch),
        (c_bytes - shear * itemsize, c_bytes * sheared, n_bytes),
        (config.width, sheared, config.g_channels // sheared, 1),
    )


@lru_cache(maxsize=1024)
def choose_for(problem: Problem, precision: str, sheared: int, device: Device) -> Config | None:
    """The tile for a grad_output of which every ``sheared``-th row begins alike; None if none fits.

    A tile without a sheared map takes rows at multiples of 16 bytes, or a copy. Estimated clocks decide."""
    plain = choose(problem, precision)
    in_place = choose(problem, precision, sheared) if sheared > 1 else None
    if in_place is None or plain is None:
        return plain and filling(problem, plain, device)
    copied = 2 * problem.batch * problem.out_channels * problem.out_length * plain.itemsize / COPYING + LAUNCH_CLOCKS

    def clocks(config):
        return max(1, config.tiles(problem)[2] / device.multiprocessors) * config.clocks(problem)

    return filling(problem, in_place if clocks(in_place) <= clocks(plain) + copied else plain, device)
