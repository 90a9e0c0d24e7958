"""The scheduler's interface to a speculation policy."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from legato_engine.sequence import Sequence


class BlockSizes(Protocol):
    """Decides how many tokens to draft for each sequence; `speculative` has policies.

    With two launches in flight, a block size depends on commits up to the launch before the last.
    """

    def allot(self, sequences: Many[Sequence], *, kv_use: float) -> list[int]:
        """Return the number of draft tokens for each of at least one sequence; 0 drafts none.

        `kv_use` is the fraction of all KV pages used by live sequences.
        """
        ...

    def learn(self, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
        """Learn from the commit of a decode; its sequence may draft."""
