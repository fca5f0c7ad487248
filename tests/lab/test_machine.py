"""Where a measurement ran: every column of its row, with stand-ins for git and the driver."""

import subprocess
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import torch

from numba_tconv.lab.measure import machine


@pytest.fixture
def answers(monkeypatch):
    """What programs say, by their second argument; each may be changed."""
    said = {"rev-parse": "abc1234\n", "status": "", "--query-gpu=driver_version": "580.1\n580.1\n"}
    monkeypatch.delenv("NUMBA_TCONV_COMMIT", raising=False)
    monkeypatch.setattr(machine, "driver", machine.driver.__wrapped__)

    def run(command, *, capture_output, text, timeout, cwd):
        assert capture_output
        assert text
        assert (cwd / "machine.py").exists()
        out = said[command[1]]
        if isinstance(out, Exception):
            raise out
        return SimpleNamespace(returncode=isinstance(out, int), stdout=out)

    monkeypatch.setattr(subprocess, "run", run)
    return said


def test_every_column(answers, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91907)
    monkeypatch.setattr(machine.requirements, "version", {"numba-cuda": "0.30"}.get)
    before = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = machine.measured()
    assert before <= found.pop("time") <= datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    where = dict(commit="abc1234", gpu="GPU", driver="580.1", torch="2.99", cudnn="9.19.7", numba_cuda="0.30")
    assert found == where
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    answers["status"] = " M file\n"
    monkeypatch.setattr(machine.requirements, "version", lambda name: None)
    without = dict(commit="abc1234+", gpu="none", cudnn="missing", numba_cuda="missing")
    assert vars(machine.describe()) == where | without
    monkeypatch.setenv("NUMBA_TCONV_COMMIT", "given")
    assert machine.describe().commit == "given"


@pytest.mark.parametrize("answer", [1, FileNotFoundError(), subprocess.TimeoutExpired("git", 20), ""], ids=repr)
def test_what_does_not_answer_is_unknown(answers, answer):
    answers |= dict.fromkeys(answers, answer)
    assert (machine.describe().commit, machine.describe().driver) == ("unknown", "unknown")
