"""Counts over all sessions of a process."""

from __future__ import annotations

import collections

from legato_service.session.settings import DropReason

MAX_AGES = 4096
"""Ages that are kept for the metrics to take; beyond it the oldest are lost."""


class SessionTotals:
    """Counts since the start, and the ages in seconds at which frames got their last result."""

    def __init__(self) -> None:
        self.frames = 0
        self.dropped = dict.fromkeys(DropReason, 0)
        self.ages: collections.deque[float] = collections.deque(maxlen=MAX_AGES)
