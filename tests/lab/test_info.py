"""`info` reports missing things and their remedies."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from numba_tconv import requirements
from numba_tconv.lab.cli import info
from numba_tconv.lab.measure import machine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    """A dictionary of versions that differ from the installed ones; None is missing."""
    others, really = {}, importlib.metadata.version

    def version(package):
        if package in others and others[package] is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return others.get(package) or really(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return others


def test_here_everything_fits():
    assert requirements.misfits() == []


def test_versions_that_do_not_fit_are_told_with_whose_requirement_it_is(installed):
    installed |= {"numpy": "2.5.1", "torch": "2.8.0+cu129", "numba-cuda": "0.29.0"}
    lines = requirements.misfits()
    assert lines[0] == (
        "numba-cuda is 0.29.0, and numba-tconv needs numba-cuda>=0.30.4: pip install 'numba-cuda>=0.30.4'"
    )
    assert "numpy is 2.5.1, and numba-tconv needs numpy>=2,<2.5: pip install 'numpy>=2,<2.5'" in lines
    assert "torch is 2.8.0+cu129, and numba-tconv needs torch>=2.9: pip install 'torch>=2.9'" in lines
    assert lines == [line for line in info.advice() if line in lines]
    installed["torch"] = "2.99.0a0+git1234"  # built from its source
    assert not any(line.startswith("torch") for line in requirements.misfits())


def test_requirements_of_requirements_count(installed):
    installed["llvmlite"] = "0.40.0"
    (line,) = requirements.misfits()
    assert line.startswith("llvmlite is 0.40.0, and numba needs llvmlite<")


def test_what_is_missing_is_told(installed):
    installed["tqdm"] = None
    assert requirements.misfits() == ["tqdm is not installed, and numba-tconv needs it: pip install 'tqdm>=4.66'"]
    assert machine.version("tqdm") == "missing"


def test_without_a_checkout_the_installed_requirements_count(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(requirements, "PROJECT", tmp_path / "pyproject.toml")
    stated = {"numba-tconv": ["torch>=99", "tqdm>=99; extra == 'test'", "numpy>=99; python_version < '3'"]}
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: stated.get(package))
    installed["torch"] = "2.13.0"
    assert requirements.misfits() == ["torch is 2.13.0, and numba-tconv needs torch>=99: pip install 'torch>=99'"]


def test_a_failed_import_ends_with_what_to_do():
    program = "import sys; sys.modules['torch'] = None; import importlib.metadata as m; "
    program += "m.version = lambda _: '0.1'; import numba_tconv"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    error, *notes = done.stderr[done.stderr.index("ModuleNotFoundError") :].splitlines()
    assert "torch" in error
    assert "torch is 0.1, and numba-tconv needs torch>=2.9: pip install 'torch>=2.9'" in notes


GPU_ADVICE = {
    "torch for the CPU": (dict(cuda=None), "torch is built for the CPU only"),
    "no driver": (dict(driver="unknown"), "no NVIDIA driver answers"),
    "old driver": (dict(driver="550.54.14"), "driver 550.54.14 is too old for CUDA 13.0"),
    "older driver": (dict(cuda="12.8", driver="470.1"), "driver 470.1 is too old for CUDA 12.8"),
    "hidden": (dict(visible=""), "CUDA_VISIBLE_DEVICES is '': unset it"),
    "a driver without a version": (dict(driver="[N/A]"), "torch sees no GPU, though driver [N/A] answers"),
    "CUDA of another day": (dict(cuda="14.0", driver="470.1"), "torch sees no GPU, though driver 470.1 answers"),
    "something else": ({}, "torch sees no GPU, though driver 580.1 answers"),
    "old GPU": (dict(cc=(7, 5)), "GPU 0 is older than compute capability 8.0"),
}


@pytest.mark.parametrize("what", GPU_ADVICE)
def test_what_keeps_the_kernels_off_the_gpu(what, monkeypatch):
    there, said = GPU_ADVICE[what]
    fake_gpu(monkeypatch, **there)
    (line,) = info.gpu_advice()
    assert line.startswith(said) or said in line
    assert line in info.advice()


def test_without_a_driver_a_torch_for_the_cpu_is_half_of_it(monkeypatch):
    fake_gpu(monkeypatch, cuda=None, driver="unknown")
    assert [line.split(":")[0] for line in info.gpu_advice()] == [
        "torch is built for the CPU only",
        "no NVIDIA driver answers (`nvidia-smi` does not work)",
    ]


def test_a_gpu_that_can_do_all_needs_no_advice(monkeypatch):
    fake_gpu(monkeypatch, cc=(9, 0))
    assert info.gpu_advice() == []


def fake_gpu(monkeypatch, cuda="13.0", driver="580.1", visible=None, cc=None):
    """Set torch's and the driver's answers; ``cc``: compute capability of the GPU that torch sees, if any."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine, "driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cc is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: cc)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", visible)
