"""What this machine has for the package, and what to do about what it lacks."""

from __future__ import annotations

import platform

import torch

from . import __version__, machine
from .offline import tool
from .ptx import SIMULATOR

OLDEST = (8, 0)  # cp.async
NEEDED_BY_ALL = ("numba-cuda", "numpy", "matplotlib")


def facts() -> list[tuple[str, str]]:
    """Names and values, for printing."""
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
        *((package, machine.version(package)) for package in (*NEEDED_BY_ALL, "numba", "cuda-bindings")),
        ("ptxas", tool("ptxas", optional=True) or "missing"),
        ("nvdisasm", tool("nvdisasm", optional=True) or "missing"),
        ("simulator", "on (NUMBA_ENABLE_CUDASIM)" if SIMULATOR else "off"),
    ]


def advice() -> list[str]:
    """A line for each thing that is missing or does not fit, with what to do."""
    lines = []
    if not torch.version.cuda:
        lines.append("torch is built for the CPU only: install a CUDA build of torch to run the kernels on a GPU")
    elif not torch.cuda.is_available():
        lines.append("torch sees no GPU: check that `nvidia-smi` lists one, and that its driver is new enough for "
                     f"CUDA {torch.version.cuda}")  # fmt: skip
    else:
        lines += [
            f"GPU {i} is older than compute capability {OLDEST[0]}.{OLDEST[1]}, which k4_register_tile and the rungs "
            "above it need: the lower ones compute everything there"
            for i in range(torch.cuda.device_count())
            if torch.cuda.get_device_capability(i) < OLDEST
        ]
    lines += [
        f"{package} is not installed: pip install {package}"
        for package in NEEDED_BY_ALL
        if machine.version(package) == "missing"
    ]
    if not tool("ptxas", optional=True):
        lines.append("ptxas is missing, so `inspect` does not work: pip install nvidia-cuda-nvcc")
    elif not tool("nvdisasm", optional=True):
        lines.append("nvdisasm is missing, so `inspect` shows no instructions: pip install nvidia-cuda-nvdisasm")
    if SIMULATOR and torch.cuda.is_available():
        lines.append("NUMBA_ENABLE_CUDASIM is set, so the kernels run in the simulator: unset it to use the GPU")
    return lines
