"""KernelBench's entries, as its sources import them."""

from .lab.studies.kernelbench import ModelNew64, ModelNew74, ModelNew79

__all__ = ["ModelNew64", "ModelNew74", "ModelNew79"]
