"""The record of plans: which rung takes a problem, what it launches with which arguments, and what cost models say; and
of what the lab says without a GPU (lab/said.py).

    python -m tests.plans             compare this tree with tests/plans.json; exit status 1 if there are differences
    python -m tests.plans --record    record the plans of this tree

Each problem is planned by about half of the rungs that can do it, each in one precision, on one GPU and in one memory
layout, which its name and the rung's draw. Nothing is compiled and no GPU is needed.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import pkgutil
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

import numba_tconv
from numba_tconv.formula.alias_free import AliasFree
from numba_tconv.formula.precision import PRECISIONS, TF32_ALLOWED
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import wgmma_ring
from numba_tconv.gradients.alias_free import plan as activation_gradients
from numba_tconv.gradients.input.wgmma import producer as grad_input_producer
from numba_tconv.kernels.alias_free import plan as activations
from numba_tconv.kernels.k6_wgmma import boxes as k6_boxes
from numba_tconv.kernels.streaming import plan as streaming
from numba_tconv.lab.measure.workloads import WORKLOADS
from numba_tconv.lab.studies.streaming import LAYERS
from numba_tconv.runtime import device
from numba_tconv.runtime.device import A100, GPUS, H200, Device
from numba_tconv.runtime.kernel import GIVEN, Prepared
from numba_tconv.runtime.layout import NO_GPU, Layout
from numba_tconv.selection import gradient
from numba_tconv.selection.forward import arithmetic, decide
from numba_tconv.selection.gradient import GRADIENTS
from numba_tconv.selection.joined import joined
from numba_tconv.selection.registry import RUNGS

from . import choices
from .lab import said
from .parity import SMALL

RECORD = Path(__file__).with_name("plans.json")
ARITHMETICS = [(dtype, precision) for dtype, known in PRECISIONS.items() for precision in known]

ALIKE = ("bigvgan_384", "bigvgan_192", "bigvgan_96", "bigvgan_48")  # like the other layers of their family
PROBLEMS = {name: workload.problem for name, workload in WORKLOADS.items() if name not in ALIKE}
PROBLEMS |= dict(list(SMALL.items())[::3])
PROBLEMS |= {
    "signals that are joined": Problem(32, 512, 256, 16, 32, 8, 4, bias=True),
    "odd length": Problem(2, 32, 24, 4, 301, 2, 1),
    "even length": Problem(2, 32, 24, 4, 302, 2, 1),
    "groups on tensor cores": Problem(3, 128, 96, 8, 513, stride=4, padding=2, groups=2, bias=True),
    "groups and dilation": Problem(2, 64, 192, 5, 700, stride=3, dilation=2, padding=4, groups=4, output_padding=1),
    "cropped right": Problem(3, 128, 96, 8, 513, stride=4, output_padding=-3, groups=2),
    "few positions, many channels": Problem(1, 128, 1024, 16, 65, stride=4, padding=2, groups=2),
    "long sums, few outputs": Problem(1, 4096, 32, 4, 16, stride=2, padding=1, bias=True),
    "dilation above a vector": Problem(4, 48, 80, 3, 2000, stride=32, dilation=3),
    "odd stride, many phases": Problem(2, 32, 16, 258, 120, stride=129, bias=True),
    "more than one tile of taps": Problem(1, 16, 40, 61, 330, padding=30),
    "more outputs than 32 bits count": Problem(1024, 64, 64, 4, 40_000, stride=2, padding=1),
}
ON = [GPUS[name] for name in ("Tesla T4", "NVIDIA A100", "NVIDIA H200", "NVIDIA GeForce RTX 5090")]
STEPS = ((1, 1), (8, 4), (64, 1), (300, 3))  # slots and new frames
ACTIVATIONS = {
    "snake": AliasFree(4, 192, 8192, 12, 12, 2, 2),
    "gelu": AliasFree(3, 5, 1001, 16, 15, 4, 4),
    "snake, unlike ratios": AliasFree(2, 24, 300, 8, 9, 2, 3),
    "silu": AliasFree(1, 1, 7, 6, 5, 1, 2),
    "snake, long": AliasFree(8, 1536, 100_000, 12, 12, 2, 2),
}
# By place: cost models and searches, whose results are counted and added up.
MODELS = {
    "kernels.k4_register_tile.choose": ("cost", "few_cost"),
    "kernels.k5_dmma.tile": ("cost",),
    "kernels.k5_mma.choose": ("_intensity", "resident_blocks"),
    "kernels.k6_wgmma.choose": ("cost",),
    "gradients.input.tile.choose": ("milliseconds",),
    "gradients.input.wgmma.choose": ("clocks_of", "tile_clocks"),
    "gradients.weight.split.choose": ("_time", "least_ms"),
    "gradients.weight.wgmma.choose": ("_several", "_whole", "_multiplying", "cost"),
}


def drawn(*names: str) -> random.Random:
    """Choices that depend on names alone, so that a new problem changes no other's."""
    return random.Random(" ".join(names))


