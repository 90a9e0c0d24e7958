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


class DecodePlanner:
    """Batches all running sequences; each has a row, so they always fit.

    A sequence may be planned before its last token is committed, because the forward pass reads
    that token on the device. Skip sequences that have no page for its position when none can be
    allocated.

    With `block_sizes` the forward pass also verifies draft tokens, as far as there are pages for
    them. While draft tokens are in flight, any number may be accepted, so a sequence without pages
    for all of them is skipped.
    """

    def __init__(
        self, manager: KVCacheManager, running: RunningSequences, block_sizes: BlockSizes | None
    ) -> None:
        self._manager = manager
        self._running = running
        self._block_sizes = block_sizes

    def plan(self) -> Plan | None:
        """Plan the next decode, None if no sequence can take a token."""
        batch = self._ready()
        if len(batch) < len(self._running) and (short := self._short()):
            self._running.grow(short)
            batch = self._ready()
        if not batch:
            return None
        if self._block_sizes is None:
            rows = _schedule(batch)
        else:
            rows = self._schedule_drafts(batch, self._block_sizes)
        return Plan(LaunchKind.DECODE, rows) if rows else None

    @property
    def streaming(self) -> bool:
        """Whether a decoding sequence streams its tokens, including ones without a next page."""
        return any(
            sequence.request.deltas
            and sequence.progress.last_position >= 0
            and sequence.progress.num_launched < sequence.task.max_tokens
            and not sequence.preempted
            for sequence in self._running
        )

    def _ready(self) -> list[Sequence]:
        """Return the prefilled sequences with a page, tokens to launch and a free reference."""
        return [
            sequence
            for sequence in self._running
            if 0 <= (progress := sequence.progress).last_position < sequence.pages.capacity
            and progress.num_launched < sequence.task.max_tokens
            and sequence.inflight_refs < 2
            and not sequence.preempted
        ]

    def _short(self) -> list[Sequence]:
        """Return the sequences without a page for their next token."""
        return [
            sequence
            for sequence in self._running
            if (progress := sequence.progress).last_position >= sequence.pages.capacity
            and progress.num_launched < sequence.task.max_tokens
            and not sequence.preempted
        ]

    def _schedule_drafts(
        self, batch: Many[Sequence], block_sizes: BlockSizes
    ) -> tuple[ScheduledSequence, ...]:
        rows = []
        for sequence, num_drafts in zip(
            batch, self._draft_counts(batch, block_sizes), strict=False
        ):
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

    def _draft_counts(self, batch: Many[Sequence], block_sizes: BlockSizes) -> Iterator[int]:
        drafting = [sequence for sequence in batch if sequence.may_draft]
        if not drafting:
            return repeat(0)
        kv_use = self._manager.pages_used / self._manager.pages_total
        sizes = iter(block_sizes.allot(drafting, kv_use=kv_use))
        return (min(next(sizes), _max_drafts(each)) if each.may_draft else 0 for each in batch)

    def _with_pages(self, row: ScheduledSequence) -> ScheduledSequence | None:
        """Reserve pages, without draft tokens if there are too few; None without any pages."""
        for each in (row, row._replace(num_drafts=0)):
            if self._manager.reserve_draft(each.sequence, each.end):
                return each
        return None


def _schedule(batch: Many[Sequence]) -> tuple[ScheduledSequence, ...]:
    positions = [sequence.progress.last_position for sequence in batch]
    # Runs in every step: `_make` takes half the time of a call that fills in defaults.
    fields = zip(batch, positions, repeat(1), repeat(NO_PREFILL_WORK), repeat(0), repeat(0))
    return tuple(map(ScheduledSequence._make, fields))


def _max_drafts(sequence: Sequence) -> int:
    """Return how many tokens the task may sample after the next one."""
    return sequence.task.max_tokens - sequence.progress.num_launched - 1
