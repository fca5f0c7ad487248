"""k5_mma's whole kernels in the CUDA simulator, with the meanings of warps.py: every output, of every way of loading.

Needs NUMBA_ENABLE_CUDASIM=1 from the start of the process (`make test`).
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from numba.cuda.simulator import kernelapi

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.common.tensor_core import split_operand, store_any, store_rows, store_runs
from numba_tconv.kernels.k5_mma import choose, epilogue, kernel, load_ahead, mainloop, producer, resident
from numba_tconv.kernels.k5_mma.tile import Config
from numba_tconv.runtime.device import A100
from numba_tconv.runtime.layout import Layout

from .warps import played

LOADING = mainloop, kernel, resident, producer, load_ahead, split_operand
STORING = epilogue, store_any, store_rows, store_runs
TOLERANCE = {"tf32": 2e-3, "tf32x3": 3e-6, "bf16": 2e-2, "fp16": 2e-3}


@pytest.fixture(autouse=True)
def warps(monkeypatch):
    remembered = kernel._plan, kernel.make_kernel, resident.make_kernel
    played((*LOADING, *STORING), monkeypatch, kernelapi.FakeCUDAModule)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


class Case(NamedTuple):
    problem: Problem
    precision: str = "tf32"
    skip: int = 0  # elements from 16 bytes to x
    chunk: int = 0  # taps; 0: all
    teams: int = 0  # 0: streamed weights

    @property
    def config(self) -> Config:
        p, vector = self.problem, (4 if self.skip else 16) // DTYPES[self.precision].itemsize
        base = choose.make_tile(p, self.precision)
        config = choose._streamed(p, base, A100, vector)
        if self.chunk:
            config = replace(config, tile=replace(config.tile, tap_chunk=self.chunk, several_chunks=True))
        if self.teams:
            steps = config.tile.tap_chunks(p) * config.channel_chunks(p) // config.chunks
            config = replace(config, tiles=1, teams=self.teams, resident_weights=steps * config.w_stage)
        return config


SHORT = Problem(3, 20, 8, 4, 30, 4, 1, bias=True)  # samples share tiles
LONG = Problem(1, 12, 8, 8, 150, 4, 2, bias=True)
CASES = {
    "tf32": Case(SHORT),
    "bf16": Case(SHORT, "bf16"),
    "split": Case(LONG, "tf32x3"),
    "chunks of taps": Case(Problem(2, 32, 8, 12, 40, 2, 3, bias=True), chunk=2),
    "stride 1": Case(Problem(1, 8, 16, 3, 140, groups=2, bias=True)),
    "phases without taps": Case(Problem(2, 12, 24, 5, 20, 8, 2, bias=True), "bf16"),
    "in steps": Case(replace(LONG, length=300), "bf16"),
    "dilation": Case(Problem(2, 12, 8, 5, 70, 2, 1, dilation=3), "fp16"),
    "rows of outputs in pairs": Case(replace(LONG, padding=1), "bf16"),
    "rows of outputs anywhere": Case(replace(LONG, output_padding=1), "bf16"),
    "any element": Case(LONG, skip=1),
    "half a word": Case(LONG, "bf16", skip=1),
    "resident": Case(SHORT, teams=2),
    "resident, in steps": Case(replace(LONG, length=300), "bf16", teams=1),
    "resident, half a word": Case(LONG, "fp16", skip=1, teams=2),
    "resident, split": Case(SHORT, "tf32x3", teams=2),
    "resident, chunks of taps": Case(Problem(2, 12, 8, 16, 40, 2, 3, bias=True), chunk=4, teams=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_output(case, monkeypatch):
    monkeypatch.setattr(kernel, "choose", lambda *arguments, **options: case.config)  # for rows that begin anywhere
    monkeypatch.setattr(kernel, "resident_blocks", lambda *arguments: 1)  # teams take several tiles
    p, dtype = case.problem, DTYPES[case.precision]
    row = -(-p.length // 8) * 8 + case.skip
    x = torch.randn(p.batch, p.in_channels, row).to(dtype)[:, :, case.skip : case.skip + p.length]
    w = torch.randn(p.weight_shape).to(dtype)
    bias = torch.randn(p.out_channels).to(dtype) if p.bias else None
    y = torch.full(p.out_shape, torch.nan, dtype=dtype)
    layouts = (tensor if tensor is None else Layout.of(tensor) for tensor in (x, w, bias, y))
    kernel.WarpMatrix().prepare(*layouts, p, case.config)(x, w, bias, y)
    operands = (tensor if tensor is None else tensor.double() for tensor in (x, w, bias))
    wanted = torch.conv_transpose1d(*operands, *p.parameters)
    assert (y - wanted).abs().max() <= TOLERANCE[case.precision] * wanted.abs().max()
