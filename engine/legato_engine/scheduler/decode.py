"""Decode planning, running sequences and preemption."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from itertools import repeat
from typing import Any

from legato_engine.kv_cache.manager import NO_PREFILL_WORK, KVCacheManager
from legato_engine.scheduler.batch import LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.queue import WaitingQueue
from legato_engine.sequence import Sequence
from legato_engine.speculation import PRESSURE_RATIO, BlockSizes


class RunningSequences:
    """Sequences with a row, zombies excluded, mostly in order of admission.

    Sequences that begin with the same page are neighbours, because attention in the megakernel
    reads the leading pages that neighbours share only once.

    When no page is available, the sequence with the lowest `preemption_rank` gives up its pages and
    waits again. One with no lower-ranked victim stalls until another finishes.

    There is no livelock: ranks never change, and each admission gains a token because a sequence is
    preempted only after its prefill is launched.
    """

    def __init__(self, manager: KVCacheManager, queue: WaitingQueue[Sequence]) -> None:
        self._manager = manager
        self._queue = queue
        self._members: dict[Sequence, None] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, sequence: Sequence) -> None:
        """Insert it behind the last sequence that begins with the same page, or at the end."""
        members = list(self._members)
        first = sequence.pages.ids[:1]
        same = [i for i, each in enumerate(members) if each.pages.ids[:1] == first]
        members.insert(same[-1] + 1 if same else len(members), sequence)
        self._members = dict.fromkeys(members)

    def remove(self, sequence: Sequence) -> None:
        """Release the sequence unless a launch in flight names it."""
        del self._members[sequence]
        if sequence.inflight_refs == 0:
            self._manager.release(sequence)

    def release_or_requeue(self, sequence: Sequence) -> None:
        """Release a finalized sequence or requeue a preempted one that no launch names."""
        if sequence.finalized:
            self._manager.release(sequence)
        else:
            self._requeue(sequence)

    def grow(self, short: Iterable[Sequence]) -> None:
        """Give each sequence a page while pages last, highest rank first."""
        for sequence in sorted(short, key=preemption_rank, reverse=True):
            while sequence in self._members and not sequence.preempted:
                if self._manager.grow(sequence) or not self._preempt_for(sequence):
                    break

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempt the lowest-ranked sequence below `sequence`; return whether pages became free.

        While launches in flight name the victim, no other is preempted.
        """
        if any(each.preempted for each in self._members):
            return False
        victim = min(self._victims(), key=preemption_rank, default=sequence)
        if preemption_rank(victim) >= preemption_rank(sequence):
            return False
        victim.preempted = True
        if victim.inflight_refs:
            return False
        self._requeue(victim)
        return True

    def _victims(self) -> Iterator[Sequence]:
        for sequence in self._members:
            if sequence.progress.last_position >= 0 and self._manager.would_free_pages(sequence):
                yield sequence

    def _requeue(self, sequence: Sequence) -> None:
        del self._members[sequence]
        self._manager.preempt(sequence)
        sequence.preempted = False
        sequence.progress.last_position = -1
        sequence.is_waiting = True
        self._queue.add(sequence)


def preemption_rank(sequence: Sequence) -> tuple[int, float, int]:
    """Return a unique rank; the lowest is preempted first."""
    return (sequence.request.priority, -sequence.timing.arrival, -sequence.seq_id)


# ---------------------------------------------------------------- decode planner


