"""What Keras and JAX compute with "valid", "same" and "causal" padding, by their documentation and code.

Where ``stride`` exceeds ``len(w)``, their "valid" has ``stride - len(w)`` more outputs than torch. ``x`` and ``w`` have
one channel; there is no dilation.
"""

import numpy as np


def keras(x, w, stride, padding):
    """Keras' Conv1DTranspose: the gradient of a Conv1D that strides over an output of length ``n``.

    Conv1D pads ``total`` zeros, ``before`` of them in front. Input i meets the outputs ``i*stride - before + k``.
    """
    n = len(x) * stride + (max(len(w) - stride, 0) if padding == "valid" else 0)
    total = max((len(x) - 1) * stride + len(w) - n, 0)
    before = total // 2 if padding == "same" else 0
    y = np.zeros(n)
    for i in range(len(x)):
        for k in range(len(w)):
            if 0 <= i * stride - before + k < n:
                y[i * stride - before + k] += x[i] * w[k]
    return y


def jax(x, w, stride, padding):
    """``jax.lax.conv_transpose`` with ``transpose_kernel=True``: zeros between inputs, pads, and a correlation."""
    spread = np.zeros((len(x) - 1) * stride + 1)
    spread[::stride] = x
    total = len(w) + stride - 2
    if padding == "same":
        before = len(w) - 1 if stride > len(w) - 1 else -(-total // 2)
    else:
        total += max(len(w) - stride, 0)
        before = len(w) - 1
    spread = np.concatenate([np.zeros(before), spread, np.zeros(total - before)])
    flipped = w[::-1]
    return np.array([spread[o : o + len(w)] @ flipped for o in range(len(spread) - len(w) + 1)])


def causal(x, w, stride):
    """The first ``len(x)*stride`` outputs: output o takes inputs up to ``o // stride``."""
    y = np.zeros(len(x) * stride)
    for o in range(len(y)):
        for i in range(o // stride + 1):
            if o - i * stride < len(w):
                y[o] += x[i] * w[o - i * stride]
    return y
