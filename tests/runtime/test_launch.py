"""What launching does before it reaches the GPU."""

import contextlib
import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from cuda.bindings import driver
from numba import types

from numba_tconv.lab.measure import machine
from numba_tconv.ptx import griddepcontrol_launch_dependents, griddepcontrol_wait
from numba_tconv.runtime import kernel as launch
from numba_tconv.runtime import ready
from numba_tconv.runtime.kernel import GIVEN, Kernel, alike, flat, named, strided


@pytest.fixture(autouse=True)
def capturing(monkeypatch):
    """Says whether a CUDA graph is captured, which torch without CUDA does not."""
    state = {"now": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["now"])
    return state


def test_threads_wait_for_one_compilation(monkeypatch):
    loads, threads = [], 8
    together = threading.Barrier(threads)

    def load(kernel, device, shared_bytes):
        loads.append((device, shared_bytes))
        time.sleep(0.05)  # long enough for every thread to ask
        return f"loaded on {device}"

    def ask(device):
        together.wait()
        return kernel.handle(device, shared_bytes=0)

    monkeypatch.setattr(Kernel, "_load", load)
    kernel = Kernel("kernel", lambda: None, (), threads=32)
    with ThreadPoolExecutor(threads) as pool:
        handles = list(pool.map(ask, [0, 1] * (threads // 2)))
    assert handles == ["loaded on 0", "loaded on 1"] * (threads // 2)
    assert sorted(loads) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("enabled", [False, True])
def test_a_compilation_leaves_garbage_collection_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with launch._no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_more_shared_memory_is_asked_for_and_less_is_not(monkeypatch):
    loads = []
    monkeypatch.setattr(Kernel, "_load", lambda kernel, device, shared_bytes: loads.append(shared_bytes))
    kernel = Kernel("kernel", lambda: None, (), threads=32)
    for shared_bytes in (100, 50, 200, 100):
        kernel.handle(0, shared_bytes)
    assert loads == [100, 200]


def test_nothing_is_compiled_or_loaded_while_a_graph_is_captured(monkeypatch, capturing):
    monkeypatch.setattr(Kernel, "_load", lambda kernel, device, shared_bytes: f"loaded with {shared_bytes}")
    kernel = Kernel("kernel", lambda: None, (), threads=32)
    capturing["now"] = True
    refused = pytest.raises(
        RuntimeError, match=r"kernel is not compiled and loaded yet.* run what is to be captured once"
    )
    with refused:
        kernel.handle(0, 100)
    capturing["now"] = False
    kernel.handle(0, 100)
    capturing["now"] = True
    assert kernel.handle(0, 50) == "loaded with 100"
    for device, shared_bytes in ((0, 200), (1, 100)):
        with refused:
            kernel.handle(device, shared_bytes)


@pytest.mark.parametrize("shared_bytes", [0, 1000, 100_000])
def test_dynamic_shared_memory_is_allowed_however_little(monkeypatch, shared_bytes):
    """Beside a kernel's static memory, little may exceed what it gets without asking."""
    allowed = []

    class Driver:
        CUfunction_attribute = launch.driver.CUfunction_attribute
        cuModuleLoadData = staticmethod(lambda ptx: (0, "module"))
        cuModuleGetFunction = staticmethod(lambda module, name: (0, 11 if name == b"name" else 0))
        cuFuncSetAttribute = staticmethod(lambda *arguments: allowed.append(arguments) or (0,))

    monkeypatch.setattr(launch, "driver", Driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Kernel, "ptx", lambda kernel, cc: ".visible .entry name(")
    Kernel("kernel", lambda: None, (), threads=32).handle(0, shared_bytes)
    attribute = launch.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert allowed == ([(11, attribute, shared_bytes)] if shared_bytes else [])


def slots_of(kernel, *arguments):
    return list(kernel.prepare(1, *arguments).slots)


def test_arguments_are_laid_out_as_numba_reads_them():
    """An array: no owner, no owner, elements, bytes of one, address, shape, strides in bytes."""
    x = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    every_other, pair = x[:, ::2, 1:], types.UniTuple(types.int64, 2)
    kernel = Kernel("kernel", lambda: None, (flat(types.float32), types.int64, pair, strided(types.float32, 3)), 32)
    address = every_other.data_ptr()
    assert slots_of(kernel, x, -7, (8, 9), every_other) == [
        *(0, 0, 24, 4, x.data_ptr(), 24, 4),
        *(-7, 8, 9),
        *(0, 0, 12, 4, address, 2, 2, 3, 48, 32, 4),
    ]
    # A flat argument is the memory from its first element to its last.
    in_memory = Kernel("kernel", lambda: None, (flat(types.float32),), 32)
    assert slots_of(in_memory, every_other) == [0, 0, 23, 4, address, 23, 4]
    assert slots_of(in_memory, x[:1].expand(5, 3, 4)) == [0, 0, 12, 4, x.data_ptr(), 12, 4]


def test_the_commit_of_a_copy_is_the_one_it_is_told(monkeypatch):
    monkeypatch.setenv("NUMBA_TCONV_COMMIT", "abc1234")
    assert machine._commit() == "abc1234"
    monkeypatch.delenv("NUMBA_TCONV_COMMIT")
    monkeypatch.setattr(machine, "_output_of", lambda *command: {"rev-parse": "def5678", "status": " M a"}[command[1]])
    assert machine._commit() == "def5678+"
    monkeypatch.setenv("NUMBA_TCONV_COMMIT", "")
    assert machine._commit() == "def5678+"


def layouts():
    """A kernel with every form of argument, and two sets of arguments laid out alike."""
    pair = types.UniTuple(types.int64, 2)
    signal = named(Signal, data=strided(types.float32, 3), length=types.int64, steps=pair)
    kernel = Kernel("kernel", lambda: None, (flat(types.float32), types.int64, pair, signal, types.int64), 32)
    sets = []
    for number in (5, 2**62):
        x = torch.randn(2, 3, 4)
        sets.append((x, number, (8, -9), Signal(x[:, ::2, 1:], number, (1, 2)), True))
    return kernel, sets


class Signal(NamedTuple):
    data: object
    length: int
    steps: tuple


def test_fields_of_a_named_tuple_follow_each_other():
    x = torch.randn(2, 3)
    signal = named(Signal, data=flat(types.float32), length=types.int64, steps=types.UniTuple(types.int64, 2))
    kernel = Kernel("kernel", lambda: None, (types.int64, signal), 32)
    assert slots_of(kernel, 7, Signal(x, 6, (1, -2))) == [7, 0, 0, 6, 4, x.data_ptr(), 6, 4, 6, 1, -2]


HANDLE = Kernel.handle


@pytest.fixture
def launches(monkeypatch):
    """What the driver was given: the grid, the shared memory, the stream, and the slots that it read."""
    seen, local = [], threading.local()

    def launch_kernel(config, handle, addresses, extra):
        first_attribute = ctypes.c_void_p.from_address(config + 40).value  # by cuda.h; the bindings do not read it
        config = driver.CUlaunchConfig(config)
        pointers = (ctypes.c_int64 * local.slots).from_address(addresses)
        time.sleep(0.002)  # in which other threads launch
        slots = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        grid, block = ([getattr(config, f"{of}Dim{axis}") for axis in "XYZ"] for of in ("grid", "block"))
        assert block[1:] == [1, 1]
        found = [driver.CUlaunchAttribute(first_attribute + 72 * n) for n in range(config.numAttrs)]
        local.attributes = [(one.id, one.value.programmaticStreamSerializationAllowed) for one in found]
        seen.append((handle, tuple(grid), block[0], config.sharedMemBytes, int(config.hStream), slots))
        return 0

    monkeypatch.setattr(launch, "launch_kernel", lambda: launch_kernel)
    monkeypatch.setattr(launch, "enter_context", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    monkeypatch.setattr(Kernel, "handle", lambda kernel, device, shared_bytes: f"on {device}")
    return SimpleNamespace(
        seen=seen, expect=lambda count: setattr(local, "slots", count), attributes=lambda: local.attributes
    )


def test_a_prepared_launch_is_that_of_the_tensors_that_it_is_given(launches):
    kernel, sets = layouts()
    x, _, pair, (part, _, steps), last = sets[0]
    like = (
        alike(x.shape, x.dtype),
        GIVEN,
        pair,
        Signal(alike(part.shape, part.dtype, part.stride()), GIVEN, steps),
        last,
    )
    prepared = kernel.prepare((7, 8, 9), *like, shared_bytes=100)
    for arguments in sets:
        slots = slots_of(kernel, *arguments)
        launches.expect(len(slots))
        kernel.launch((7, 8, 9), *arguments, shared_bytes=100)
        x, number, _, (part, length, _), _ = arguments
        prepared(x, number, part, length)
        assert launches.seen[-2:] == [("on 3", (7, 8, 9), 32, 100, 73, slots)] * 2
    with pytest.raises(ValueError, match="left open"):
        prepared(x, number, part)
    assert kernel.prepare(4, *like).grid == (4, 1, 1)


def test_a_launch_loads_what_is_not_loaded_yet(launches, monkeypatch):
    """On each GPU, and again for more shared memory."""
    loads, gpu = [], {"current": 3}
    monkeypatch.setattr(Kernel, "handle", HANDLE)
    monkeypatch.setattr(Kernel, "_load", lambda kernel, *what: loads.append(what) or f"load {len(loads)}")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: gpu["current"])
    launches.expect(1)
    kernel = Kernel("kernel", lambda: None, (types.int64,), 32)
    for gpu["current"], shared_bytes in ((3, 0), (3, 0), (3, 200), (3, 100), (4, 100), (3, 200)):
        kernel.prepare(1, GIVEN, shared_bytes=shared_bytes)(7)
    assert loads == [(3, 0), (3, 200), (4, 100)]
    assert [handle for handle, *_ in launches.seen] == [f"load {n}" for n in (1, 1, 2, 2, 3, 2)]


def test_an_early_launch_does_not_wait_for_the_kernel_before_it(launches, monkeypatch):
    prepared = Kernel("kernel", lambda: None, (types.int64,) * 3, 32).prepare((4, 5, 6), 9, GIVEN, 7, early=True)
    launches.expect(3)
    prepared(1)
    early = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert launches.attributes() == [(early, 1)]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 80)  # on another stream the same one
    prepared(2)
    same = "on 3", (4, 5, 6), 32, 0
    assert launches.seen == [(*same, 73, [9, 1, 7]), (*same, 80, [9, 2, 7])]
    prepared.ordinary(1)
    assert launches.attributes() == []


def test_an_early_launch_can_be_made_an_ordinary_one(launches):
    """With the same grid, shared memory and arguments; one that is not early is itself."""
    early = Kernel("kernel", lambda: None, (types.int64,) * 2, 32).prepare(
        (4, 5, 6), 9, GIVEN, shared_bytes=8, early=True
    )
    launches.expect(2)
    early.ordinary(7)
    assert launches.seen == [("on 3", (4, 5, 6), 32, 8, 73, [9, 7])]
    assert early.ordinary is early.ordinary.ordinary


def test_instructions_of_early_launches_are_left_out_for_gpus_without_them():
    def waiting(numbers):
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        numbers[0] = 1

    kernel = Kernel("waiting", waiting, (flat(types.int64),), 32)
    for cc, count in (((8, 0), 0), ((8, 9), 0), ((9, 0, "a"), 2), ((10, 0), 2)):
        ptx = kernel.ptx(cc)
        assert ptx.count("griddepcontrol.") == count
        assert "st.global" in ptx or "st.b64" in ptx


def test_threads_do_not_share_the_arguments_of_a_launch(launches):
    threads, together = 8, threading.Barrier(8)
    kernel = Kernel("kernel", lambda: None, (types.int64,) * 3, 32)
    prepared = kernel.prepare(1, GIVEN, 7, GIVEN)

    def work(thread):
        launches.expect(3)
        together.wait()
        for turn in range(10):
            prepared(thread, turn)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    found = sorted(slots for *_, slots in launches.seen)
    assert found == [[thread, 7, turn] for thread in range(threads) for turn in range(10)]


def test_a_failed_launch_is_an_error(launches, monkeypatch):
    refused = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(launch, "launch_kernel", lambda: lambda *_: int(refused))
    monkeypatch.setattr(launch.driver, "cuGetErrorString", lambda _: (0, b"invalid argument"))
    with pytest.raises(RuntimeError, match=r"invalid argument \(CUDA_ERROR_INVALID_VALUE\)"):
        Kernel("kernel", lambda: None, (types.int64,), 32).launch(1, 5)


def test_a_prepared_launch_is_made_again_after_one_that_failed(launches):
    prepared = Kernel("kernel", lambda: None, (types.int64,) * 3, 32).prepare(1, GIVEN, 7, GIVEN)
    launches.expect(3)
    with pytest.raises(AttributeError):
        prepared(1, "no tensor")
    prepared(3, 4)
    (kept,) = prepared._idle
    prepared(5, 6)
    assert prepared._idle == [kept]
    assert [slots for *_, slots in launches.seen] == [[3, 7, 4], [5, 7, 6]]


@pytest.mark.parametrize("index", [-1, 0, 1])
def test_a_gpu_is_made_the_current_one_where_it_is_not(monkeypatch, index):
    current, steps = [0], []

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    def noted(what, result=None):
        steps.append((what, current[0]))
        return result

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(ready, "room", lambda *_: lambda: noted("allocated", "result"))
    filled = ready.Ready((2, 3), torch.float32, index, lambda *tensors: noted(tensors))
    assert filled("x", None) == "result"
    there = max(index, 0)
    assert steps == [("allocated", there), (("x", None, "result"), there)]
    assert current == [0]


@pytest.mark.parametrize("current", [0, 7])
def test_a_thread_enters_torchs_context_once_and_only_if_it_has_none(monkeypatch, current):
    asked, fine = [], driver.CUresult.CUDA_SUCCESS
    fake = SimpleNamespace(
        CUdevice=lambda device: ("device", device),
        cuCtxGetCurrent=lambda: (fine, current),
        cuDevicePrimaryCtxRetain=lambda device: (fine, ("context of", device)),
        cuCtxSetCurrent=lambda context: asked.append(context) or (fine,),
    )
    monkeypatch.setattr(launch, "driver", fake)
    monkeypatch.setattr(launch, "_thread", launch._Thread())
    for _ in range(2):
        launch.enter_context(3)
        assert launch._thread.has_context
        assert asked == ([] if current else [("context of", ("device", 3))])
    fake.cuCtxGetCurrent = lambda: pytest.fail("asked again")
    launch.enter_context(3)


def test_a_capture_forbids_again_what_it_did_before(monkeypatch):
    """Also after an exception."""
    modes, fine = ["global"], driver.CUresult.CUDA_SUCCESS

    def exchange(mode):
        modes.append(mode)
        return fine, modes[-2]

    monkeypatch.setattr(launch.driver, "cuThreadExchangeStreamCaptureMode", exchange)
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def interrupted():
        with launch.capture_ignored():
            assert modes == ["global", relaxed]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert modes == ["global", relaxed, "global"]
