"""Trackers on clips with known truth: which object is which, and where it is after a while."""

from benchmarks.tracking.run import main

__all__ = ["main"]
