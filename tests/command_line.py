"""Helpers of the command line's tests."""

import pytest
import torch

from numba_tconv.lab.cli import commands
from numba_tconv.lab.cli import parser as cli

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so this is no mistake")


def run(capsys, *argv):
    try:
        code = cli.main([*map(str, argv)])
    except SystemExit as left:  # argparse
        code = left.code
    return code, *capsys.readouterr()


def mistake(capsys, *argv):
    """What the command says to a mistake, in one line."""
    code, _, err = run(capsys, *argv)
    assert (code, err.count("\n")) == (commands.MISTAKE, 1), err
    assert err.startswith("numba_tconv: ")
    return err
