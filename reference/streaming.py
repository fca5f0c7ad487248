"""A causal transposed convolution step by step."""

import numpy as np

from .scatter import conv_transpose1d


def kept_frames(kernel_size, stride, dilation=1):
    """F, the number of earlier input frames that an output reads."""
    return max(0, -(-(dilation * (kernel_size - 1) + 1 - stride) // stride))


def causal(x, w, bias=None, stride=1, groups=1, dilation=1):
    """The first L*stride outputs for x (N, C_in, L)."""
    wanted = x.shape[2] * stride
    # With one more frame there are at least as many outputs as wanted.
    longer = np.concatenate([x, np.zeros((*x.shape[:2], 1), x.dtype)], axis=2)
    return conv_transpose1d(longer, w, bias, stride, groups=groups, dilation=dilation)[:, :, :wanted]


def step(x, state, w, bias=None, stride=1, groups=1, dilation=1, mask=None):
    """The next outputs (N, C_out, T*stride) and the new state, for x (N, C_in, T) and the state (N, C_in, F).

    ``mask`` (N,): False slots keep their state and output zeros.
    """
    batch, in_channels, frames = x.shape
    per_group, kernel_size = w.shape[1:]
    kept, in_per_group = state.shape[2], in_channels // groups
    y = np.zeros((batch, per_group * groups, frames * stride))
    new = state.copy()
    for n in range(batch):
        if mask is not None and not mask[n]:
            continue
        for co in range(per_group * groups):
            group, j = divmod(co, per_group)
            for o in range(frames * stride):
                y[n, co, o] = 0 if bias is None else bias[co]
                for k in range(kernel_size):
                    frame, rest = divmod(o - k * dilation, stride)
                    if rest:
                        continue
                    for ci in range(group * in_per_group, (group + 1) * in_per_group):
                        value = x[n, ci, frame] if frame >= 0 else state[n, ci, kept + frame]
                        y[n, co, o] += value * w[ci, j, k]
        for f in range(kept):
            new[n, :, f] = state[n, :, f + frames] if f + frames < kept else x[n, :, f + frames - kept]
    return y, new
