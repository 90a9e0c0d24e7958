"""The scheduler's only view of how much is worth proposing."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from legato_engine.sequence import Sequence


class BlockSizes(Protocol):
    """Decides how many tokens each sequence proposes; `speculative` has policies for it.

    A launch is planned before the one in front of it is committed, so with two in flight a block
    is chosen from what was learnt up to the launch before the last.
    """

    def allot(self, sequences: Many[Sequence], *, kv_use: float) -> list[int]:
        """How many tokens each proposes next to one it decodes anyway; 0 is plain decoding.

        There is at least one. `kv_use` is the share of all KV pages that live sequences hold.
        """
        ...

    def learn(self, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
        """A decode of a sequence that may draft was committed."""
        ...
