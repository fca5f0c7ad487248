"""The measured problems."""

import difflib
import re
from dataclasses import dataclass, replace

from numba_tconv.formula.problem import Problem


@dataclass(frozen=True)
class Workload:
    """``note``: the layer; ``expanded_weight``: one filter for all channels, by a stride of 0."""

    name: str
    problem: Problem
    family: str
    note: str
    expanded_weight: bool = False


def _layer(name, family, note, batch, channels, kernel_size, stride, length, *, expanded_weight=False, **optional):
    problem = Problem(batch, *channels, kernel_size, length, stride, **optional)
    return Workload(name, problem, family, note, expanded_weight)


def _bigvgan(channels, length):
    note = f"anti-aliasing filter on {channels} channels, one filter expanded over them"
    sizes = dict(kernel_size=12, stride=2, length=length, groups=channels, expanded_weight=True)
    return _layer(f"bigvgan_{channels}", "BigVGAN", note, batch=8, channels=(channels, channels), **sizes)


_ALL = (
    _layer("kb64", "KernelBench", "level 1, problem 64", 64, (128, 128), 3, 1, 65536),
    _layer("kb74", "KernelBench", "level 1, problem 74: dilated", 32, (32, 64), 5, 1, 131072, dilation=3),
    _layer("kb79", "KernelBench", "level 1, problem 79: strided", 16, (32, 64), 3, 2, 131072, padding=1, dilation=2),
    _layer("hifigan_u1", "HiFi-GAN V1", "upsampling 1", 16, (512, 256), 16, 8, 512, padding=4),
    _layer("hifigan_u2", "HiFi-GAN V1", "upsampling 2", 16, (256, 128), 16, 8, 4096, padding=4),
    _layer("hifigan_u3", "HiFi-GAN V1", "upsampling 3", 16, (128, 64), 4, 2, 32768, padding=1),
    _layer("hifigan_u4", "HiFi-GAN V1", "upsampling 4", 16, (64, 32), 4, 2, 65536, padding=1),
    _layer("dac_u1", "DAC 44.1 kHz", "upsampling 1", 8, (1536, 768), 16, 8, 864, padding=4),
    _layer("dac_u2", "DAC 44.1 kHz", "upsampling 2", 8, (768, 384), 16, 8, 6912, padding=4),
    _layer("dac_u3", "DAC 44.1 kHz", "upsampling 3", 8, (384, 192), 8, 4, 55296, padding=2),
    _layer("dac_u4", "DAC 44.1 kHz", "upsampling 4", 8, (192, 96), 4, 2, 221184, padding=1),
    _layer("encodec_u1", "EnCodec 24 kHz", "upsampling 1", 8, (512, 256), 16, 8, 750),
    _layer("encodec_u2", "EnCodec 24 kHz", "upsampling 2", 8, (256, 128), 10, 5, 6000),
    _layer("encodec_u3", "EnCodec 24 kHz", "upsampling 3", 8, (128, 64), 8, 4, 30000),
    _layer("encodec_u4", "EnCodec 24 kHz", "upsampling 4", 8, (64, 32), 4, 2, 120000),
    _layer("oobleck_u1", "Oobleck (Stable Audio)", "upsampling 1", 4, (2048, 1024), 16, 8, 256, padding=4),
    _layer("oobleck_u2", "Oobleck (Stable Audio)", "upsampling 2", 4, (1024, 512), 16, 8, 2048, padding=4),
    _layer("oobleck_u3", "Oobleck (Stable Audio)", "upsampling 3", 4, (512, 256), 8, 4, 16384, padding=2),
    _layer("oobleck_u4", "Oobleck (Stable Audio)", "upsampling 4", 4, (256, 128), 8, 4, 65536, padding=2),
    _layer("oobleck_u5", "Oobleck (Stable Audio)", "upsampling 5", 4, (128, 128), 4, 2, 262144, padding=1),
    _layer("seamless_u1", "SeamlessM4T", "vocoder, upsampling 1", 16, (512, 256), 11, 5, 500, padding=3),
    _layer("xcodec_u1", "X-Codec", "upsampling 1", 16, (512, 256), 10, 5, 500, padding=3, output_padding=1),
    _layer("demucs_u2", "Demucs", "second decoder layer", 16, (768, 384), 8, 4, 196),
    _layer("demucs_out", "Demucs", "output layer", 16, (48, 8), 8, 4, 50000),
    _layer("depthwise", "Depthwise", "one filter a channel", 16, (512, 512), 4, 2, 16384, padding=1, groups=512),
    _bigvgan(768, 6000),
    _bigvgan(384, 24000),
    _bigvgan(192, 48000),
    _bigvgan(96, 96000),
    _bigvgan(48, 192000),
    _bigvgan(24, 384000),
    _layer("mimi", "Mimi", "frame rate doubled", 32, (512, 512), 4, 2, 2500, groups=512),
    _layer("pocket_tts", "Pocket-TTS", "frame rate times 16", 16, (512, 512), 32, 16, 1250, groups=512),
    _layer("convtasnet", "Conv-TasNet", "decoder", 16, (512, 1), 16, 8, 8000, padding=8),
    _layer("istft", "iSTFT", "as a transposed convolution, window 1024, hop 256", 8, (1026, 1), 1024, 256, 512),
    _layer("pqmf", "PQMF", "synthesis of 4 bands", 16, (4, 1), 64, 4, 65536, padding=31),
    _layer("waveglow", "WaveGlow", "spectrogram upsampling", 12, (80, 80), 1024, 256, 63),
    _layer("patch", "Patches", "kernel as long as the stride", 8, (1280, 1280), 2, 2, 4000),
    _layer("small", "Small", "bound by the launch", 1, (64, 64), 4, 2, 128, padding=1),
    _layer("head", "Small", "first layer of a decoder, batch 1", 1, (512, 256), 16, 8, 86, padding=4),
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
KERNELBENCH = ("kb64", "kb74", "kb79")
AUDIO = ("hifigan_u1", "hifigan_u3", "dac_u1", "oobleck_u4", "depthwise")
SETS = {"kernelbench": KERNELBENCH, "audio": AUDIO, "all": tuple(WORKLOADS)}


NAMED_SIZES = re.compile(
    r"c(?P<in_channels>\d+)to(?P<out_channels>\d+)k(?P<kernel_size>\d+)(s(?P<stride>\d+))?(p(?P<padding>\d+))?"
    r"(op(?P<output_padding>\d+))?(d(?P<dilation>\d+))?(g(?P<groups>\d+))?(?P<bias>bias)?"
)


def get(name: str) -> Workload:
    """The workload ``name``, in any case. Raises ValueError."""
    if name.lower() not in WORKLOADS:
        close = difflib.get_close_matches(name.lower(), WORKLOADS, n=3)
        said = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(WORKLOADS)}"
        raise ValueError(f"no workload is called {name!r}; {said}")
    return WORKLOADS[name.lower()]