def arithmetics_of(name: str) -> list[tuple[torch.dtype, str]]:
    """Every precision, with one of the two of 16 bits."""
    left_out = drawn(name).choice(("fp16", "bf16"))
    return [one for one in ARITHMETICS if one[1] != left_out]


def selections(name: str, p: Problem) -> Iterator[tuple[str, str]]:
    """The rung by GPU in each precision, and signals that are joined."""
    known = arithmetics_of(name)
    for dtype, precision in [*known, (torch.float32, TF32_ALLOWED)]:
        words = []
        for gpu in ON:
            own = arithmetic(p, dtype, "", precision, gpu)
            decision = decide(p, dtype, own, gpu)
            taken = decision.rung.name if decision.rung else "torch" if decision.by_torch else "none"
            words.append(taken if own == precision else f"{taken} in {own}")
        yield f"forward {precision}", _runs(words)
        if joint := joined(p, dtype, precision, H200):
            yield f"joined {precision}", f"{joint.problem} {joint.apart} {joint.copies_ms:.6g}"
    for of in ("grad_input", "grad_weight", "grad_bias"):
        for dtype, precision in known:
            rungs = [_selected(of, p, dtype, precision, gpu) for gpu in ON]
            if set(rungs) != {"none"}:
                yield f"{of} {precision}", _runs(rungs)


def tiles(name: str, p: Problem) -> Iterator[tuple[str, str]]:
    """Every rung's configuration by GPU in one precision: a digest, and the predicted time."""
    for of, rung in {**RUNGS, **GRADIENTS}.items():
        choice = drawn("tiles", name, of)
        refusals = {one: [rung.refusal(p, *one, gpu) for gpu in ON] for one in ARITHMETICS}
        able = [one for one, why in refusals.items() if None in why]
        if not able or (of == "grad_weight_split" and choice.random() > 0.3):  # looks at many tiles
            continue
        dtype, precision = choice.choice(able)
        on = zip(refusals[dtype, precision], ON, strict=True)
        words = ["-" if why else _tile(rung, p, dtype, precision, gpu) for why, gpu in on]
        yield f"tile of {of} {precision}", _runs(words)


def _tile(rung, p: Problem, dtype: torch.dtype, precision: str, gpu: Device) -> str:
    config = rung.config_on(gpu, p, dtype, precision)
    return " ".join([digest(str(config)), *_numbers(rung, p, config, gpu).values()])


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _selected(of: str, p: Problem, dtype: torch.dtype, precision: str, gpu: Device) -> str:
    try:
        return gradient.select(of, p, dtype, gpu, precision=precision).name
    except NotImplementedError:
        return "none"


def _runs(words: list[str]) -> str:
    """The words by GPU; equal neighbours once, with the GPU's compute capability from which on they hold."""
    ccs = [".".join(map(str, gpu.cc)) for gpu in ON]
    return ", ".join(f"{cc} {word}" for at, (cc, word) in enumerate(zip(ccs, words)) if not at or words[at - 1] != word)  # noqa: B905


# --- launches ---------------------------------------------------------------------------------------------------------


