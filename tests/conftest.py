"""What all tests share: GPU tests skipped without a GPU and watched while they run, seeds, hypothesis' settings."""

import faulthandler
import gc
import os
import tempfile

import hypothesis
import pytest
import torch

GPU_TEST_LIMIT = 300  # seconds; a hung kernel cannot be interrupted, so the whole run ends with a traceback

# Deadlines measure the machine, not the code; the blob reproduces a failure elsewhere.
hypothesis.settings.register_profile("numba_tconv", deadline=None, print_blob=True)
hypothesis.settings.load_profile("numba_tconv")

real_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    # On tensors as small as those of tests, threads of several processes that share the cores mostly wait for each
    # other, at full speed. The variable is for the processes that tests start.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()  # until all tests are collected
    # What one process of a run compiles, the others take from the disk. On a GPU the user's own cache serves.
    if not torch.cuda.is_available() and "PYTEST_XDIST_WORKER" not in os.environ:
        kept = tempfile.TemporaryDirectory()
        os.environ["NUMBA_TCONV_CACHE"] = kept.name
        config.add_cleanup(kept.cleanup)
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[real_stderr] = os.dup(2)


def pytest_unconfigure(config):
    os.close(config.stash[real_stderr])


def pytest_collection_modifyitems(config, items):
    """Without a GPU, of a file's tests that need one the first stands for all: skipping thousands takes time too. And
    the files that compile most come first: what they have compiled, others take from the disk."""
    if torch.cuda.is_available():
        return
    items.sort(key=lambda item: not item.path.name.startswith("test_offline"))
    of_file = {}
    for item in items:
        if "gpu" in item.keywords:
            of_file.setdefault(item.path, []).append(item)
    for first, *others in of_file.values():
        more = f", as do {len(others)} more of this file" if others else ""
        first.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU{more}"))
    left_out = {item for _, *others in of_file.values() for item in others}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Modules and tests stay until the end: no round of garbage collection walks them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def watchdog(request):
    """A function that grants the limit anew, for tests that do many things."""

    def restart():
        faulthandler.dump_traceback_later(GPU_TEST_LIMIT, exit=True, file=request.config.stash[real_stderr])

    if "gpu" not in request.keywords:
        yield
        return
    restart()
    yield restart
    faulthandler.cancel_dump_traceback_later()
