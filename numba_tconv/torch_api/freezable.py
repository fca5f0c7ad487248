"""``Freezable``, the base of this package's layers: calls that end ``freeze``, and no torch.jit.script."""

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


class Freezable:
    _frozen = None  # a FrozenLayer or FrozenActivation while frozen

    def __prepare_scriptable__(self):
        """Raise RuntimeError."""
        raise RuntimeError(
            f"torch.jit.script cannot compile {type(self).__name__} of numba_tconv: use torch.jit.trace, which keeps "
            "this package's operator, or torch.export; or script the model before it is converted"
        )

    def _unfreeze(self) -> None:
        if (frozen := vars(self).pop("_frozen", None)) is not None:
            frozen.restore(self)

    def train(self, mode: bool = True):
        if mode:
            self._unfreeze()
        return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True):
        self._unfreeze()
        return super().requires_grad_(requires_grad)

    def _apply(self, *args, **kwargs):
        self._unfreeze()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        self._unfreeze()
        return super()._load_from_state_dict(*args, **kwargs)


def computing_hooks(layer: nn.Module) -> list:
    """torch's hooks that compute a tensor of ``layer`` before each call, in order."""
    known = (WeightNorm, SpectralNorm, BasePruningMethod)
    return [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, known)]
