"""The batch of the next decode."""

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
from legato_engine.speculative.block_policy import PRESSURE_RATIO


class DecodePlanner:
    """Batches all running sequences; each has a row, so they always fit.

    A sequence may be planned before its last token is committed, because the forward pass reads
    that token on the device. Sequences without a page for their position are skipped.

    While draft tokens are in flight, any number may be accepted, so a sequence needs pages for all.
    """

    def __init__(
        self, manager: KVCacheManager, running: RunningSequences, block_sizes: BlockSizes | None
    ) -> None:
        self._manager = manager
        self._running = running
        self._block_sizes = block_sizes

    def plan(self) -> Plan | None:
        batch = self._ready()
        if len(batch) < len(self._running) and (short := self._short()):
            self._running.grow(short)
            batch = self._ready()
        if not batch:
            return None
        if self._block_sizes is None:
            return Plan(LaunchKind.DECODE, _schedule(batch))
        kv_use = self._manager.pages_used / self._manager.pages_total
        under_pressure = kv_use > PRESSURE_RATIO
        rows = self._schedule_drafts(batch, self._block_sizes, under_pressure)
        return Plan(LaunchKind.DECODE, rows, under_pressure=under_pressure) if rows else None

    @property
    def streaming(self) -> bool:
        """Includes sequences without a next page."""
        return any(
            sequence.request.deltas
            and sequence.progress.last_position >= 0
            and sequence.progress.num_launched < sequence.task.max_tokens
            and not sequence.preempted
            for sequence in self._running
        )

    def _ready(self) -> list[Sequence]:
        """Prefilled, with a page, tokens to launch and a free reference."""
        return [
            sequence
            for sequence in self._running
            if 0 <= (progress := sequence.progress).last_position < sequence.pages.capacity
            and progress.num_launched < sequence.task.max_tokens
            and sequence.inflight_refs < 2
            and not sequence.preempted
        ]

    def _short(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self._running
            if (progress := sequence.progress).last_position >= sequence.pages.capacity
            and progress.num_launched < sequence.task.max_tokens
            and not sequence.preempted
        ]

    def _schedule_drafts(
        self, batch: Many[Sequence], block_sizes: BlockSizes, under_pressure: bool
    ) -> tuple[ScheduledSequence, ...]:
        """Reserve pages for the most draft tokens: the device chooses how many it drafts."""
        rows = []
        counts = self._draft_counts(batch, block_sizes, under_pressure)
        for sequence, num_drafts in zip(batch, counts, strict=False):
            progress = sequence.progress
            row = self._with_pages(
                ScheduledSequence(
                    sequence,
                    progress.last_position,
                    num_drafts=num_drafts,
                    slack=progress.inflight_drafts,
                )
            )
            if row is not None:
                rows.append(row)
        return tuple(rows)

    def _draft_counts(
        self, batch: Many[Sequence], block_sizes: BlockSizes, under_pressure: bool
    ) -> Iterator[int]:
        drafting = [sequence for sequence in batch if sequence.may_draft]
        if not drafting:
            return repeat(0)
        sizes = iter(block_sizes.allot(drafting, under_pressure=under_pressure))
        return (min(next(sizes), _max_drafts(each)) if each.may_draft else 0 for each in batch)

    def _with_pages(self, row: ScheduledSequence) -> ScheduledSequence | None:
        """Halve the draft tokens until there are pages for them."""
        while not self._manager.reserve_draft(row.sequence, row.end):
            if not row.num_drafts:
                return None
            row = row._replace(num_drafts=row.num_drafts // 2)
        return row


def _schedule(batch: Many[Sequence]) -> tuple[ScheduledSequence, ...]:
    positions = [sequence.progress.last_position for sequence in batch]
    # Runs in every step: `_make` takes half the time of a call that fills in defaults.
    fields = zip(batch, positions, repeat(1), repeat(NO_PREFILL_WORK), repeat(0), repeat(0))
    return tuple(map(ScheduledSequence._make, fields))


def _max_drafts(sequence: Sequence) -> int:
    return sequence.task.max_tokens - sequence.progress.num_launched - 1
