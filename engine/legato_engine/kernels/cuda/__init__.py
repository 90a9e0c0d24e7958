"""Kernels in CUDA C++, compiled at start by NVRTC, which torch's own wheel brings along."""
