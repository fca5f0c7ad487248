"""A helper of the command line's tests."""

import pytest
import torch

from numba_tconv.lab.cli import parser as cli

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so this is no mistake")


def run(capsys, *argv):
    try:
        code = cli.main([*map(str, argv)])
    except SystemExit as left:  # argparse
        code = left.code
    return code, *capsys.readouterr()
