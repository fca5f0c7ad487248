"""The gate for changes that only tidy: a fixed list of kernels compiles to the recorded machine code.

    make same-code              compare with tests/same_code.json; exit status 1 if there are differences
    make same-code RECORD=1     record the kernels of this tree
    make same-code ONLY=k6_     only kernels whose name contains this text

PTX is compared without names, comments and the order of declarations; where it differs, SASS, registers and shared
memory decide. No GPU is needed.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.formula.problem import Problem
from numba_tconv.kernels.streaming import plan
from numba_tconv.lab.machine_code import offline
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.lab.studies.streaming import LAYERS
from numba_tconv.runtime.device import A100, H200, Device
from numba_tconv.runtime.kernel import Kernel, target
from numba_tconv.torch_api.compile_ahead import ActivationCall, Call

RECORD = Path(__file__).with_name("same_code.json")
COMPILERS = ("numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvcc")
DEVICES = {"sm_90a": H200, "sm_80": A100}
DTYPES = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}  # the other precisions: float32

# Every rung, gradient, store and second stage; steps of streams and activations are below. A line: a rung, a
# precision, and the workloads, at batch 1 where the name says so.
CALLS = """
k1_gather             ieee    kb64
k1_gather             bf16    kb64
k2_polyphase          ieee    kb64
k3_shared_tile        ieee    kb64
k3_shared_tile        bf16    kb64
k4_register_tile      ieee    kb64 kb74 pocket_tts waveglow pqmf hifigan_u1@1 seamless_u1@1
k5_mma                tf32    kb79 encodec_u2
k5_mma                tf32x3  kb64 kb74
k5_mma                bf16    waveglow
k5_mma                fp16    convtasnet
k5_dmma               fp64    kb64 waveglow seamless_u1@1
k6_wgmma              tf32    kb64 kb74 kb79 hifigan_u1 oobleck_u1@1
k6_wgmma              tf32x3  kb74 istft
k6_wgmma              bf16    kb64 dac_u1 patch head oobleck_u1@1
k6_wgmma              fp16    waveglow
depthwise             ieee    depthwise pqmf
depthwise             bf16    depthwise pqmf
grad_input_gather     ieee    kb64
grad_input_depthwise  ieee    depthwise
grad_input_depthwise  bf16    depthwise
grad_input_tile       ieee    kb64 dac_u1
grad_input_tile       fp64    seamless_u1@1
grad_input_planes     tf32x3  hifigan_u1
grad_input_wgmma      tf32    kb64 oobleck_u1
grad_input_wgmma      bf16    pqmf
grad_input_wgmma      fp16    kb79
grad_weight_depthwise ieee    depthwise
grad_weight_depthwise bf16    depthwise
grad_weight_split     ieee    kb64 seamless_u1
grad_weight_split     fp64    istft
grad_weight_wgmma     tf32    kb64 dac_u1
grad_weight_wgmma     bf16    kb79 waveglow
grad_bias             ieee    kb64
"""
ON_A100 = """
k5_mma                tf32    hifigan_u3
"""
# Steps of streams: a precision, and layers with slots and new frames.
STEPS = """
ieee    mimi_1@1x1 mimi_4@8x4 mimi_upsample@64x1
tf32    mimi_1@64x1 mimi_4@8x4 qwen3_omni_upsample@64x8
bf16    mimi_1@64x1 mimi_1@64x4 mimi_upsample@1x1
"""
# Alias-free activations with all their gradients: a precision, and activations with taps/ratio up and down.
ACTIVATIONS = """
ieee    snakebeta@12/2,12/2 snake@8/2,9/3 gelu@16/4,15/4
fp64    snake@12/2,12/2
bf16    snakebeta@12/2,12/2 snake@8/2,9/3
"""


@dataclass(frozen=True)
class StepCall:
    """A step of contiguous tensors, as a Call."""

    problem: Problem
    dtype: torch.dtype
    precision: str
    rung: str = "streaming_step"
    device: Device = H200

    def kernels(self) -> list[Kernel]:
        return [step.kernel for step in plan.steps(self.problem, self.dtype, self.precision)]


@dataclass(frozen=True)
class ActivationStep(ActivationCall):
    """An activation of contiguous tensors, and its gradients."""

    device: Device = H200


AnyCall = Call | StepCall | ActivationStep


def listed() -> list[tuple[str, str, AnyCall]]:
    """Every listed call: architecture, name, and the call."""
    found = []
    for arch, lines in (("sm_90a", CALLS), ("sm_80", ON_A100)):
        for line in lines.split("\n")[1:-1]:
            rung, precision, *workloads = line.split()
            for workload in workloads:
                plain, _, batch = workload.partition("@")
                problem = WORKLOADS[plain].problem
                problem = replace(problem, batch=int(batch)) if batch else problem
                call = Call(rung, problem, DTYPES.get(precision, torch.float32), precision, DEVICES[arch])
                name = f"{rung} {precision} {workload}"
                found.append((arch, name if arch == "sm_90a" else f"{name} {arch}", call))
    for line in STEPS.split("\n")[1:-1]:
        precision, *steps = line.split()
        for step in steps:
            layer, slots, frames = re.fullmatch(r"(\w+)@(\d+)x(\d+)", step).groups()
            problem = replace(LAYERS[layer], batch=int(slots), length=int(frames))
            call = StepCall(problem, DTYPES.get(precision, torch.float32), precision)
            found.append(("sm_90a", f"{call.rung} {precision} {step}", call))
    for line in ACTIVATIONS.split("\n")[1:-1]:
        precision, *activations = line.split()
        for one in activations:
            kind, *numbers = re.fullmatch(r"(\w+)@(\d+)/(\d+),(\d+)/(\d+)", one).groups()
            up_taps, up_ratio, down_taps, down_ratio = map(int, numbers)
            sizes = AliasFree(4, 192, 8192, up_taps, down_taps, up_ratio, down_ratio)
            dtype, is_beta = DTYPES.get(precision, torch.float32), kind == "snakebeta"
            call = ActivationStep(
                sizes, dtype, kind.removesuffix("beta"), log_scale=is_beta, tied=not is_beta, step=True
            )
            found.append(("sm_90a", f"alias_free {precision} {one}", call))
    return found


def kernels() -> dict[str, tuple[AnyCall, int]]:
    """A call and which of its kernels it is, by kernel name; the first call of each."""
    found, known = {}, set()
    for arch, name, call in listed():
        of_call = call.kernels()
        for number, kernel in enumerate(of_call):
            if kernel.key and (arch, kernel.name, kernel.key) in known:
                continue
            known.add((arch, kernel.name, kernel.key))
            alike = [other for other in of_call[:number] if other.name == kernel.name]
            label = kernel.name if not alike else f"{kernel.name} {len(alike) + 1}"
            found[f"{name}: {label}"] = call, number
    return found


# --- without names ----------------------------------------------------------------------------------------------------

# The word before a declaration's size, parameters or end.
_DECLARED = re.compile(r"(?:\.\w+ )*\.(?:entry|func|global|shared|const)\b.*?([A-Za-z_$][\w$]*)(?=\s*(?:[\[(;=]|$))")
_PARAMETER = re.compile(r"_param_\d+$")


def plain_ptx(text: str) -> list[str]:
    """PTX lines without comments and version, declarations sorted, names numbered by first use."""
    lines = [line for line in (re.sub(r"//.*", "", line).strip() for line in text.splitlines()) if line]
    lines = [line for line in lines if not (line.startswith(".version") or "NumbaEnv" in line)]
    declared = {}
    for line in lines:
        found = _DECLARED.match(line)
        if found and not line.startswith(".extern .func"):
            declared[found[1]] = None
    begins = next(at for at, line in enumerate(lines) if re.match(r"(?!\.extern)(\.\w+ )*\.(entry|func)\b", line))

    def numbered(found: re.Match) -> str:
        word = found[0]
        name = _PARAMETER.sub("", word)
        if name not in declared:
            return word
        if declared[name] is None:
            declared[name] = f"name{sum(number is not None for number in declared.values())}"
        return declared[name] + word[len(name) :]

    def renamed(some: list[str]) -> list[str]:
        return [re.sub(r"[A-Za-z_$][\w$]*", numbered, line) for line in some]

    body = renamed(lines[begins:])
    return sorted(renamed(lines[:begins])) + body


def plain_sass(report: offline.Report) -> list[str]:
    """Registers and shared memory, and the machine code's instructions and labels."""
    if report.sass is None:
        raise offline.ToolMissing(f"nvdisasm was not found: install the package {offline.PACKAGES['nvdisasm']}")
    lines = [f"{report.registers} registers, {report.shared_bytes} bytes, {report.spill_bytes} spilled"]
    for line in report.sass.splitlines():
        found = re.match(r"\s*(/\*[0-9a-f]{4,}\*/.*?;|\.L\w+:)", line)
        if found:
            line = re.sub(r"[\w$]*_Z[\w$]+", "name", found[1])
            lines.append(re.sub(r" +\(\*", " (*", line))  # notes are indented by the length of names
    return lines


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def codes(call: AnyCall, number: int, recorded: list[str] | None) -> list[str]:
    """Digests of PTX and SASS of one kernel; no SASS where the PTX is as recorded."""
    kernel: Kernel = call.kernels()[number]
    cc = target(call.device.cc)
    text = kernel.ptx(cc)
    ptx = digest(plain_ptx(text))
    if recorded and recorded[0] == ptx:
        return recorded
    return [ptx, digest(plain_sass(offline.report(kernel, cc, ptx=text)))]


