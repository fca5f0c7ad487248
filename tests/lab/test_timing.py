"""The order of what is timed, with stand-ins for a GPU."""

import gc
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.lab.measure import bench, timing
from numba_tconv.lab.studies import kernelbench, streaming


@pytest.fixture
def done(monkeypatch):
    """What is done, in order; an event's time is the number of things done before it."""
    found = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(found)
            found.append("event")

        def elapsed_time(self, stop):
            return float(stop.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("wait"))
    return found


def test_a_call_is_between_two_events_after_its_preparation_and_the_flush(done):
    one = timing.Contestant(lambda: done.append("call") or one.output, lambda: done.append("prepare"), output="old")
    for turn in (1, 2):
        timing.timed_call(one, lambda: done.append("flush"))
        assert done == turn * ["prepare", "flush", "event", "call", "event"]
        assert one.output is None, "the old output's memory is free"
        assert one.times() == turn * [2.0]


def test_a_flush_sums_eight_times_the_cache(monkeypatch):
    zeros, sums, summed = torch.zeros, torch.sum, []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(L2_cache_size=4096))
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    monkeypatch.setattr(torch, "sum", lambda of, dim, out: summed.append((of.nbytes, dim)) or sums(of, dim, out=out))
    timing.Flush(3)()
    assert summed == 3 * [(8 * 4096, 0)]


@pytest.mark.parametrize(
    ("ms", "budget_s", "rounds"),
    [
        (1.0, 1.0, 12),
        (100.0, 1.0, 12),
        (110.0, 1.0, 12),
        (200.0, 1.0, 6),
        (1e4, 1.0, 6),
        (0.0, 1.0, 12),
        (1e4, math.inf, 12),
    ],
)
def test_contestants_are_warmed_up_and_take_turns(monkeypatch, done, ms, budget_s, rounds):
    made, first = [], []

    def timed_call(contestant, flush):
        assert flush == "flush 7"
        contestant.events.append(contestant)
        done.append(contestant.name)

    monkeypatch.setattr(timing, "Flush", lambda times: f"flush {times}")
    monkeypatch.setattr(timing, "timed_call", timed_call)
    monkeypatch.setattr(timing.Contestant, "times", lambda self: [self.ms])
    monkeypatch.setattr(timing, "progress", lambda items, label: made.append(label) or items)
    for name, own in (("slow", ms), ("fast", 0.5)):
        first.append(timing.Contestant(call=None))
        first[-1].name, first[-1].ms = name, own
    timing.interleave(first, 12, budget_s, "here", flushes=7)
    assert made == ["here: compile and warm up", "here: timed rounds"]
    warm = ["slow", "slow", "wait", "fast", "fast", "wait"]
    assert done[:9] == [*warm, "slow", "fast", "wait"]
    assert [len(one.events) for one in first] == [rounds, 12]
    assert done.count("wait") == 2 + 12


def test_quantiles_are_between_the_times():
    times = [4.0, 1.0, 2.0, 3.0]
    assert [timing.quantile(times, share) for share in (0.0, 0.5, 0.8)] == [1.0, 2.5, pytest.approx(3.4)]


def test_a_call_is_captured_after_two_others(monkeypatch, done):
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "another")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: done.append(stream) or nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: done.append(graph) or nullcontext())
    assert timing.captured(lambda: done.append("call") or len(done)) == ("graph", 7)
    assert done == ["wait", "another", "call", "call", "wait", "graph", "call"]


def test_wall_times_are_medians_and_leave_out_the_first_calls(monkeypatch):
    """Each call takes its own seconds, the first two rounds longer."""
    now, rounds = [0.0], {"one": iter((50.0, 60.0, 1.0, 4.0, 2.0)), "two": iter((70.0, 80.0, 8.0, 9.0, 11.0))}
    collecting = []

    def call(name):
        now[0] += next(rounds[name])
        collecting.append(gc.isenabled())

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert timing.wall_times([lambda: call("one"), lambda: call("two")], 3) == [2000.0, 9000.0]
    assert not any(collecting)
    assert gc.isenabled()
    with pytest.raises(StopIteration):
        timing.wall_times([lambda: call("one")], 1)
    assert gc.isenabled()


def test_the_copy_moves_at_most_an_eighth_of_free_memory(monkeypatch):
    ones, empty = torch.ones, torch.empty
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    monkeypatch.setattr(torch, "empty", lambda size, device: empty(size))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 * 4096, 10**9))
    copied = bench._copy().call()
    assert (copied.nbytes, copied.sum()) == (4096, 1024)
    monkeypatch.setattr(bench, "COPY_BYTES", 2048)
    assert bench._copy().call().nbytes == 2048


def test_kernelbench_takes_the_mean_of_calls_on_a_cold_cache(monkeypatch, done):
    class Buffer:
        def fill_(self, value):
            done.append(f"flush {value}")

    def empty(size, dtype, device):
        assert (size * dtype.itemsize, device) == (256 << 20, "cuda")
        return Buffer()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(kernelbench, "TIMED_TRIALS", 2)
    lengths = iter((1, 1, 1, 1, 3))
    assert kernelbench.mean_ms(lambda x: done.extend(x * next(lengths)), ["call"]) == 3.0
    timed = ["flush 42", "wait", "event", "call", "event", "wait"]
    assert done == ["call"] * 3 + timed + [*timed[:3], *["call"] * 3, *timed[4:]]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_step_is_timed_among_twenty(monkeypatch, mode):
    asked, runs = [], []

    def interleave(contestants, *how, flushes):
        asked.append((*how, flushes))
        for ms, one in enumerate(contestants, 1):
            assert one.prepare is torch.cuda.synchronize
            one.call()
            one.events = [(SimpleNamespace(elapsed_time=lambda _, ms=ms * n: ms), None) for n in (1, 2, 6)]

    monkeypatch.setattr(streaming, "interleave", interleave)
    monkeypatch.setattr(streaming, "captured", lambda call: (SimpleNamespace(replay=call), None))
    calls = [streaming._many(lambda: runs.append("ours")), streaming._many(lambda: runs.append("by hand"))]
    assert streaming.microseconds(calls, mode, 5, "layer") == [100.0, 200.0]
    assert asked == [(5, math.inf, f"layer {mode}", 0)]
    assert runs == ["ours"] * 20 + ["by hand"] * 20
