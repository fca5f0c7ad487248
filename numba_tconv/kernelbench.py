"""KernelBench's entries under the name that its source files import: see lab/studies/kernelbench.py."""

from .lab.studies.kernelbench import ModelNew64, ModelNew74, ModelNew79

__all__ = ["ModelNew64", "ModelNew74", "ModelNew79"]
