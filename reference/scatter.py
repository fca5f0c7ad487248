"""Transposed 1-D convolution and its three gradients, as the definition states them.

Every input sample times every tap is added where it lands; what lies outside the output is dropped:

    y[n, co, i*stride - padding + k*dilation] += x[n, ci, i] * w[ci, co, k]

With ``padding = (left, right)``, ``left`` stands in this formula and ``right`` shortens L_out. Arrays are numpy's or
nested sequences, sums are float64. Arguments are torch's, unchecked. For small problems only.
"""

import numpy as np


def conv_transpose1d(x, w, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    """(N, C_out, L_out) from x (N, C_in, L), w (C_in, C_out/groups, K) and bias (C_out,) or None; N may be absent."""
    x, w = _float64(x), _float64(w)
    if x.ndim == 2:
        return conv_transpose1d(x[None], w, bias, stride, padding, output_padding, groups, dilation)[0]
    samples, _, length = x.shape
    _, channels_per_group, kernel_size = w.shape
    left, right = padding if isinstance(padding, tuple) else (padding, padding)
    out_length = (length - 1) * stride - left - right + dilation * (kernel_size - 1) + output_padding + 1

    y = np.zeros((samples, channels_per_group * groups, out_length))
    for n, ci, i, c, k, co, o in _products(x.shape, w.shape, out_length, stride, padding, groups, dilation):
        y[n, co, o] += x[n, ci, i] * w[ci, c, k]
    if bias is not None:
        for co, value in enumerate(_float64(bias)):
            y[:, co, :] += value
    return y


def grad_input(grad_output, w, length, stride=1, padding=0, groups=1, dilation=1):
    """The gradient (N, C_in, length) for x, from y's gradient (N, C_out, L_out) and w; N may be absent.

    With stride above one, L_out does not determine ``length``.
    """
    grad_output, w = _float64(grad_output), _float64(w)
    if grad_output.ndim == 2:
        return grad_input(grad_output[None], w, length, stride, padding, groups, dilation)[0]
    samples, _, out_length = grad_output.shape

    grad = np.zeros((samples, w.shape[0], length))
    for n, ci, i, c, k, co, o in _products(grad.shape, w.shape, out_length, stride, padding, groups, dilation):
        grad[n, ci, i] += grad_output[n, co, o] * w[ci, c, k]
    return grad


def grad_weight(grad_output, x, kernel_size, stride=1, padding=0, groups=1, dilation=1):
    """The gradient (C_in, C_out/groups, kernel_size) for w, from y's gradient and x."""
    grad_output, x = _float64(grad_output), _float64(x)
    if x.ndim == 2:
        return grad_weight(grad_output[None], x[None], kernel_size, stride, padding, groups, dilation)
    _, out_channels, out_length = grad_output.shape

    grad = np.zeros((x.shape[1], out_channels // groups, kernel_size))
    for n, ci, i, c, k, co, o in _products(x.shape, grad.shape, out_length, stride, padding, groups, dilation):
        grad[ci, c, k] += grad_output[n, co, o] * x[n, ci, i]
    return grad


def grad_bias(grad_output):
    """The gradient (C_out,) for the bias, from y's gradient."""
    grad_output = _float64(grad_output)
    if grad_output.ndim == 2:
        return grad_bias(grad_output[None])
    samples, out_channels, out_length = grad_output.shape

    grad = np.zeros(out_channels)
    for n in range(samples):
        for co in range(out_channels):
            for o in range(out_length):
                grad[co] += grad_output[n, co, o]
    return grad


def _products(x_shape, w_shape, out_length, stride, padding, groups, dilation):
    """Every (n, ci, i, c, k, co, o) with x[n, ci, i] * w[ci, c, k] in y[n, co, o]; c is co's number in its group."""
    samples, in_channels, length = x_shape
    _, channels_per_group, kernel_size = w_shape
    left = padding[0] if isinstance(padding, tuple) else padding
    for n in range(samples):
        for ci in range(in_channels):
            group = ci // (in_channels // groups)
            for c in range(channels_per_group):
                co = group * channels_per_group + c
                for i in range(length):
                    for k in range(kernel_size):
                        o = i * stride - left + k * dilation
                        if 0 <= o < out_length:
                            yield n, ci, i, c, k, co, o


def _float64(values):
    return np.asarray(values, dtype=np.float64)
