"""What runs beside the gradients on tensor cores: planes of grad_output, and grad_weight's second stage."""

import threading
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from numba_tconv.formula.problem import Problem
from numba_tconv.gradients import planes, planes_transposed
from numba_tconv.gradients.weight.wgmma import sum as grad_weight_sum
from numba_tconv.gradients.weight.wgmma.tile import Config, Window
from tests.gradient_parity import gradient_operands
from tests.gradients.test_grad_tensor import planes_by_definition
from tests.parity import LAYOUTS, SMALL, far_apart
from tests.thorough import thorough

FEW = [
    "K = 2s, the usual decoder layer",
    "K < s, phases without taps",
    "gcd(stride, dilation) = 2, three rows",
    "groups, unequal channels",
]


TILE = {name: getattr(planes_transposed, name) for name in ("COLUMNS", "SQUARES")}


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setattr(planes, "THREADS", 4)
    for name, number in (("CHANNELS", 8), ("THREADS", 32)):
        monkeypatch.setattr(grad_weight_sum, name, number)
    for name, number in (("COLUMNS", 16), ("SQUARES", 2)):
        monkeypatch.setattr(planes_transposed, name, number)
    for module in (planes, planes_transposed, grad_weight_sum):
        module.make_kernel.cache_clear()
    yield
    for module in (planes, planes_transposed, grad_weight_sum):
        module.make_kernel.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reason", FEW)
def test_planes(dtype, reason):
    g, _, _ = gradient_operands(SMALL[reason], dtype)
    result = planes.make_planes(g, SMALL[reason])
    assert all(distance * dtype.itemsize % 16 == 0 for distance in result.stride()[:2])
    assert torch.equal(result, planes_by_definition(g, SMALL[reason]))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_planes_of_any_strides(layout):
    g, _, _ = gradient_operands(SMALL[FEW[0]], torch.float32, layout=layout)
    assert torch.equal(planes.make_planes(g, SMALL[FEW[0]]), planes_by_definition(g, SMALL[FEW[0]]))


LONG = {
    "no phases to spare, several blocks": Problem(2, 3, 2, 64, 9, stride=32),
    "padding of whole vectors": Problem(1, 3, 2, 48, 7, stride=24, padding=8),
    "phases without taps, a square of few phases": Problem(1, 3, 2, 19, 5, stride=24, output_padding=5),
    "rows that begin unlike": Problem(2, 3, 2, 140, 9, stride=70, padding=3),
    "rows that begin alike, a stride that does not": Problem(1, 3, 2, 36, 12, stride=36, output_padding=4),
    "an end within a vector": Problem(1, 3, 1, 48, 18, stride=24, output_padding=3),
    "dilation": Problem(1, 2, 1, 20, 40, stride=41, dilation=3, padding=50),
    "dilation, a stride of whole vectors": Problem(1, 2, 1, 36, 5, stride=32, dilation=3),
    "the fewest phases that are turned": Problem(1, 3, 2, 17, 3, stride=17),
}
BY_VECTORS = list(LONG)[:3]  # all of them, if the tensor itself is aligned
long_strides = pytest.mark.parametrize("reason", LONG)
every_dtype = pytest.mark.parametrize(
    "dtype",
    thorough([torch.float32, torch.float16, torch.bfloat16], always=[torch.float32, torch.bfloat16]),
    ids=str,
)


@dataclass(frozen=True)
class Vector:
    """A load or store of 16 bytes."""

    name: str
    shared: bool  # memory
    index: int  # in vectors
    block: tuple
    thread: int


@pytest.fixture
def vectors(monkeypatch):
    """Vector loads and stores for long strides, each aligned."""
    calls = []

    def recorded(name, position):
        meaning = getattr(planes_transposed, name)

        def call(*arguments):
            array, index = arguments[position : position + 2]
            assert 0 <= index <= array.size - 16 // array.itemsize
            assert (array.ctypes.data + int(index) * array.itemsize) % 16 == 0
            thread, shared = threading.current_thread(), isinstance(array, np.ndarray)
            at = int(index) * array.itemsize // 16
            calls.append(Vector(name, shared, at, tuple(thread.blockIdx), thread.threadIdx.x))
            meaning(*arguments)

        monkeypatch.setattr(planes_transposed, name, call)

    recorded("load_vector", 2)
    recorded("store_vector", 0)
    return calls


