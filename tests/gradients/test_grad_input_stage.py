"""grad_input_wgmma's stages: what the copy engine brings and each lane reads, in plain Python.

The kernel's functions run on a model of shared memory. Reads are held against the definition, element by element:
neighbours of a row belong to others, or are junk, and must never be read.
"""

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from numba_tconv.formula.precision import DTYPES
from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import wgmma_ring as grad_ring
from numba_tconv.gradients.input.wgmma import choose as grad_input_wgmma_choose
from numba_tconv.gradients.input.wgmma import kernel as grad_input_wgmma
from numba_tconv.gradients.input.wgmma import operands as grad_input_wgmma_stage
from numba_tconv.gradients.input.wgmma import producer as grad_input_wgmma_rows
from numba_tconv.gradients.input.wgmma.arguments import Grid, Shape, Tile
from numba_tconv.kernels.common.pipeline import Pipe
from numba_tconv.kernels.common.tensor_core import fragments
from numba_tconv.lab.measure import workloads
from numba_tconv.runtime.layout import NO_GPU, Layout
from tests.thorough import thorough

JUNK, SLOT = "junk", 1 << 20  # where slot 0 begins
PRECISIONS = ["tf32", "bf16"]
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


class Half:
    def __init__(self, low, high=0):
        self.both = low, high

    def __lshift__(self, bits):
        assert bits == 16
        return Half(0, self.both[0])

    def __and__(self, mask):
        return Half(self.both[0] if mask & 0xFFFF else 0, self.both[1] if mask >> 16 else 0)

    def __or__(self, other):
        assert self.both[1] == 0 == other.both[0]
        return Half(self.both[0], other.both[1])


class Whole:
    def __init__(self, value):
        self.both = (value,)

    def __and__(self, mask):
        assert mask in (0, 0xFFFFFFFF)
        return Whole(self.both[0] if mask else 0)


def spread(a, b, selector):
    """prmt.b32; each selector digit spreads the uppermost bit of a byte."""
    digits = [selector >> 4 * z & 15 for z in range(4)]
    assert all(digit >= 8 for digit in digits)
    uppermost = [word >> 8 * z + 7 & 1 for word in (a, b) for z in range(4)]
    return sum(0xFF << 8 * z for z, digit in enumerate(digits) if uppermost[digit - 8])


