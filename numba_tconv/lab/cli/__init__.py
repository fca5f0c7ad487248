"""``python -m numba_tconv``."""