def loads(vectors):
    """grad_output's vectors."""
    return sum(v.name == "load_vector" and not v.shared for v in vectors)


def stored(vectors):
    """Where in the planes."""
    return sorted(v.index for v in vectors if v.name == "store_vector" and not v.shared)


@every_dtype
@long_strides
def test_planes_of_long_strides(dtype, reason, vectors):
    problem = LONG[reason]
    config = planes.make_config(problem, dtype)
    assert config.transposed
    vector = 16 // dtype.itemsize
    for layout in LAYOUTS if dtype != torch.float16 else ["contiguous"]:
        vectors.clear()
        g, _, _ = gradient_operands(problem, dtype, layout=layout)
        result = planes.make_planes(g, problem)
        assert torch.equal(result, planes_by_definition(g, problem))
        rows = problem.batch * problem.out_channels
        in_planes = rows * config.phases * (result.stride(1) // vector)
        assert stored(vectors) == list(range(in_planes))
        if not loads(vectors):  # single elements, of phases that there are
            assert sum(v.name == "store_vector" and v.shared for v in vectors) == in_planes
        if reason in BY_VECTORS:
            square_phases = -(-config.phases // vector) * vector
            inside = sum(
                0 <= j * problem.stride + a - problem.padding < problem.out_length
                for j in range(result.stride(1))
                for a in range(0, square_phases, vector)
            )
            assert loads(vectors) == (rows * inside if layout in ("contiguous", "expanded") else 0)


@every_dtype
@pytest.mark.parametrize("output_padding", [0, 6])
def test_squares_away_from_the_ends_are_loaded_in_vectors(dtype, output_padding, vectors):
    """Columns begin at multiples of 16 bytes, grad_output does not, with and without whole vectors."""
    problem = Problem(1, 3, 1, 48, 26, stride=24, padding=3, output_padding=output_padding)
    vector = 16 // dtype.itemsize
    assert (problem.out_length % vector == 0) == (output_padding > 0)
    storage = torch.randn(problem.out_length + vector).to(dtype)
    first = problem.padding % vector
    g = storage[first : first + problem.out_length].view(1, 1, -1)
    assert torch.equal(planes.make_planes(g, problem), planes_by_definition(g, problem))
    squares = [(j, a) for j in range(0, planes.columns_of(problem), vector) for a in range(0, 24, vector)]
    within = [j * 24 + a >= 3 and (j + vector - 1) * 24 + a + vector <= problem.out_length + 3 for j, a in squares]
    assert 0 < sum(within) < len(squares)
    assert loads(vectors) == sum(within) * vector


def test_long_strides_of_samples_far_apart_and_more_rows_than_a_grid_has(monkeypatch):
    monkeypatch.setattr("numba_tconv.kernels.common.arguments.GRID_AXIS", 4)
    for problem in (Problem(2, 3, 3, 20, 9, stride=24), Problem(1, 3, 5, 19, 7, stride=24, padding=8)):
        g, _, _ = gradient_operands(problem, torch.bfloat16)
        assert torch.equal(planes.make_planes(far_apart(g), problem), planes_by_definition(g, problem))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", thorough([1, 2, 3, 9, 12, 17, 25], always=[1, 3, 17]), ids="{} vectors".format)
def test_squares_meet_in_shared_memory_without_conflicts(dtype, count, vectors, monkeypatch):
    """Eight neighbours access 16 bytes each, all banks; what they store to the planes is adjacent."""
    for name, number in TILE.items():
        monkeypatch.setattr(planes_transposed, name, number)
    vector, phases = 16 // dtype.itemsize, 72
    g = torch.randn(1, 1, count * vector * phases).to(dtype)
    problem = Problem(1, 1, 1, phases, count * vector, stride=phases)
    assert torch.equal(planes.make_planes(g, problem), planes_by_definition(g, problem))
    kernel = planes.make_kernel(planes.make_config(problem, dtype))
    assert kernel.threads * vector == TILE["COLUMNS"] * TILE["SQUARES"]
    tiles = -(-count * vector // TILE["COLUMNS"])
    width = -(-count // tiles)
    width += width % 2
    of_thread, of_block = defaultdict(list), defaultdict(list)
    for v in vectors:
        of_thread[v.block, v.thread, v.name, v.shared].append(v.index)
    at_once = defaultdict(list)
    for (block, thread, name, shared), indices in of_thread.items():
        for turn, index in enumerate(indices):
            if shared:
                at_once[block, thread // 8, name, turn].append(index)
            elif name == "store_vector":
                of_block[block].append((turn, thread, index))
    assert all(len({index % 8 for index in indices}) == len(indices) for indices in at_once.values())
    strips = -(-phases // (TILE["SQUARES"] * vector))
    assert len(of_block) == strips * tiles
    for (x, _, _), stores in of_block.items():
        tile, strip = divmod(x, strips)
        own_phases = range(phases)[strip * TILE["SQUARES"] * vector :][: TILE["SQUARES"] * vector]
        own_columns = range(count)[tile * width :][:width]
        assert [index for *_, index in sorted(stores)] == [a * count + k for a in own_phases for k in own_columns]


def workspace(weight, problem, config, splits):
    """Sums as the first stage leaves them, which add up to ``weight``; NaN where none may be read."""
    p, phases = problem, config.phases_of(problem)
    taps, pair_tiles, channel_tiles = config.tiles_of(p)
    tiles = (splits, p.groups, taps, pair_tiles, channel_tiles, config.tap_chunk, config.rows, config.channels)
    partials = torch.full(tiles, torch.nan)
    for ci in range(p.in_channels):
        group, channel = divmod(ci, p.in_channels_per_group)
        for co in range(p.out_channels_per_group):
            for k in range(p.kernel_size):
                pair, b = co * phases + k % phases, k // phases
                place = (b // config.tap_chunk, pair // config.pairs, channel // config.channels)
                inside = (b % config.tap_chunk, pair % config.pairs, channel % config.channels)
                parts = torch.randn(splits)
                parts[0] += weight[ci, co, k] - parts.sum()
                partials[(slice(None), group, *place, *inside)] = parts
    return partials.flatten()


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 9, 5, 5, 8, stride=2),
        Problem(1, 12, 6, 7, 8, stride=3, groups=3),
        Problem(1, 3, 4, 2, 8, stride=5),
        Problem(1, 37, 4, 5, 8, stride=2),
    ],
    ids=["taps of unequal rows", "groups", "K < stride", "more channels than a block's"],
)
@pytest.mark.parametrize(
    ("splits", "aligned", "channels"),
    thorough(
        [(*some, c) for some in ((1, False), (11, False), (11, True)) for c in (1, grad_weight_sum.VECTOR)],
        always=[(1, False, grad_weight_sum.VECTOR), (11, False, 1), (11, True, grad_weight_sum.VECTOR)],
    ),
)
def test_the_second_stage_adds_up_splits_in_the_order_of_the_weight(problem, splits, aligned, channels, monkeypatch):
    own = replace(grad_weight_sum.config_of(problem, torch.float32, aligned), channels=channels)
    row = problem.out_channels_per_group * problem.kernel_size
    assert own.run == (4 if aligned and row % 4 == 0 else 1)
    phases = min(problem.taps.rows, problem.kernel_size)
    window = Window(problem.stride, problem.dilation, phases, problem.taps.step, False)
    config = Config("tf32", window, 1, 0, 1, 1, 8, False)
    # A tile of four channels' pairs, padded to five more rows than it uses.
    monkeypatch.setattr(Config, "rows", property(lambda c: 4 * c.window.phases + 5))
    monkeypatch.setattr(Config, "g_channels", property(lambda c: 4))
    weight = torch.randn(problem.weight_shape)
    by_taps = replace(config, window=replace(window, phases=problem.kernel_size), by_taps=True)
    for tile in (config, replace(config, tap_chunk=2), by_taps):
        result = torch.full_like(weight, torch.nan)
        grad_weight_sum.prepare(problem, tile, splits, own)(workspace(weight, problem, tile, splits), result)
        torch.testing.assert_close(result, weight, atol=1e-5, rtol=1e-5)