class Shared:
    """Shared memory by address, the kernel's requests, and who asks."""

    def __init__(self, monkeypatch):
        self.elements, self.words, self.itemsize, self.reached, self.asked = {}, {}, 2, 0, []
        fakes = {
            "device_function": lambda function: function,
            "ld_shared": lambda count, kind: self.load_word if count == 1 else self.load_pair,
            "ld_shared_u16": lambda at: Half(self.element(at)),
            "int32": lambda value: (int(value) + (1 << 31)) % (1 << 32) - (1 << 31),
            "prmt": spread,
            "recomputed": lambda value: value,
            "st_shared_b32": lambda at, word: self.words.update({int(at): int(word)}),
            "st_shared_v2_b32": self.store_pair,
            "uint64": lambda value: int(value) % (1 << 64),
        }
        fakes |= dict.fromkeys(("publish", "tensormap_acquire"), lambda *_: None)
        waits = "mbarrier_wait", "mbarrier_arrive_expect_tx", "cp_async_bulk_tensor", "cp_async_bulk_tensor_4d"
        fakes |= dict.fromkeys(waits, lambda *told: self.asked.append(told))
        for module in (grad_input_wgmma_stage, grad_input_wgmma, grad_input_wgmma_rows):
            for name, fake in fakes.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fake)
        warp = SimpleNamespace(any_sync=lambda mask, reached: reached | self.reached)
        monkeypatch.setattr(grad_input_wgmma_stage, "cuda", warp)
        alone = SimpleNamespace(blockIdx=SimpleNamespace(x=0), gridDim=SimpleNamespace(x=1))
        monkeypatch.setattr(grad_input_wgmma_rows, "cuda", alone)

    def element(self, at):
        return self.elements[int(at)]  # a KeyError: no box has arrived there

    def load_word(self, at):
        at = int(at)
        if at in self.words:
            return self.words[at]
        assert at % 4 == 0
        return Whole(self.element(at)) if self.itemsize == 4 else Half(self.element(at), self.element(at + 2))

    def load_pair(self, at):
        assert at % 8 == 0
        return self.words[int(at)], self.words[int(at) + 4]

    def store_pair(self, at, low, high):
        self.words.update({int(at): int(low), int(at) + 4: int(high)})

    def produced(self, config, shape, place, count):
        """Of each stage, the producer's boxes of grad_output by their addresses in slot 0.

        Once consumers have left a slot, its bytes are announced, and arrive, at its own barrier."""
        maps = SimpleNamespace(workspace=0, g_template=0, g_address=0, b_template=0, b_address=0)
        produce = grad_input_wgmma_rows.make_produce(config, lambda *_: place)
        self.asked.clear()
        produce(maps, shape, Grid(1, 1, 1, count), 1, 0, Pipe(100, 500, 0), SimpleNamespace(base=SLOT, lane=0))
        requests = iter(self.asked)
        for s in range(count):
            times, slot = divmod(s, config.stages)
            assert next(requests) == (500 + 8 * slot, 1 - times % 2)
            assert next(requests) == (100 + 8 * slot, config.stage_bytes)
            boxes = [next(requests) for _ in range(1 + config.boxes)]
            assert {box[-1] for box in boxes} == {100 + 8 * slot}
            first, row = (place.split * count + s) * config.entries, place.group * shape.group_channels
            assert boxes[0][:-1] == (SLOT + slot * config.slot, grad_input_wgmma_rows.MAP_BYTES, first, row, 0)
            yield {at - slot * config.slot: begin for at, _, *begin, _ in boxes[1:]}


@pytest.fixture
def shared(monkeypatch):
    for module in (grad_ring, grad_input_wgmma_rows):
        monkeypatch.setattr(module, "encode", lambda precision, *told: told[:3])
    monkeypatch.setattr(grad_ring, "_template", grad_ring._template.__wrapped__)
    return Shared(monkeypatch)


