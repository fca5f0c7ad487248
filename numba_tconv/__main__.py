"""``python -m numba_tconv``."""

import sys

from .cli import main

sys.exit(main())
