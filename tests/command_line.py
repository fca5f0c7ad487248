"""A helper of the tests of the command line."""

import pytest
import torch

from numba_tconv.lab.cli import parser as cli

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so this is no mistake")


def run(capsys, *argv):
    """Exit code, stdout and stderr of a command line."""
    try:
        code = cli.main([*map(str, argv)])
    except SystemExit as left:  # argparse
        code = left.code
    return code, *capsys.readouterr()