def fetch(memory, itemsize, sizes, distances, box, begin):
    """The copy engine's box, innermost dimension first: zeros outside the tensor."""
    assert all(distance % 16 == 0 < distance for distance in distances)
    assert all(0 < size <= 256 for size in box)
    assert begin[0] * itemsize % 16 == 0 == box[0] * itemsize % 16
    steps = [distance // itemsize for distance in distances]
    row = range(begin[0], begin[0] + box[0])
    others = [range(first, first + size) for first, size in zip(begin[1:], box[1:], strict=True)]
    for places in itertools.product(*reversed(others)):
        places = places[::-1]
        if all(0 <= place < size for place, size in zip(places, sizes[1:], strict=True)):
            at = sum(place * step for place, step in zip(places, steps, strict=True))
            yield from (memory.get(at + x, JUNK) if 0 <= x < sizes[0] else 0 for x in row)
        else:
            yield from [0] * box[0]


def laid_out(p, precision, sheared, rng):
    """Strides of a grad_output whose every ``sheared``-th row begins alike, with or without a gap."""
    vector = 16 // DTYPES[precision].itemsize
    shear = rng.randrange(1, 2 * sheared, 2) * (vector // sheared) % vector if sheared > 1 else 0
    stride_c = p.out_length + (shear - p.out_length) % vector + rng.choice([0, vector])
    stride_c += vector if stride_c < vector else 0  # shorter rows have no sheared map (sheared_of)
    return -(-p.out_channels * stride_c // vector) * vector + rng.choice([0, vector]), stride_c, 1


def check(shared, p, config, strides, tile, warps, group=0, part=0, splits=1):
    """One tile of the first sample: every register of these (warpgroup, warp), in every stage of a split."""
    shared.itemsize = itemsize = config.itemsize
    sheared = config.sheared
    shear, first, sample = grad_input_wgmma_rows.shear_of(strides, config), -p.padding, 0
    memory = {
        n * strides[0] + c * strides[1] + x: (n, c, x)
        for n in range(p.batch)
        for c in range(p.out_channels)
        for x in range(p.out_length)
    }
    if sheared > 1:
        sizes, distances, box = grad_input_wgmma_rows.template.__wrapped__(p.out_shape, strides, config)
    else:
        g = Layout(p.out_shape, strides, config.dtype, NO_GPU, 0)
        sizes, distances, box = grad_ring.template_of_rows(g, config)
    assert math.prod(box) * itemsize == config.box_bytes

    table = SLOT + config.words + 8 * grad_ring.CONSUMERS
    fill, prepare = grad_input_wgmma_stage.make_fill(config), grad_input_wgmma_stage.make_prepare(config)
    prepare = getattr(prepare, "py_func", prepare)
    load = grad_input_wgmma_stage.make_operands(config).load
    window_of, begin_tile = grad_input_wgmma_stage.make_lane(config)
    shared.words.clear()
    for thread in range(grad_ring.THREADS):
        fill(table, thread, shear)
    assert len(shared.words) * 4 <= 8 * (config.own_words - grad_ring.CONSUMERS)

    position, cropped = tile * config.rows, max(0, p.padding - p.output_padding)
    count = config.stages_of(p) // splits
    signal = p.out_length if cropped else grad_ring.LONGEST_SIGNAL
    grad_rows, place = SimpleNamespace(shear=shear, length=signal), Tile(sample, group, part, 0, position)
    shape = Shape(first, p.length, p.groups, p.out_channels_per_group // sheared, p.in_channels_per_group)
    told = place, SimpleNamespace(tile_stages=count), shape, grad_rows
    lane_rows, lane_places = 2 * config.blocks, 16 if config.halves else 8

    def begun(consumer):
        window = window_of([0] * lane_rows, [0] * lane_places, [0], *told[2:], SLOT, consumer)
        return begin_tile(window, [0] * lane_rows, [0] * 2 * lane_rows, *told, consumer)

    known = {}
    for crew, warp in itertools.product(range(2), range(4)):
        consumers = [SimpleNamespace(warpgroup=crew, warp=warp, lane=lane) for lane in range(32)]
        shared.reached = 0
        shared.reached = any(begun(consumer).ends.reached for consumer in consumers)
        known |= {(crew, warp, consumer.lane): begun(consumer) for consumer in consumers}
    for s, boxes in enumerate(shared.produced(config, shape, place, count), part * count):
        arrived = {}
        for at, begin in boxes.items():
            brought = enumerate(fetch(memory, itemsize, sizes, distances, box, begin))
            arrived |= {at + e * itemsize: value for e, value in brought}
        assert max(arrived) < SLOT + config.slot
        for crews in ((0,), (1,)) if config.alternate else ((0, 1),):  # those that consume a stage
            shared.elements = dict(arrived)
            for crew, warp, lane in itertools.product(crews, range(4), range(32)):
                prepare(known[crew, warp, lane], 0, 0)
            for (crew, warp), lane in itertools.product(warps, range(32)):
                where = crew, warp, lane
                if crew in crews:
                    check_lane(shared, p, config, load, known[where], where, position, s, sample, group)


def check_lane(shared, p, config, load, lane_knows, where, position, s, sample, group):
    crew, warp, lane = where
    count, halves = 4 * config.blocks, 4 // config.itemsize
    for k in range(grad_ring.PRODUCTS):
        v = [None] * count
        load(k, v, 0, lane_knows, 0)
        for block in range(config.blocks):
            for i in range(4):
                found = v[4 * block + i]
                found = found.both if isinstance(found, Half | Whole) else (found,) * halves
                for h in range(halves):
                    m, e = fragments.wgmma_a(warp, lane, i, h, halves)
                    m += 64 * block + (0 if config.alternate else 64 * config.blocks * crew)
                    if position + m < p.length:
                        wanted = wanted_at(p, config, position + m, s, k * 8 * halves + e, sample, group)
                        assert found[h] == wanted, (where, k, i, h, s, position + m)


def wanted_at(p, config, position, s, e, sample, group):
    """A stage entry's meaning for a position, by definition."""
    channel, tap = divmod(s * config.entries + e, p.kernel_size)
    x = position * p.stride - p.padding + tap * p.dilation
    exists = e < config.entries and channel < p.out_channels_per_group and 0 <= x < p.out_length
    return (sample, group * p.out_channels_per_group + channel, x) if exists else 0


# What each row is for; problem, and every how many rows begin alike.
CASES = {
    "11 taps, cropped, every second row alike": (Problem(2, 16, 24, 11, 300, stride=5, padding=3), 2),
    "10 taps, every eighth row alike": (Problem(1, 16, 24, 10, 140, stride=5), 8),
    "10 taps, output_padding": (Problem(2, 16, 16, 10, 129, stride=5, padding=3, output_padding=1), 2),
    "8 taps, every eighth row alike": (Problem(1, 16, 16, 8, 150, stride=4, padding=2), 8),
    "8 taps, every second row alike": (Problem(1, 16, 16, 8, 150, stride=4, padding=2), 2),
    "4 taps, every fourth row alike": (Problem(2, 16, 32, 4, 260, stride=2, padding=1), 4),
    "16 taps, every fourth row alike: half a set a stage": (Problem(1, 16, 16, 16, 60, stride=8, padding=4), 4),
    "more taps than a stage": (Problem(2, 16, 5, 77, 40, stride=3, padding=11), 1),
    "more taps than bits": (Problem(2, 16, 6, 77, 40, stride=3, padding=11), 2),
    "more taps than bits, dilated": (Problem(1, 16, 4, 70, 50, stride=2, padding=35, dilation=2), 2),
    "as many taps as bits": (Problem(1, 16, 4, 64, 50, stride=4, padding=20), 2),
    "more padding than a tile": (Problem(1, 16, 12, 3, 500, stride=2, padding=300), 2),
    "shorter than its padding": (Problem(2, 16, 40, 7, 9, stride=2, padding=9), 4),
    "groups, stages to their ends": (Problem(1, 32, 64, 10, 70, stride=5, padding=1, groups=2), 1),
    "groups, sheared": (Problem(1, 32, 16, 8, 70, stride=4, padding=1, groups=2), 2),
    "groups, masked": (Problem(1, 32, 24, 6, 70, stride=3, padding=1, groups=2), 2),
    "one tap, many channels to clear": (Problem(1, 16, 128, 1, 140, stride=3, padding=2), 2),
    "fewer entries than a stage": (Problem(1, 16, 4, 5, 70, stride=2, padding=2), 4),
    "dilated": (Problem(1, 16, 30, 9, 133, stride=3, padding=7, dilation=4), 1),
}


def sheared_by(p, precision, sheared):
    return sheared if sheared <= 16 // DTYPES[precision].itemsize and p.out_channels_per_group % sheared == 0 else 1


@every_precision
@pytest.mark.parametrize("reason", thorough(CASES, always=[*[*CASES][::7], "fewer entries than a stage"]))
def test_every_register_holds_what_the_definition_wants(shared, precision, reason):
    p, sheared = CASES[reason]
    rng = random.Random(reason)
    configs = list(grad_input_wgmma_choose.candidates(p, precision, sheared_by(p, precision, sheared)))
    assert configs
    for alternate in (False, True):
        config = rng.choice([config for config in configs if config.alternate == alternate])
        strides = laid_out(p, precision, config.sheared, rng)
        for tile, group in {(0, 0), (-(-p.length // config.rows) - 1, p.groups - 1), (0, p.groups - 1)}:
            check(shared, p, config, strides, tile, [(0, 0), (1, rng.randrange(4))], group)


@every_precision
def test_parts_of_a_tile(shared, precision):
    p, rng = Problem(1, 16, 32, 11, 100, stride=5, padding=3), random.Random(0)
    for config in grad_input_wgmma_choose.candidates(p, precision, 2):
        assert config.stages_of(p) in (6, 11)
        splits = 3 if config.stages_of(p) == 6 else 11
        for part in (0, splits - 1):
            of_part = replace(config, split_k=True)
            check(shared, p, of_part, laid_out(p, precision, 2, rng), 0, [(0, 0)], 0, part, splits)


@every_precision
@pytest.mark.parametrize("seed", thorough(range(40), always=range(2)))
def test_drawn_problems(shared, precision, seed):
    rng = random.Random(seed)
    stride, kernel_size, dilation = rng.randint(1, 9), rng.randint(1, 40), rng.choice([1, 1, 1, 2, 3])
    sheared = rng.choice([1, 1, 2, 4, 8])
    length = rng.choice([1, 17, 128, 130, 257])
    p = (
        Problem(
            *(rng.randint(1, 2), 16, 8 * rng.randint(1, 4), kernel_size, length),
            stride=stride,
            padding=rng.choice([0, 0, 1, 2, 3, 5, 11]),
            output_padding=rng.randrange(stride),
            dilation=dilation,
        )
        if length * stride > 25
        else Problem(1, 16, 8, kernel_size + 24, length, stride=stride, padding=11)
    )
    configs = list(grad_input_wgmma_choose.candidates(p, precision, sheared_by(p, precision, sheared)))
    if not configs:
        pytest.skip("no tile")
    config = rng.choice(configs)
    tile = rng.randrange(-(-p.length // config.rows))
    check(shared, p, config, laid_out(p, precision, config.sheared, rng), tile, [(0, 0), (1, rng.randrange(4))])


def all_configs(precision):
    for workload, sheared in itertools.product(workloads.WORKLOADS.values(), (1, 2, 4, 8)):
        if sheared <= 16 // DTYPES[precision].itemsize:
            found = grad_input_wgmma_choose.candidates(workload.problem, precision, sheared)
            yield from ((workload.problem, config) for config in found)


@every_precision
def test_phases_return(precision):
    """Every stage's windows hold its channels, and the table their places, in any phase; phases return."""
    for p, config in all_configs(precision):
        functions = grad_input_wgmma_stage.make_advance(config), grad_input_wgmma_stage.make_start(config)
        advance, start = (getattr(function, "py_func", function) for function in functions)
        row = phase = 0
        for s in range(min(config.stages_of(p), 1000)):
            entry = s * config.entries
            assert tuple(map(int, start(s))) == (row, phase)
            assert phase == (entry - row * config.sheared * p.kernel_size if config.through else 0)
            if config.through:
                assert 0 <= phase < config.period
                assert phase in config.phases
                assert phase + config.entries <= config.table_entries
                last = min(phase + config.entries, 1 << 30) - 1
                assert last // p.kernel_size < config.g_channels
            else:
                assert row * config.sheared == s * config.g_channels
            row, phase = map(int, advance(row, phase))


@every_precision
def test_boxes_are_wide_enough_for_any_shear(precision):
    for _, config in all_configs(precision):
        vector = 16 // config.itemsize
        shears = [
            z
            for z in range(vector)
            if z * config.sheared % vector == 0
            and (config.sheared == 1 or math.gcd(z, vector) * config.sheared == vector)
        ]
        needed = config.reach + vector - 1 + (config.sheared - 1) * max(shears)
        assert needed <= config.width <= 256
        assert config.g_channels % config.sheared == 0


@every_precision
def test_lanes_meet_in_few_banks(precision):
    """A warp's load takes little more than two accesses on average."""
    for name in ("seamless_u1", "xcodec_u1", "encodec_u2"):
        for sheared in (1, 2, 4):
            config = grad_input_wgmma_choose.choose(workloads.get(name).problem, precision, sheared)
            loads = 4 * config.blocks * (2 if config.halves else 1)
            assert config.through
            assert grad_input_wgmma_choose.load_clocks(config) <= 2.2 * loads, (name, sheared)
