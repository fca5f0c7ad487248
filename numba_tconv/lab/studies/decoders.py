"""Published decoders in transformers' default sizes, with random weights."""

import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from numba_tconv.formula.problem import Problem
from numba_tconv.torch_api.noted import transposed_convolutions

from .bigvgan import SIZES

GAIN = 0.65  # below 1: residual branches add up and would clip the waveform
BIAS = 0.02
MISSING = "the decoders are built by transformers, which is not installed: pip install -e '.[decoders]'"


class Built(NamedTuple):
    """``hop``: waveform samples an input frame; ``draw(batch, frames)``: a random input."""

    model: nn.Module
    hop: int
    draw: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Decoder:
    """``family``: transformers' name; ``construct(module, **sizes)`` returns Built."""

    title: str
    family: str
    sampling_rate: int
    construct: Callable[..., Built]

    def classes(self) -> ModuleType:
        return importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")

    def build(self, **sizes) -> Built:
        return self.construct(self.classes(), **sizes)

    def make(self, batch: int, seconds: float, **sizes) -> tuple[nn.Module, torch.Tensor]:
        """A random evaluation model and ``seconds`` of input, on torch's default device."""
        model, hop, draw = self.build(**sizes)
        randomise(model)
        return model.eval(), draw(batch, max(1, round(seconds * self.sampling_rate / hop)))


def require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeError(MISSING)
    os.environ["HF_HUB_OFFLINE"] = "1"


def decode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    decoded = model.decode(x) if hasattr(model, "decode") else model(x)
    return getattr(decoded, "audio_values", decoded)


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw weights so that every layer affects the waveform and none clips it."""
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            weight = module.weight
            terms = weight[0].numel() if isinstance(module, nn.Conv1d) else _terms(module)
            drawn = GAIN * torch.randn_like(weight) / math.sqrt(terms)
            if is_parametrized(module, "weight"):
                module.weight = drawn
            elif hasattr(module, "weight_g"):  # the older weight_norm
                module.weight_g.copy_(drawn.norm(dim=(1, 2), keepdim=True))
                module.weight_v.copy_(drawn)
            else:
                weight.copy_(drawn)
            if module.bias is not None:
                module.bias.normal_(std=BIAS)
        for name, buffer in module.named_buffers(recurse=False):
            if name == "embed_sum":  # Mimi's codebooks
                buffer.normal_()


def problems(decoder: Decoder, batch: int, seconds: float) -> list[Problem]:
    decoder.classes()  # under fake tensors its constants would be fake
    noted = transposed_convolutions(lambda: decode(*decoder.make(batch, seconds)))
    return list(dict.fromkeys(one.problem for one in noted))


def _terms(layer: nn.ConvTranspose1d) -> float:
    return max(1.0, layer.in_channels / layer.groups * layer.kernel_size[0] / layer.stride[0])


def encodec(m: ModuleType, **sizes) -> Built:
    config = m.EncodecConfig(**sizes)
    hop = math.prod(config.upsampling_ratios)
    return Built(m.EncodecDecoder(config), hop, lambda batch, frames: torch.randn(batch, config.hidden_size, frames))


def dac(m: ModuleType, **sizes) -> Built:
    config = m.DacConfig(**sizes)
    hop = math.prod(config.downsampling_ratios)
    return Built(m.DacDecoder(config), hop, lambda batch, frames: torch.randn(batch, config.hidden_size, frames))


def speecht5(m: ModuleType, **sizes) -> Built:
    config = m.SpeechT5HifiGanConfig(**sizes)
    hop = math.prod(config.upsample_rates)
    return Built(m.SpeechT5HifiGan(config), hop, lambda batch, frames: torch.randn(batch, frames, config.model_in_dim))


def mimi(m: ModuleType, **sizes) -> Built:
    config = m.MimiConfig(**sizes)
    hop = round(config.sampling_rate / config.frame_rate)

    def codes(batch, frames):
        return torch.randint(config.codebook_size, (batch, config.num_quantizers, frames))

    return Built(m.MimiModel(config), hop, codes)


def vits(m: ModuleType, **sizes) -> Built:
    config = m.VitsConfig(**sizes)
    hop = math.prod(config.upsample_rates)
    return Built(m.VitsHifiGan(config), hop, lambda batch, frames: torch.randn(batch, config.flow_size, frames))


def bigvgan(m: ModuleType, **sizes) -> Built:
    config = m.Qwen2_5OmniBigVGANConfig(**sizes)
    hop = math.prod(config.upsample_rates)
    model = m.Qwen2_5OmniToken2WavBigVGANModel(config)
    return Built(model, hop, lambda batch, frames: torch.randn(batch, config.mel_dim, frames))


DECODERS = {
    "encodec": Decoder("EnCodec, 24 kHz", "encodec", 24_000, encodec),
    "dac": Decoder("DAC, 44.1 kHz", "dac", 44_100, dac),
    "speecht5": Decoder("SpeechT5 HiFi-GAN, 16 kHz", "speecht5", 16_000, speecht5),
    "mimi": Decoder("Mimi, 24 kHz", "mimi", 24_000, mimi),
    "vits": Decoder("VITS HiFi-GAN, 16 kHz", "vits", 16_000, vits),
    "bigvgan": Decoder("Qwen2.5-Omni BigVGAN, 24 kHz", "qwen2_5_omni", 24_000, bigvgan),
}


def title(name: str) -> str:
    named = DECODERS.get(name) or SIZES.get(name)
    return named.title if named else name


def get(name: str) -> Decoder:
    if name not in DECODERS:
        raise ValueError(f"no decoder is called {name!r}; there are {', '.join(DECODERS)}")
    return DECODERS[name]
