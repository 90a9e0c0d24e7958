"""Batches the sequences that can take one more token."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from itertools import repeat

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.kv_cache.prefill_work import NO_PREFILL_WORK
from legato_engine.scheduler.block_sizes import BlockSizes
from legato_engine.scheduler.launch import LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.sequence import Sequence


class DecodePlanner:
    """Every running sequence decodes together; each holds a batch row, so all of them fit.

    A sequence may be planned before its last token is committed: the forward reads that token on
    the device, at the position where its sampling put it. Whoever has no page for that position,
    and gets none now, is left out.

    With `block_sizes` a row feeds proposed tokens behind it, which the same forward verifies; never
    more than its task could still sample, and none where there are no pages for them. While the
    host does not know how many of the last stand, the pages are those of the farthest case; without
    them a row is left out until it does.
    """

    def __init__(
        self, manager: KVCacheManager, running: RunningSequences, block_sizes: BlockSizes | None
    ) -> None:
        self._manager = manager
        self._running = running
        self._block_sizes = block_sizes

    def plan(self) -> Plan | None:
        """The next decode batch, None when no sequence can take one more token."""
        batch = self._ready()
        if len(batch) < len(self._running) and (short := self._short()):
            self._running.grow(short)
            batch = self._ready()
        if not batch:
            return None
        if self._block_sizes is None:
            rows = _plain(batch)
        else:
            rows = self._drafting(batch, self._block_sizes)
        return Plan(LaunchKind.DECODE, rows) if rows else None

    @property
    def streams(self) -> bool:
        """Whether anybody who decodes reads tokens one by one, with a page for the next or not."""
        return any(
            sequence.request.deltas
            and sequence.progress.last_position >= 0
            and sequence.progress.num_launched < sequence.task.max_tokens
            and not sequence.preempted
            for sequence in self._running
        )

    def _ready(self) -> list[Sequence]:
        """Those prefilled, with a page, whose tokens are not all planned, and not too far ahead."""
        return [
            sequence
            for sequence in self._running
            if 0 <= sequence.progress.last_position < sequence.pages.capacity
            and sequence.progress.num_launched < sequence.task.max_tokens
            and sequence.inflight_refs < 2
            and not sequence.preempted
        ]

    def _short(self) -> list[Sequence]:
        """Those whose next token has no page."""
        return [
            sequence
            for sequence in self._running
            if sequence.progress.last_position >= sequence.pages.capacity
            and sequence.progress.num_launched < sequence.task.max_tokens
            and not sequence.preempted
        ]

    def _drafting(
        self, batch: Many[Sequence], block_sizes: BlockSizes
    ) -> tuple[ScheduledSequence, ...]:
        """Those of the batch that have pages for all they may write."""
        drafts = self._drafts(batch, block_sizes)
        rows = (
            ScheduledSequence(
                sequence,
                sequence.progress.last_position,
                num_drafts=size,
                slack=sequence.progress.inflight_drafts,
            )
            for sequence, size in zip(batch, drafts, strict=False)
        )
        return tuple(row for each in rows if (row := self._with_pages(each)) is not None)

    def _drafts(self, batch: Many[Sequence], block_sizes: BlockSizes) -> Iterator[int]:
        drafting = [sequence for sequence in batch if sequence.may_draft]
        if not drafting:
            return repeat(0)
        kv_use = self._manager.pages_used / self._manager.pages_total
        blocks = iter(block_sizes.allot(drafting, kv_use=kv_use))
        return (min(next(blocks), _most(each)) if each.may_draft else 0 for each in batch)

    def _with_pages(self, row: ScheduledSequence) -> ScheduledSequence | None:
        """The row with pages for its proposals, or for none, or None without pages at all."""
        for each in (row, row._replace(num_drafts=0)):
            if self._manager.reserve_draft(each.sequence, each.end):
                return each
        return None


def _plain(batch: Many[Sequence]) -> tuple[ScheduledSequence, ...]:
    positions = [sequence.progress.last_position for sequence in batch]
    # Every tick makes all rows anew, and `_make` costs half of a call that fills defaults in.
    parts = zip(batch, positions, repeat(1), repeat(NO_PREFILL_WORK), repeat(0), repeat(0))
    return tuple(map(ScheduledSequence._make, parts))


def _most(sequence: Sequence) -> int:
    """Tokens that its task may still sample beyond the next one."""
    return sequence.task.max_tokens - sequence.progress.num_launched - 1