def text_of(value, given=None) -> str:
    """An argument in a few words; ``given``: what a call passes for it."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.").replace("float", "f")
        strides = "" if value.is_contiguous() else f" by {'x'.join(map(str, value.stride()))}"
        passed = "" if given is None or given.shape == value.shape else f", given {'x'.join(map(str, given.shape))}"
        return f"{kind} {'x'.join(map(str, value.shape))}{strides}{passed}"
    if value is GIVEN:
        return f"given {text_of(given) if isinstance(given, torch.Tensor) else 'a number'}"
    if isinstance(value, tuple):
        return ",".join(map(text_of, value)).rstrip(",0")
    return str(int(value) if isinstance(value, bool) else value)


def fields_of(name: str, value, given: Iterator) -> Iterator[tuple[str, str]]:
    """An argument's fields by name."""
    if hasattr(value, "_fields"):
        for field, one in zip(value._fields, value, strict=True):
            yield from fields_of(f"{name}.{field}", one, given)
    else:
        is_given = value is GIVEN or isinstance(value, torch.Tensor)
        yield name, text_of(value, next(given) if is_given else None)


def launch_of(prepared: Prepared, given: tuple) -> dict[str, str]:
    """The launch's fields by name; ``key``: a digest of the configuration."""
    kernel = prepared.kernel
    fields = dict(kernel=kernel.name, key=digest(kernel.key), grid="x".join(map(str, prepared.grid)))
    fields |= dict(shared=f"{prepared.shared_bytes}{' early' * prepared.early}")
    names, passed = inspect.signature(kernel.function).parameters, iter(given)
    for name, value in zip(names, prepared.arguments, strict=True):
        fields |= dict(fields_of(name, value, passed))
    return fields


def map_of(precision: str, sizes: tuple, distances: tuple, box: tuple, swizzled: bool = False) -> tuple[int, ...]:
    """In place of a tensor map: what it is made of."""
    numbers = *sizes, *distances, *box, int(swizzled), sum(precision.encode())
    return numbers + (0,) * (16 - len(numbers))


class Recorder:
    """Records launches and models while it is entered."""

    def __init__(self):
        self.launches: list[dict[str, str]] = []
        self.models: dict[str, list] = {}
        every = (one for module in modules() for one in vars(module).values() if hasattr(one, "cache_clear"))
        self._remembered = [one for one in every if not one.__name__.startswith("make_")]

    def forget(self):
        """Let every choice be made anew."""
        for one in self._remembered:
            one.cache_clear()

    @contextmanager
    def recording(self):
        with ExitStack() as stack:
            launches = self.launches
            stack.enter_context(
                patch.object(Prepared, "__call__", lambda own, *given: launches.append(launch_of(own, given)))
            )
            for module in (k6_boxes, wgmma_ring, grad_input_producer):  # the driver makes tensor maps
                stack.enter_context(patch.object(module, "encode", map_of))
            for place, names in MODELS.items():
                module = importlib.import_module(f"numba_tconv.{place}")
                for name in names:
                    stack.enter_context(patch.object(module, name, self._counted(place, name, getattr(module, name))))
            stack.enter_context(torch.inference_mode())  # packs weights in every call
            self.forget()
            yield
        self.forget()

    def _counted(self, place: str, name: str, model: Callable) -> Callable:
        def counted(*arguments):
            result = model(*arguments)
            seen = self.models.setdefault(f"{place}.{name}", [0, 0.0])
            seen[0] += 1
            seen[1] += result
            return result

        return counted

    def taken(self) -> dict:
        """The launches since the last time, by kernel."""
        found, names = {}, Counter()
        for fields in self.launches:
            name = fields.pop("kernel")
            names[name] += 1
            found[name if names[name] == 1 else f"{name} {names[name]}"] = fields
        self.launches.clear()
        return found

    def asked(self) -> dict[str, str]:
        """How often models were asked since the last time, and the sum of their answers."""
        found = {name: f"{number} times, {total:.6g}" for name, (number, total) in self.models.items()}
        self.models.clear()
        return found


def modules() -> list:
    found = pkgutil.walk_packages(numba_tconv.__path__, "numba_tconv.")
    below = ("numba_tconv.kernels", "numba_tconv.gradients", "numba_tconv.selection")
    return [importlib.import_module(one.name) for one in found if one.name.startswith(below)]


