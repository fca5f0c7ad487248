"""Command ``info``."""

import os
import platform

import torch

from numba_tconv import __version__
from numba_tconv.lab.machine_code.offline import tool
from numba_tconv.lab.measure import machine
from numba_tconv.ptx import SIMULATOR
from numba_tconv.requirements import misfits

OLDEST = (8, 0)  # cp.async
OLDEST_DRIVERS = {12: 525, 13: 580}  # by CUDA version, from NVIDIA's release notes for Linux
SHOWN = ("numba-cuda", "numpy", "matplotlib", "numba", "cuda-bindings")
NO_DRIVER = (
    "no NVIDIA driver answers (`nvidia-smi` does not work): install one to run on a GPU; without one, `demo` and "
    "`check` use the simulator, and `inspect`, `compile` and `explain` work"
)


def facts() -> list[tuple[str, str]]:
    here = machine.describe()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        ("numba_tconv", f"{__version__}, commit {here.commit}"),
        ("Python", platform.python_version()),
        *(
            (f"GPU {i}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB")
            for i, gpu in enumerate(gpus)
        ),
        ("driver", here.driver),
        ("torch", f"{here.torch}, for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU only'}"),
        ("cuDNN", here.cudnn),
        *((package, machine.version(package)) for package in SHOWN),
        ("ptxas", tool("ptxas", optional=True) or "missing"),
        ("nvdisasm", tool("nvdisasm", optional=True) or "missing"),
        ("simulator", "on (NUMBA_ENABLE_CUDASIM)" if SIMULATOR else "off"),
    ]


def advice() -> list[str]:
    lines = misfits() + gpu_advice()
    if not tool("ptxas", optional=True):
        lines.append("ptxas is missing, so `inspect` does not work: pip install nvidia-cuda-nvcc")
    elif not tool("nvdisasm", optional=True):
        lines.append("nvdisasm is missing, so `inspect` shows no instructions: pip install nvidia-cuda-nvdisasm")
    if SIMULATOR and torch.cuda.is_available():
        lines.append("NUMBA_ENABLE_CUDASIM is set, so the kernels run in the simulator: unset it to use the GPU")
    return lines


def gpu_advice() -> list[str]:
    needed, driver = torch.version.cuda, machine.driver()
    if not needed:
        lines = ["torch is built for the CPU only: install a CUDA build of torch to run the kernels on a GPU"]
        return [*lines, NO_DRIVER] if driver == "unknown" else lines
    if torch.cuda.is_available():
        return [
            f"GPU {i} is older than compute capability {OLDEST[0]}.{OLDEST[1]}, which k4_register_tile and the rungs "
            "above it need: torch computes dense layers there, and everything in bfloat16"
            for i in range(torch.cuda.device_count())
            if torch.cuda.get_device_capability(i) < OLDEST
        ]
    if driver == "unknown":
        return [NO_DRIVER]
    least, major = OLDEST_DRIVERS.get(int(needed.split(".")[0]), 0), driver.split(".")[0]
    if major.isdigit() and int(major) < least:
        return [f"driver {driver} is too old for CUDA {needed}, which torch is built for: install {least} or newer"]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [f"torch sees no GPU, and CUDA_VISIBLE_DEVICES is {visible!r}: unset it to see all"]
    return [f"torch sees no GPU, though driver {driver} answers: check what `nvidia-smi` lists"]