def of_sizes(problem: Problem) -> Workload:
    """A layer named after its sizes without batch and length, such as "c128to64k4s2p1"."""
    sizes = f"c{problem.in_channels}to{problem.out_channels}k{problem.kernel_size}"
    for letter, value, default in (
        ("s", problem.stride, 1),
        ("p", problem.padding, 0),
        ("op", problem.output_padding, 0),
        ("d", problem.dilation, 1),
        ("g", problem.groups, 1),
    ):
        sizes += f"{letter}{value}" if value != default else ""
    return Workload(f"{sizes}{'bias' * problem.bias}", problem, "", "by its sizes")


def layer(name: str) -> Workload:
    """The workload ``name``, or the layer of a name of ``of_sizes``: one sample of minimal length. Raises
    ValueError."""
    if not (parts := NAMED_SIZES.fullmatch(name)):
        return get(name)
    numbers = {field: int(value) for field, value in parts.groupdict().items() if value and field != "bias"}
    length = 2 * numbers.get("padding", 0) + 1
    return of_sizes(Problem(1, length=length, bias=bool(parts["bias"]), **numbers))


def expand(names: list[str], batch: int | None = None) -> list[Workload]:
    """The workloads of ``names`` or SETS, each once. Raises ValueError."""
    single = [
        get(name) for name in dict.fromkeys(one for name in names for one in SETS.get(name.lower(), (name.lower(),)))
    ]
    return single if batch is None else [at_length(one, one.problem.length, batch) for one in single]


def at_length(workload: Workload, length: int, batch: int) -> Workload:
    """``workload`` at another input length and batch; the name gains ``@batch<N>``."""
    resized = replace(workload.problem, length=length, batch=batch)
    return replace(workload, name=f"{workload.name}@batch{batch}", problem=resized)


def of_row(name: str, length: int) -> Workload | None:
    """The row's workload; None if unknown or changed."""
    parts = re.fullmatch(r"(\w+)(@batch(\d+))?", name)
    if not parts:
        return None
    try:
        workload = layer(parts[1])
        if parts[2]:
            return at_length(workload, length, int(parts[3]))
    except (ValueError, RuntimeError):
        return None
    return workload if workload.problem.length == length else None