def laid_out(shape: tuple, dtype: torch.dtype, way: str) -> Layout:
    """A layout: "contiguous", "offset" by an element, "apart" (rows of 8 more), or "turned" (last two axes)."""
    plain = Layout.contiguous(shape, dtype, NO_GPU)
    if way == "offset":
        return plain._replace(offset=dtype.itemsize)
    _, b, c = shape
    if way == "apart":
        return plain._replace(strides=(b * (c + 8), c + 8, 1))
    return plain._replace(strides=(b * c, 1, b)) if way == "turned" else plain


def alike(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")


WAYS = ("contiguous", "contiguous", "contiguous", "offset", "apart", "turned")


def plans(recorder: Recorder, problem: str, p: Problem) -> Iterator[tuple[str, dict]]:
    """What rungs launch, and their models' numbers."""
    for name, rung in {**RUNGS, **GRADIENTS}.items():
        choice = drawn(problem, name)
        gpu = H200 if rung.exact_cc or choice.random() > 0.3 else A100
        able = [one for one in arithmetics_of(problem) if rung.refusal(p, *one, gpu) is None]
        if not able or choice.random() > (1 if "depthwise" in name else 0.5):
            continue
        dtype, precision = choice.choice(able)
        way = choice.choice(WAYS)
        x, w = laid_out(p.in_shape, dtype, way), laid_out(p.weight_shape, dtype, way)
        y = laid_out(p.out_shape, dtype, "offset" if way == "offset" else "contiguous")
        bias = Layout.contiguous((p.out_channels,), dtype, NO_GPU) if p.bias else None
        with patch.object(device, "of", lambda _, gpu=gpu: gpu):
            config = rung.config_on(gpu, p, dtype, precision)
            names = " ".join(step.name for step in rung.steps(config, p, gpu))
            found = dict(tile=rung.tile(config) if name in RUNGS else str(config), steps=names)
            found |= _numbers(rung, p, config, gpu)
            found["unsuited"] = rung.unsuited(p, dtype, precision, gpu) or "no"
            if name in RUNGS:
                layouts = x, w, bias, y
            else:
                g = laid_out(p.out_shape, dtype, way)
                operands = {"grad_input": (g, w), "grad_weight": (g, x), "grad_bias": (g,)}[rung.of]
                layouts = *operands, Layout.contiguous(p.shape_of(rung.of), dtype, NO_GPU)
            call = rung.prepare(*layouts, p, precision=precision)
            call(*(one and alike(one) for one in layouts))
        yield f"{name} {precision} {way} {'A100' if gpu == A100 else 'H200'}", found | recorder.taken()


def _numbers(rung, p: Problem, config, gpu: Device) -> dict[str, str]:
    numbers = dict(predicted_ms=rung.predicted_ms(p, config, gpu), slowdown=rung.slowdown(p, config))
    return {name: f"{number:.6g}" for name, number in numbers.items() if number is not None}


def steps(recorder: Recorder, name: str, layer: Problem) -> Iterator[tuple[str, dict]]:
    """The launch of a step of streams."""
    for slots, frames in STEPS:
        p, choice = replace(layer, batch=slots, length=frames), drawn(name, str(slots), str(frames))
        dtype, precision = choice.choice(ARITHMETICS)
        way, has_mask = choice.choice(WAYS), choice.random() > 0.5
        x, w = laid_out(p.in_shape, dtype, way), laid_out(p.weight_shape, dtype, way)
        state = Layout.contiguous((slots, p.in_channels, p.taps.shift(p.kernel_size - 1)), dtype, NO_GPU)
        y = Layout.contiguous((slots, p.out_channels, frames * p.stride), dtype, NO_GPU)
        config = streaming.choose(x, state, w, p, precision)
        if config is None:
            continue
        step = streaming.prepare(x, w, None, has_mask, p, config)
        step(alike(x), alike(state), alike(w), None, alike(y) if has_mask else None, alike(y))
        yield f"streaming {precision} {way} {slots}x{frames}", recorder.taken()


def activation_plans(recorder: Recorder, name: str, sizes: AliasFree) -> Iterator[tuple[str, dict]]:
    """Launches of an activation and its gradients."""
    kind, shape = name.split(",")[0], (sizes.batch, sizes.channels, sizes.length)
    for dtype in PRECISIONS:
        config = activations.choose(sizes, dtype, kind, False)
        x, y = laid_out(shape, dtype, "turned"), laid_out((*shape[:2], sizes.out_length), dtype, "contiguous")
        up, down, alpha = (torch.empty(n, dtype=dtype, device="meta") for n in (*sizes[3:5], sizes.channels))
        activations.prepare(sizes, x.strides, config)(alike(x), up, down, alpha, alpha, alike(y).flatten())
        own = activation_gradients.choose(sizes, dtype, kind, False, kind == "snake")
        partials = torch.empty(activation_gradients.partials_of(sizes, own), device="meta")
        gradients = activation_gradients.prepare(sizes, x.strides, y.strides, own)
        gradients(alike(x), alike(y), up, down, alpha, alpha, alike(x).flatten(), partials)
        if kind == "snake":
            activation_gradients.prepare_parameters(sizes, own, True)(partials, alpha, alpha, alpha, alpha)
        yield str(dtype).removeprefix("torch."), recorder.taken()


def names() -> list[str]:
    return [*PROBLEMS, *(f"a stream of {name}" for name in LAYERS), *(f"activation {name}" for name in ACTIVATIONS)]


def planned(share: int = 0, shares: int = 1) -> dict[str, dict]:
    """Selections and plans by problem: every ``shares``-th problem from ``share`` on."""
    recorder, found = Recorder(), {}

    def mine(every: dict) -> list:
        return list(every.items())[share::shares]

    with recorder.recording():
        for name, p in mine(PROBLEMS):
            recorder.forget()
            found[name] = dict(selections(name, p)) | dict(tiles(name, p)) | dict(plans(recorder, name, p))
            found[name]["models"] = recorder.asked()
        for name, layer in mine(LAYERS):
            found[f"a stream of {name}"] = dict(steps(recorder, name, layer))
        for name, sizes in mine(ACTIVATIONS):
            found[f"activation {name}"] = dict(activation_plans(recorder, name, sizes))
    return found


# --- compared ---------------------------------------------------------------------------------------------------------


def recorded() -> dict[str, dict]:
    """The record. In its file, a launch is a line of values: which of "names" has its fields, and each field's."""
    if not RECORD.exists():
        return {}
    names, record = json.loads(RECORD.read_text()).values()

    def named(value):
        if isinstance(value, list):
            return dict(zip(names[value[0]], value[1:], strict=True))
        return {name: named(one) for name, one in value.items()} if isinstance(value, dict) else value

    return named(record)


def keep(found: dict[str, dict]) -> None:
    names = {}

    def short(value):
        if isinstance(value, dict) and "grid" in value:
            return [names.setdefault(tuple(value), len(names)), *value.values()]
        return {name: short(one) for name, one in value.items()} if isinstance(value, dict) else value

    record = short(found)
    text = json.dumps(dict(names=list(names), plans=record), indent=0)
    # A list without lists in one line
    RECORD.write_text(re.sub(r"\[[^][{}]*\]", lambda of: of[0].replace("\n", ""), text) + "\n")


def differences(before, now, place: str = "") -> Iterator[str]:
    """Every field that differs, with its place."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            yield from differences(before.get(name), now.get(name), f"{place}: {name}" if place else name)
    elif before != now:
        yield f"{place}: {'nothing' if before is None else before} became {'nothing' if now is None else now}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.plans", description="compare plans with a record")
    parser.add_argument("--record", action="store_true", help="keep this tree's plans as the record")
    options = parser.parse_args(arguments)
    now = planned() | said.everything() | choices.everything()
    found = list(differences(recorded(), now))
    print("\n".join(found) or "everything is as recorded")
    if options.record:
        keep(now)
    return int(bool(found) and not options.record)


if __name__ == "__main__":
    sys.exit(main())
