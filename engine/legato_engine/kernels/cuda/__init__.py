"""Kernels in CUDA C++, compiled at start by the NVRTC of torch's wheel."""
