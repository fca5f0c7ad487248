"""What all tests share: GPU tests skipped without a GPU and watched while they run, seeds, hypothesis' settings."""

import faulthandler
import os

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
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[real_stderr] = os.dup(2)


def pytest_unconfigure(config):
    os.close(config.stash[real_stderr])


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


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
