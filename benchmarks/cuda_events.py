"""Events that mark times on a CUDA stream."""

from __future__ import annotations

import torch


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it bare


def elapsed_ms(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Return milliseconds of a stream between two events that it has passed."""
    elapsed: float = begin.elapsed_time(end)
    return elapsed
