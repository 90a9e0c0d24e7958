"""Batches the sequences that can take one more token."""

from __future__ import annotations

from collections.abc import Iterable

from legato_engine.scheduler.launch import LaunchKind, Plan, Row
from legato_engine.sequence import Sequence


class DecodePlanner:
    """Every running sequence decodes together; each holds a batch row, so all of them fit.

    A sequence may be planned before its last token is committed: the forward reads that token on
    the device, at the position where its sampling put it.
    """

    def plan(self, running: Iterable[Sequence]) -> Plan | None:
        """The next decode batch, None when no sequence can take one more token."""
        rows = tuple(
            Row(sequence, position=sequence.prompt_length + sequence.num_launched - 1)
            for sequence in running
            if _can_decode(sequence)
        )
        return Plan(LaunchKind.DECODE, rows) if rows else None


def _can_decode(sequence: Sequence) -> bool:
    return (
        not sequence.finalized
        and 0 < sequence.num_launched < sequence.task.max_tokens
        and sequence.inflight_refs < 2
    )
