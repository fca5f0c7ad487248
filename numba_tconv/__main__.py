"""``python -m numba_tconv``."""

import sys

from .lab.cli.parser import main

sys.exit(main())
