"""The scheduler's interface to a speculation policy."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from legato_engine.scheduler.runner import RowTokens
from legato_engine.sequence import Sequence


class BlockSizes(Protocol):
    """Bounds how many tokens the device drafts for each sequence.

    The device decides by the launch in front, which the host has not read.
    """

    def allot(self, sequences: Many[Sequence], *, under_pressure: bool) -> list[int]:
        """Return the most draft tokens that each of at least one sequence may have.

        The launch is planned `under_pressure`, and must be launched.
        """
        ...

    def learn(self, sequence: Sequence, output: RowTokens) -> None:
        """Keep what a committed launch says of a sequence."""
        ...
