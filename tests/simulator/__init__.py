"""Tests in the CUDA simulator, which need NUMBA_ENABLE_CUDASIM=1 from the start of the process (`make test`)."""
