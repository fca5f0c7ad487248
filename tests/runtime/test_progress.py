"""Progress: a bar on a terminal, after two seconds; one plain line elsewhere; the items as they are."""

import io

import pytest

from numba_tconv.runtime import progress as progress_of


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_elsewhere_it_is_one_plain_line(capsys, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    shown = progress_of.progress(range(3), "kernels", 3)
    assert capsys.readouterr().err == "kernels ...\n"
    assert list(shown) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [3, None])
def test_on_a_terminal_it_is_a_bar_that_goes_away(monkeypatch, total):
    monkeypatch.setattr(progress_of.sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(progress_of, "DELAY_S", 0)
    assert list(progress_of.progress(iter(range(3)), "kernels", total)) == [0, 1, 2]
    drawn = terminal.getvalue()
    assert "kernels: " in drawn
    assert ("0/3" in drawn) == (total == 3)
    assert drawn.endswith("\r")
    assert "\n" not in drawn


def test_what_takes_less_than_two_seconds_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress_of.sys, "stderr", terminal := Terminal())
    assert progress_of.DELAY_S == 2
    assert list(progress_of.progress(range(3), "kernels")) == [0, 1, 2]
    assert "kernels" not in terminal.getvalue()


def test_it_can_be_turned_off(monkeypatch, capsys):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert list(progress_of.progress(range(3), "kernels")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


class Log:
    """As programs put it in the place of sys.stderr."""

    def __init__(self):
        self.lines = []

    def write(self, text):
        self.lines.append(text)

    def flush(self):
        pass


def test_a_log_gets_the_line(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(progress_of.sys, "stderr", log := Log())
    assert list(progress_of.progress(range(3), "kernels")) == [0, 1, 2]
    assert "".join(log.lines) == "kernels ...\n"


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [None, closed(), Full()], ids=["none", "closed", "full"])
def test_without_a_stream_that_takes_it_nothing_is_shown(monkeypatch, capsys, stream):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr(progress_of.sys, "stderr", stream)
    assert list(progress_of.progress(range(3), "kernels")) == [0, 1, 2]
    assert capsys.readouterr().out == ""
