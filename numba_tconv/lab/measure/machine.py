"""Where a measurement ran."""

import os
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

from numba_tconv import requirements


@dataclass(frozen=True)
class Machine:
    commit: str
    gpu: str
    driver: str
    torch: str
    cudnn: str
    numba_cuda: str


@dataclass(frozen=True)
class Time:
    time: str


@dataclass(frozen=True)
class Measured(Machine, Time):
    """Columns of every row."""


def describe() -> Machine:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return Machine(_commit(), gpu, driver(), torch.__version__, _cudnn(), version("numba-cuda"))


def measured() -> dict[str, str]:
    """Measured's columns, now and here."""
    return dict(time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), **asdict(describe()))


def version(package: str) -> str:
    return requirements.version(package) or "missing"


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _commit() -> str:
    """NUMBA_TCONV_COMMIT, else git's; "+": a changed tree."""
    if given := os.environ.get("NUMBA_TCONV_COMMIT"):
        return given
    commit = _output_of("git", "rev-parse", "--short", "HEAD")
    return f"{commit}{'+' if _output_of('git', 'status', '--porcelain') else ''}" if commit else "unknown"


@cache  # asking is slow
def driver() -> str:
    versions = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0] if versions else "unknown"


def _cudnn() -> str:
    number = torch.backends.cudnn.version()
    if not number:
        return "missing"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
