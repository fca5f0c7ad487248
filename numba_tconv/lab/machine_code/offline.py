"""Compilation without a GPU: NVVM, ptxas, nvdisasm."""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from numba_tconv.runtime.device import LIMITS, REGISTERS, RESERVED_SHARED
from numba_tconv.runtime.kernel import Kernel, architecture, target

MOST_THREADS = 1024  # a block
PACKAGES = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}


class ToolMissing(RuntimeError):
    """ptxas or nvdisasm is missing."""


@dataclass(frozen=True)
class Report:
    """``registers`` and ``local_bytes`` are a thread's, ``shared_bytes`` a block's."""

    name: str
    cc: tuple
    threads: int
    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    ptx: str
    cubin: bytes
    log: str

    @cached_property
    def sass(self) -> str | None:
        """Machine code as text; None without nvdisasm."""
        disassembler = tool("nvdisasm", optional=True)
        if disassembler is None:
            return None
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return _run(disassembler, "-c", file.name)

    @cached_property
    def instruction_mix(self) -> Counter:
        """Counts of SASS instructions; empty without nvdisasm."""
        return instructions(self.sass or "")

    @cached_property
    def blocks_per_multiprocessor(self) -> int:
        threads, blocks, shared = LIMITS[self.cc[:2]]
        warps = -(-self.threads // 32)
        registers_a_warp = -(-self.registers * 32 // 256) * 256
        return min(
            blocks,
            threads // (warps * 32) if self.threads <= MOST_THREADS else 0,
            REGISTERS // (registers_a_warp * warps),
            shared // (self.shared_bytes + RESERVED_SHARED),
        )

    @property
    def occupancy(self) -> float:
        """Share of the limit of resident threads."""
        return self.blocks_per_multiprocessor * self.threads / LIMITS[self.cc[:2]][0]


def report(kernel: Kernel, cc: tuple = (9, 0, "a"), shared_bytes: int | None = None, ptx: str | None = None) -> Report:
    """Compile ``kernel`` for compute capability ``cc``. Raises ToolMissing without ptxas.

    ``shared_bytes``: the launch's dynamic ones; ``ptx``: the kernel's, if known.
    """
    ptx, cc = ptx or kernel.kept_ptx(target(cc[:2])), architecture(cc)
    cubin, log = _machine_code(ptx, cc)
    return Report(
        name=kernel.name,
        cc=cc,
        threads=kernel.threads,
        registers=_number(r"Used (\d+) registers", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        local_bytes=_number(r"(\d+) bytes stack frame", log),
        shared_bytes=_number(r"(\d+) bytes smem", log)
        + (kernel.shared_bytes if shared_bytes is None else shared_bytes),
        ptx=ptx,
        cubin=cubin,
        log=log,
    )


def _machine_code(ptx: str, cc: tuple) -> tuple[bytes, str]:
    arch = "sm_" + "".join(map(str, cc))
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        log = _run(tool("ptxas"), f"-arch={arch}", "-v", str(source), "-o", str(cubin))
        return cubin.read_bytes(), log


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found.group(1)) if found else 0


def instructions(sass: str) -> Counter:
    return Counter(re.findall(r"/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass))


def loops(code: str) -> list[str]:
    """Loops, each from a label to the last branch back."""
    lines = code.splitlines()
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"\s*([$.]L\w+):", line))}
    ends = {}
    for at, line in enumerate(lines):
        for label in re.findall(r"\bbra\b.*?([$.]L\w+)", line, re.IGNORECASE):
            if labels[label] < at:
                ends[labels[label]] = at
    return ["\n".join(lines[begin : end + 1]) for begin, end in ends.items()]


def product_loops(code: str) -> list[str]:
    """Loops that multiply and add. Raises ValueError without one."""
    found = [loop for loop in loops(code) if re.search(r"\bfma\.rn\.f|\b[FD]FMA\b", loop)]
    if not found:
        raise ValueError("no loop of this code multiplies and adds")
    return found


def tool(name: str, optional: bool = False) -> str | None:
    """Path of a program in NVIDIA's packages (NVVM may write PTX too new for PATH's ptxas), else in PATH.

    Raises ToolMissing; with ``optional``, returns None.
    """
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for found in sorted(Path(folder).glob(f"**/bin/{name}")):
            return str(found)
    found = shutil.which(name)
    if found is None and not optional:
        raise ToolMissing(f"{name} was not found: install the package {PACKAGES[name]}")
    return found


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout + done.stderr
