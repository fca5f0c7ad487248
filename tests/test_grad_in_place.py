"""A gradient that begins before another one has ended: what it writes is allocated before that one is launched."""

import re
from types import SimpleNamespace

import pytest
import torch

from numba_tconv import ops, workloads
from numba_tconv.kernels import grad_weight_wgmma
from numba_tconv.kernels.device import H200
from numba_tconv.kernels.grad_in_place import InPlace
from numba_tconv.kernels.gradients import GRADIENTS
from numba_tconv.kernels.ready import Ready
from numba_tconv.layout import NO_GPU, Layout
from numba_tconv.ptx import SIMULATOR
from tests.thorough import thorough


class Gradients:
    """Two gradients that only tell what they do, in its order."""

    def __init__(self, partials=True, index=NO_GPU):
        self.done = []
        rooms = (self.room("maps"), self.room("partials") if partials else None)
        add_up = (lambda sums, result: self.done.append("add up")) if partials else None
        self.fill = InPlace(self.launch("weight"), *rooms, add_up)
        self.fill.make_early = lambda: InPlace(self.launch("weight, early"), *rooms, add_up)
        self.for_weight = Ready((4,), torch.float32, index, self.fill)
        self.for_weight.room = self.room("result")

    def room(self, name):
        return lambda: self.done.append(f"room of {name}") or torch.empty(4)

    def launch(self, name):
        return lambda *_: self.done.append(f"launch {name}")

    def for_input(self, grad_output, weight):
        self.done.append("launch input")
        return grad_output

    def backward(self, monkeypatch, *wanted):
        x = torch.zeros(1, 2, 3)
        found = [one if name in wanted else None for name, one in (("x", self.for_input), ("w", self.for_weight))]
        monkeypatch.setattr(ops, "_ready_gradients", lambda *_: (*found, None))
        monkeypatch.setattr(ops, "computes_on", lambda index: True)
        ctx = SimpleNamespace(saved_tensors=(x, x), needs_input_grad=(True, True, False), constants=())
        ops.backward(ctx, x)
        return self.done


ROOMS = ["room of result", "room of maps", "room of partials"]


def test_the_second_gradient_begins_early_in_memory_of_its_own(monkeypatch):
    done = Gradients().backward(monkeypatch, "x", "w")
    assert done == [*ROOMS, "launch input", "launch weight, early", "add up"]


def test_whole_sums_have_no_room_for_parts(monkeypatch):
    done = Gradients(partials=False).backward(monkeypatch, "x", "w")
    assert done == [*ROOMS[:2], "launch input", "launch weight, early"]


def test_a_gradient_alone_waits_for_what_is_before_it(monkeypatch):
    """It may be what writes the tensors."""
    assert Gradients().backward(monkeypatch, "w") == [*ROOMS, "launch weight", "add up"]


def test_other_ways_to_fill_a_gradient_wait():
    """Such as a launch alone, and sums in parts."""
    launch = SimpleNamespace(early=False)
    for fill in (launch, InPlace(launch, lambda: None)):
        second = Ready((4,), torch.float32, NO_GPU, fill)
        assert ops.early(second) is second
    torchs = Gradients().for_input
    assert ops.early(torchs) == torchs


def test_of_another_gpu_it_waits(monkeypatch):
    monkeypatch.setattr(ops.device, "is_current", lambda index: index == 0)
    gradients = Gradients(index=1)
    assert ops.early(gradients.for_weight) is gradients.for_weight


@pytest.mark.parametrize("name", ["kb79", "hifigan_u1", "dac_u1"])
def test_it_reads_what_lies_in_memory_since_before(monkeypatch, name):
    """Not a copy, which is made by a kernel between the two; nor planes of grad_output."""
    monkeypatch.setattr(grad_weight_wgmma.gpu, "of", lambda index: H200)
    monkeypatch.setattr(grad_weight_wgmma, "_prepared", lambda *told: (1, 1, SimpleNamespace(early=told[-1])))
    monkeypatch.setattr(grad_weight_wgmma.grad_weight_sum, "prepare", lambda *_: None)
    p = workloads.get(name).problem
    shapes = [(p.batch, p.out_channels, p.out_length), (p.batch, p.in_channels, p.length)]
    shapes += [(p.in_channels, p.out_channels, p.kernel_size)]
    g, x, result = (Layout.contiguous(shape, torch.float32, NO_GPU) for shape in shapes)
    rung = GRADIENTS["grad_weight_wgmma"]
    in_place, _ = rung.config(p, torch.float32, precision="tf32")
    fill = rung.prepare(g, x, result, p, precision="tf32")
    assert isinstance(fill, InPlace) == (in_place is None)
    if in_place is None:
        assert not fill.launch.early
        assert bool(fill.early) == (name == "dac_u1"), "whose sums are whole"
    if name == "dac_u1":
        assert fill.early.launch.early
    strided = x._replace(strides=(*x.strides[:2], 2))
    assert not isinstance(rung.prepare(g, strided, result, p, precision="tf32"), InPlace)


@pytest.mark.skipif(SIMULATOR, reason="the simulator runs one kernel after the other")
@pytest.mark.parametrize(
    ("name", "early"), thorough([("dac_u1", True), ("hifigan_u1", False)], always=[("dac_u1", True)])
)
def test_kernels_say_and_wait(name, early):
    """The first gradient's kernel lets the next one begin; the second's waits before it ends, and after its loads,
    where it may be early."""

    def words(kernel):
        return re.findall(r"griddepcontrol\.\w+|cp\.async\.bulk\.tensor", kernel.kept_ptx((9, 0, "a")))

    of_input, of_weight = (GRADIENTS[name] for name in ("grad_input_wgmma", "grad_weight_wgmma"))
    p = workloads.get(name).problem
    (kernel, _), *_ = of_input.kernels(of_input.config(p, torch.bfloat16, precision="bf16"))
    assert words(kernel)[0] == "griddepcontrol.launch_dependents"
    _, config = of_weight.config(p, torch.bfloat16, precision="bf16")
    (kernel, _), *_ = of_weight.kernels((None, config))
    said = words(kernel)
    assert config.direct == early
    assert (said[-1] == "griddepcontrol.wait") == early
    assert "cp.async.bulk.tensor" in said