@dataclasses.dataclass(slots=True, eq=False)
class DecodePlanner:
    """Planner of decodes: a batch of all running sequences, which always fit, as each has a row.

    A sequence may be planned before its last token is committed, because the forward pass reads
    that token on the device. Sequences without a page for their position are skipped.

    While draft tokens are in flight, any number may be accepted, so a sequence needs pages for all.
    """

    manager: KVCacheManager
    running: RunningSequences
    block_sizes: BlockSizes | None
    max_tokens: int = 0  # of a launch with forced tokens

    def plan(self) -> Plan | None:
        batch = self._ready()
        if len(batch) < len(self.running) and (short := self._short()):
            self.running.grow(short)
            batch = self._ready()
        if not batch:
            return None
        if self.block_sizes is None:
            return Plan(LaunchKind.DECODE, self._add_forced(_schedule(batch)))
        kv_use = self.manager.pages_used / self.manager.pages_total
        under_pressure = kv_use > PRESSURE_RATIO
        rows = self._schedule_drafts(batch, self.block_sizes, under_pressure)
        rows = self._add_forced(rows)
        return Plan(LaunchKind.DECODE, rows, under_pressure=under_pressure) if rows else None

    @property
    def is_streaming(self) -> bool:
        """Return whether a decoding sequence streams, even if it lacks a next page."""
        return any(
            sequence.request.deltas
            and sequence.progress.last_position >= 0
            and sequence.progress.num_launched < sequence.task.max_tokens
            and not sequence.preempted
            for sequence in self.running
        )

    def _ready(self) -> list[Sequence]:
        """Return the prefilled sequences with a page, tokens to launch and a free reference."""
        return [
            sequence
            for sequence in self.running
            if 0 <= (progress := sequence.progress).last_position < sequence.pages.capacity
            and progress.num_launched < sequence.task.max_tokens
            and sequence.inflight_refs < 2
            and not sequence.preempted
        ]

    def _short(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self.running
            if (progress := sequence.progress).last_position >= sequence.pages.capacity
            and progress.num_launched < sequence.task.max_tokens
            and not sequence.preempted
        ]

    def _add_forced(self, rows: tuple[ScheduledSequence, ...]) -> tuple[ScheduledSequence, ...]:
        """Add the tokens that grammars force after the newest, while the launch and pages last.

        With speculation a row has no more of them than draft tokens.
        """
        room = self.max_tokens - len(rows)
        grammars = [row.sequence.task.grammar for row in rows] if room > 0 else []
        if not any(grammars):
            return rows
        room -= sum(row.num_drafts for row in rows)
        most = room if self.block_sizes is None else self.block_sizes.max_block
        added = []
        for row in rows:
            forced = self._forced(row, min(room, most))
            room -= len(forced)
            added.append(row.with_forced(forced) if forced else row)
        return tuple(added)

    def _forced(self, row: ScheduledSequence, most: int) -> tuple[int, ...]:
        sequence = row.sequence
        grammar, progress = sequence.task.grammar, sequence.progress
        if grammar is None or sequence.task.has_payload:
            return ()
        most = min(most, sequence.task.max_tokens - progress.num_launched - 1)
        forced = grammar.forced(progress.num_launched - sequence.num_committed)[: max(most, 0)]
        end = row.position + 1 + len(forced)
        while end > sequence.pages.capacity and self.manager.grow(sequence):
            pass
        return forced[: sequence.pages.capacity - row.position - 1]

    def _schedule_drafts(
        self, batch: Many[Sequence], block_sizes: BlockSizes, under_pressure: bool
    ) -> tuple[ScheduledSequence, ...]:
        """Reserve pages for the maximum of draft tokens; the device chooses how many it drafts."""
        rows = []
        for sequence, bound in zip(batch, _bounds(batch, block_sizes, under_pressure), strict=True):
            progress, max_length = sequence.progress, sequence.max_length
            start = progress.last_position + progress.inflight_drafts
            max_drafts = min(bound, sequence.task.max_tokens - progress.num_launched - 1)
            while not self.manager.reserve_draft(sequence, min(start + 1 + max_drafts, max_length)):
                max_drafts = max_drafts // 2 if max_drafts else -1
                if max_drafts < 0:
                    break
            else:
                at, slack = progress.last_position, progress.inflight_drafts
                rows.append((sequence, at, 1, NO_PREFILL_WORK, max_drafts, slack, ()))
        return _scheduled(rows)


def _bounds(batch: Many[Sequence], block_sizes: BlockSizes, under_pressure: bool) -> Iterable[int]:
    """Return the maximum draft tokens of each sequence."""
    drafting = [sequence for sequence in batch if sequence.may_draft]
    if len(drafting) == len(batch):
        return block_sizes.allot(batch, under_pressure=under_pressure)
    if not drafting:
        return repeat(0, len(batch))
    bounds = iter(block_sizes.allot(drafting, under_pressure=under_pressure))
    return (next(bounds) if sequence.may_draft else 0 for sequence in batch)


def _schedule(batch: Many[Sequence]) -> tuple[ScheduledSequence, ...]:
    positions = [sequence.progress.last_position for sequence in batch]
    numbers = repeat(0), repeat(0), repeat(())  # no drafts, at a known position, nothing forced
    return _scheduled(zip(batch, positions, repeat(1), repeat(NO_PREFILL_WORK), *numbers))


def _scheduled(fields: Iterable[tuple[Any, ...]]) -> tuple[ScheduledSequence, ...]:
    """Make the rows of a step without a Python frame for each."""
    return tuple(map(tuple.__new__, repeat(ScheduledSequence), fields))
