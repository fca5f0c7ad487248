"""The alias-free activation as its definition states it: up-sample, activate, down-sample.

Arrays are numpy's or nested sequences. Sums are float64 and arguments are not checked: for small problems only.
"""

import math

import numpy as np


def alias_free_activation(
    x, up_filter, down_filter, alpha=None, beta=None, up_ratio=2, down_ratio=2, log_scale=True, activation="snake"
):
    """The output (N, C, L_out) of x (N, C, L), filters (K,), and alpha and beta (C,) or None.

    Without ``beta``, alpha takes its place. With ``log_scale`` both are given as logarithms. ``activation``: "snake",
    "silu", "leaky_relu", "elu", "gelu" or "identity".
    """
    rows = []
    for sample in np.asarray(x, dtype=np.float64):
        for c, row in enumerate(sample):
            a = b = None
            if activation == "snake":
                a, b = float(alpha[c]), float(alpha[c] if beta is None else beta[c])
                a, b = (math.exp(a), math.exp(b)) if log_scale else (a, b)
            high = [_activated(value, activation, a, b) for value in upsampled(row, up_filter, up_ratio)]
            rows.append(downsampled(high, down_filter, down_ratio))
    samples, channels, _ = np.shape(x)
    return np.array(rows).reshape(samples, channels, -1)


def upsampled(row, taps, ratio):
    """A row of L samples, up-sampled and filtered to ``ratio * L``."""
    pad, taps = len(taps) // ratio - 1, [float(tap) for tap in taps]
    padded = _repeated(row, pad, pad)
    full = [0.0] * ((len(padded) - 1) * ratio + len(taps))
    for i, value in enumerate(padded):
        for k, tap in enumerate(taps):
            full[i * ratio + k] += value * tap
    left = pad * ratio + (len(taps) - ratio) // 2
    right = pad * ratio + (len(taps) - ratio + 1) // 2
    return [ratio * value for value in full[left : len(full) - right]]


def downsampled(row, taps, ratio):
    """Every ``ratio``-th sample of a row, filtered."""
    taps = [float(tap) for tap in taps]
    padded = _repeated(row, (len(taps) - 1) // 2, len(taps) // 2)
    starts = range(0, len(padded) - len(taps) + 1, ratio)
    return [sum(tap * padded[start + k] for k, tap in enumerate(taps)) for start in starts]


def _repeated(row, before, after):
    return [row[0]] * before + list(row) + [row[-1]] * after


def _activated(u, activation, a, b):
    if activation == "snake":
        return u + math.sin(a * u) ** 2 / (b + 1e-9)
    if activation == "silu":
        return u / (1 + math.exp(-u))
    if activation == "leaky_relu":
        return u if u > 0 else 0.01 * u
    if activation == "elu":
        return u if u > 0 else math.expm1(u)
    if activation == "gelu":
        return u * (1 + math.erf(u / math.sqrt(2))) / 2
    return u
