"""The alias-free activation as NVIDIA's BigVGAN and transformers define it, in plain torch, and a tiny model of it."""

import torch
import torch.nn.functional as F
from torch import nn


def taps(count, seed=0):
    """A filter (1, 1, count) that is not symmetric, with sum 1."""
    drawn = 0.2 + torch.rand(1, 1, count, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.sum()


class Snake(nn.Module):
    """NVIDIA's Snake, or SnakeBeta if ``beta``."""

    def __init__(self, channels, log_scale=True, beta=True):
        super().__init__()
        self.alpha_logscale = log_scale
        self.alpha = nn.Parameter(0.3 + torch.rand(channels))
        if beta:
            self.beta = nn.Parameter(0.3 + torch.rand(channels))

    def forward(self, x):
        alpha = self.alpha.unsqueeze(0).unsqueeze(-1)
        beta = getattr(self, "beta", self.alpha).unsqueeze(0).unsqueeze(-1)
        if self.alpha_logscale:
            alpha, beta = torch.exp(alpha), torch.exp(beta)
        return x + (1.0 / (beta + 1e-9)) * torch.pow(torch.sin(x * alpha), 2)


class Up(nn.Module):
    def __init__(self, ratio=2, kernel_size=12, persistent=True):
        super().__init__()
        self.ratio = self.stride = ratio
        self.pad = kernel_size // ratio - 1
        self.pad_left = self.pad * ratio + (kernel_size - ratio) // 2
        self.pad_right = self.pad * ratio + (kernel_size - ratio + 1) // 2
        self.register_buffer("filter", taps(kernel_size, 1), persistent)

    def forward(self, x):
        channels = x.shape[1]
        x = F.pad(x, (self.pad, self.pad), mode="replicate")
        filter = self.filter.expand(channels, -1, -1)
        x = self.ratio * F.conv_transpose1d(x, filter, stride=self.stride, groups=channels)
        return x[..., self.pad_left : -self.pad_right]


class LowPass(nn.Module):
    """transformers' DownSample1d; NVIDIA's has it as ``lowpass``."""

    def __init__(self, ratio=2, kernel_size=12, persistent=True):
        super().__init__()
        self.pad_left, self.pad_right = kernel_size // 2 - int(kernel_size % 2 == 0), kernel_size // 2
        self.stride = ratio
        self.register_buffer("filter", taps(kernel_size, 2), persistent)

    def forward(self, x):
        channels = x.shape[1]
        x = F.pad(x, (self.pad_left, self.pad_right), mode="replicate")
        return F.conv1d(x, self.filter.expand(channels, -1, -1), stride=self.stride, groups=channels)


class Down(nn.Module):
    def __init__(self, ratio=2, kernel_size=12):
        super().__init__()
        self.ratio = ratio
        self.lowpass = LowPass(ratio, kernel_size)

    def forward(self, x):
        return self.lowpass(x)


class Activation1d(nn.Module):
    def __init__(self, activation, up_ratio=2, down_ratio=2, up_kernel_size=12, down_kernel_size=12):
        super().__init__()
        self.up_ratio, self.down_ratio = up_ratio, down_ratio
        self.act = activation
        self.upsample = Up(up_ratio, up_kernel_size)
        self.downsample = Down(down_ratio, down_kernel_size)

    def forward(self, x):
        return self.downsample(self.act(self.upsample(x)))


class Fused(Activation1d):
    """NVIDIA's with its CUDA kernel, which is not built here."""

    fused = True

    def forward(self, x):
        if self.fused:
            raise RuntimeError("nvcc is missing")
        return super().forward(x)


class TorchActivation1d(Activation1d):
    """transformers': filters are not in the state_dict."""

    def __init__(self, activation, ratio=2, kernel_size=12):
        nn.Module.__init__(self)
        self.act = activation
        self.upsample, self.downsample = Up(ratio, kernel_size, False), LowPass(ratio, kernel_size, False)


class Tiny(nn.Module):
    """Two stages of BigVGAN: transposed convolution, then residual activations and convolutions."""

    def __init__(self, make=Activation1d):
        super().__init__()
        self.ups = nn.ModuleList(nn.ConvTranspose1d(c, c // 2, 4, 2, padding=1) for c in (16, 8))
        self.activations = nn.ModuleList(make(Snake(c)) for c in (8, 4))
        self.convs = nn.ModuleList(nn.Conv1d(c, c, 3, padding=1) for c in (8, 4))

    def forward(self, x):
        for up, activation, conv in zip(self.ups, self.activations, self.convs, strict=True):
            x = up(x)
            x = x + conv(activation(x))
        return x
