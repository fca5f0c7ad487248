"""``routed``: calls of torch's functional transposed convolution, computed by this package for a while."""

from __future__ import annotations

import torch
from torch.nn.parameter import Parameter
from torch.overrides import TorchFunctionMode

from .functional import conv_transpose1d


class routed(TorchFunctionMode):  # lower case, as torch calls its context managers
    """While it is active, this package computes what calls ``torch.nn.functional.conv_transpose1d``.

    For models that call the function themselves, as on one filter that is expanded over all channels; and, since
    torch's layers call it too, for any model without changing it. ``torch.conv_transpose1d`` is the same function.
    Arguments and errors are those of ``numba_tconv.conv_transpose1d``, which hands to torch what it does not compute;
    calls with tensor subclasses that define the function themselves stay theirs. It holds in the thread that entered
    it, may be nested, and torch.compile traces through it:

        with routed():
            waveform = vocoder(spectrogram)
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        ours = func is torch.conv_transpose1d and all(one in (torch.Tensor, Parameter) for one in types)
        return (conv_transpose1d if ours else func)(*args, **(kwargs or {}))
