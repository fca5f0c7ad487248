"""Counters that outlast a call: whose memory they are."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from numba_tconv.kernels.streaming import tickets


@pytest.fixture
def made(monkeypatch):
    """A GPU in pretence; the number of each tensor of counters with the thread that made it."""
    made, zeros = [], torch.zeros

    def counted(count, **_):
        made.append((count, threading.get_ident()))
        return zeros(count, dtype=torch.int32)

    monkeypatch.setattr(torch, "zeros", counted)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    for name, empty in (("_of_stream", {}), ("_of_graphs", {}), ("_outgrown", [])):
        monkeypatch.setattr(tickets, name, empty)
    return made


def test_no_pool_of_the_caller_holds_them(made):
    """torch.compile lends a pool to the thread or stream that it warms up."""
    with torch.inference_mode():
        counters = tickets.take(5, 0)
    assert not counters.is_inference()
    assert [count for count, _ in made] == [tickets.MOST, tickets.LEAST]
    assert threading.get_ident() not in {thread for _, thread in made}
    assert tickets.take(tickets.LEAST, 0) is counters
    assert torch.cuda.current_stream().synchronize.call_count == 2


def test_counters_that_a_launch_may_still_use_are_kept(made):
    few = tickets.take(1, 0)
    many = tickets.take(tickets.LEAST + 1, 0)
    assert len(many) == tickets.LEAST + 1
    assert tickets.take(1, 0) is many
    assert tickets._outgrown == [few]


def test_threads_that_share_a_stream_share_its_first_counters(made, monkeypatch):
    """Counters in no list would be freed while a launch uses them."""
    both, lasting = threading.Barrier(2), tickets._lasting
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: (both.wait(), 7)[1])
    monkeypatch.setattr(tickets, "_lasting", lambda *sizes: time.sleep(0.1) or lasting(*sizes))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(tickets.take, [1, 1], [0, 0])
    assert first is second
    assert [count for count, _ in made] == [tickets.MOST, tickets.LEAST]


def test_captured_launches_share_no_counters(made, monkeypatch):
    """A graph has its own, and where all are taken, tensors of its own."""
    tickets.take(1, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    most = tickets.MOST - 1
    first, second = tickets.take(3, 0), tickets.take(most - 3, 0)
    assert (len(first), len(second)) == (3, most - 3)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    beyond = tickets.take(2, 0)
    assert len(beyond) == 2
    assert made[-1] == (2, threading.get_ident())
    assert len(tickets.take(1, 0)) == 1
    assert len(made) == 3
