"""Settings of all tests: GPU tests are skipped without a GPU and limited in time; seeds; hypothesis."""

import faulthandler
import gc
import os
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

from numba_tconv.ptx import SIMULATOR

# The simulator, which neither compiles nor has tensor cores, is for its own tests.
collect_ignore = [path.name for path in Path(__file__).parent.glob("*") if SIMULATOR and path.name != "simulator"]
GPU_TEST_LIMIT = 300  # seconds; a hung kernel cannot be interrupted, so the run ends with a traceback

# Deadlines would measure the machine; the blob reproduces a failure elsewhere.
hypothesis.settings.register_profile("numba_tconv", deadline=None, print_blob=True)
hypothesis.settings.load_profile("numba_tconv")
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("numba_tconv"), max_examples=10)

real_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    # Tensors are small: threads on shared cores mostly wait for each other. The variable is for processes that tests
    # start.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()  # until all tests are collected
    if config.option.markexpr == "not thorough":  # `make test`; others try hypothesis's own number of examples
        hypothesis.settings.load_profile("few")
    # Processes of a run share compiled kernels on disk; with a GPU the user's cache serves.
    if not torch.cuda.is_available() and "PYTEST_XDIST_WORKER" not in os.environ:
        kept = tempfile.TemporaryDirectory()
        os.environ["NUMBA_TCONV_CACHE"] = kept.name
        config.add_cleanup(kept.cleanup)
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[real_stderr] = os.dup(2)


def pytest_unconfigure(config):
    os.close(config.stash[real_stderr])


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Without a GPU, a GPU test gets its first case alone: making thousands is slow."""
    if torch.cuda.is_available() or metafunc.definition.get_closest_marker("gpu") is None:
        return
    every = metafunc.parametrize

    def first(names, values, *arguments, ids=None, **others):
        ids = ids if callable(ids) else ids and list(ids)[:1]
        others.pop("_param_mark", None)  # it would keep these ids for other tests
        every(names, list(values)[:1], *arguments, ids=ids, **others)

    metafunc.parametrize = first


def pytest_collection_modifyitems(config, items):
    """Without a GPU, a file's first GPU test stands for all. Files that compile most run first, to fill the cache."""
    if torch.cuda.is_available():
        return
    items.sort(key=lambda item: not item.path.name.startswith("test_offline"))
    of_file = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            of_file.setdefault(item.path, []).append(item)
    for first, *others in of_file.values():
        more = f", as do {len(others)} more of this file" if others else ""
        first.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU{more}"))
    left_out = {item for _, *others in of_file.values() for item in others}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Exempt modules and tests, which stay until the end, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def watchdog(request):
    """A function that restarts the time limit."""

    def restart():
        faulthandler.dump_traceback_later(GPU_TEST_LIMIT, exit=True, file=request.config.stash[real_stderr])

    if "gpu" not in request.keywords:
        yield
        return
    restart()
    yield restart
    faulthandler.cancel_dump_traceback_later()
