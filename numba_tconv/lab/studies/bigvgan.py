"""BigVGAN v2 in plain torch, in its published sizes."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from numba_tconv.torch_api.alias_free import kaiser_sinc

TAPS, RATIO = 12, 2


class Sizes(NamedTuple):
    """Mel bands, sampling rate in Hz, upsampling stages."""

    bands: int
    sampling_rate: int
    rates: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    channels: int = 1536
    block_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    dilations: tuple[int, ...] = (1, 3, 5)
    title: str = ""

    @property
    def hop(self) -> int:
        return math.prod(self.rates)


SIZES = {
    "bigvgan_v2_24khz": Sizes(100, 24_000, (4, 4, 2, 2, 2, 2), (8, 8, 4, 4, 4, 4), title="BigVGAN v2, 24 kHz"),
    "bigvgan_v2_44khz": Sizes(128, 44_100, (8, 4, 2, 2, 2, 2), (16, 8, 4, 4, 4, 4), title="BigVGAN v2, 44.1 kHz"),
}


class SnakeBeta(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.alpha, self.beta = (nn.Parameter(0.1 * torch.randn(channels)) for _ in range(2))

    def forward(self, x):
        alpha, beta = self.alpha.exp()[:, None], self.beta.exp()[:, None]
        return x + (1.0 / (beta + 1e-9)) * torch.sin(x * alpha).pow(2)


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.ratio, self.pad = RATIO, TAPS // RATIO - 1
        self.crop = self.pad * RATIO + (TAPS - RATIO) // 2
        self.register_buffer("filter", kaiser_sinc(RATIO, TAPS).to(torch.get_default_device()))

    def forward(self, x):
        channels = x.shape[1]
        x = F.pad(x, (self.pad, self.pad), mode="replicate")
        x = self.ratio * F.conv_transpose1d(x, self.filter.expand(channels, -1, -1), stride=RATIO, groups=channels)
        return x[..., self.crop : -self.crop]


class Down(nn.Module):
    def __init__(self):
        super().__init__()
        self.ratio = RATIO
        self.register_buffer("filter", kaiser_sinc(RATIO, TAPS).to(torch.get_default_device()))

    def forward(self, x):
        channels = x.shape[1]
        x = F.pad(x, (TAPS // 2 - 1, TAPS // 2), mode="replicate")
        return F.conv1d(x, self.filter.expand(channels, -1, -1), stride=RATIO, groups=channels)


class Activation(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.act, self.upsample, self.downsample = SnakeBeta(channels), Up(), Down()

    def forward(self, x):
        return self.downsample(self.act(self.upsample(x)))


class Block(nn.Module):
    """Residual pairs of activated convolutions, the first dilated."""

    def __init__(self, channels: int, size: int, dilations: tuple[int, ...]):
        super().__init__()

        def layers(dilation):
            conv = nn.Conv1d(channels, channels, size, dilation=dilation, padding=dilation * (size - 1) // 2)
            return [Activation(channels), conv]

        self.pairs = nn.ModuleList(nn.Sequential(*layers(one), *layers(1)) for one in dilations)

    def forward(self, x):
        for pair in self.pairs:
            x = x + pair(x)
        return x


class BigVGAN(nn.Module):
    """A mel spectrogram (N, bands, frames) to waveforms (N, 1, frames * hop)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        widths = [sizes.channels >> stage for stage in range(len(sizes.rates) + 1)]
        self.first = nn.Conv1d(sizes.bands, widths[0], 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(before, after, size, rate, padding=(size - rate) // 2)
            for before, after, size, rate in zip(widths, widths[1:], sizes.kernel_sizes, sizes.rates, strict=False)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(Block(width, size, sizes.dilations) for size in sizes.block_kernel_sizes)
            for width in widths[1:]
        )
        self.last_activation = Activation(widths[-1])
        self.last = nn.Conv1d(widths[-1], 1, 7, padding=3, bias=False)

    def forward(self, x):
        x = self.first(x)
        for up, blocks in zip(self.ups, self.blocks, strict=True):
            x = up(x)
            x = sum(block(x) for block in blocks) / len(blocks)
        return self.last(self.last_activation(x)).clamp(-1, 1)
