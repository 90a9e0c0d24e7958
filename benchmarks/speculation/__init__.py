"""Benchmark of speculative decoding: block sizes and policies beside plain decoding."""

from benchmarks.speculation.command import main

__all__ = ["main"]