# --- recorded ---------------------------------------------------------------------------------------------------------


def compilers() -> dict[str, str]:
    found = {}
    for name in COMPILERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def compiled(wanted: dict[str, tuple[AnyCall, int]], recorded: dict[str, list[str]], jobs: int) -> dict[str, list[str]]:
    """Digests of these kernels, by one process for each processor."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        futures = {name: pool.submit(codes, *one, recorded.get(name)) for name, one in wanted.items()}
        found = {}
        for name, future in futures.items():
            found[name] = future.result()
            print(f"\r{len(found)} of {len(wanted)} kernels", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def difference(now: list[str] | None, before: list[str] | None) -> str | None:
    """A kernel's change in words; None if its machine code is the same."""
    if now is None:
        return "is gone"
    if before is None:
        return "is new"
    return None if before[0] == now[0] or before[1] == now[1] else "differs"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same_code", description="compare machine code with a record")
    parser.add_argument("only", nargs="*", help="parts of names; the kernels that have one of them")
    parser.add_argument("--record", action="store_true", help="keep what is compiled as the record")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes, one a processor")
    options = parser.parse_args(arguments)

    def is_meant(name: str) -> bool:
        return not options.only or any(part in name for part in options.only)

    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"compilers": {}, "kernels": {}}
    before = {name: digests for name, digests in record["kernels"].items() if is_meant(name)}
    others = {name: digests for name, digests in record["kernels"].items() if not is_meant(name)}
    wanted = {name: one for name, one in kernels().items() if is_meant(name)}
    now = compiled(wanted, before, options.jobs)
    words = {name: difference(now.get(name), before.get(name)) for name in {**before, **now}}
    for name, word in words.items():
        if word:
            print(f"{name} {word}")
    changed = sum(word is not None for word in words.values())
    print(f"{len(now)} kernels, {changed} of them not as recorded" if changed else f"{len(now)} kernels, all the same")
    if options.record:
        # In the list's order.
        kept = {name: {**others, **now}[name] for name in kernels() if name in others or name in now}
        RECORD.write_text(json.dumps({"compilers": compilers(), "kernels": kept}, indent=1) + "\n")
        return 0
    if changed and record["compilers"] != compilers():
        print(f"recorded with other compilers: {record['compilers']}, these are {compilers()}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
