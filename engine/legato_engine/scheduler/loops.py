"""When several decode steps are one launch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.launch import LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.output_processor import OutputProcessor
from legato_engine.scheduler.runner import LoopRunner, NoTokens, Pause, RowTokens
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.scheduler.step_record import StepRecord
from legato_engine.sequence import Sequence

MAX_STEPS = 256
"""The most steps of a loop."""

_FEWEST_STEPS = 4  # fewer are faster as single steps
_SHARE = 2  # of the free pages, a loop may take one in so many


class Loops(ABC):
    """Turns decodes of rows that need no host between steps into loops; how, is that of a subclass.

    Only the device knows how far a loop is. It ends early when a request waits or when one of its
    own has ended: then what follows is launched behind it, with its other rows, whose positions the
    device fills in. A request that cut a loop short may be one of many, so decodes must go on for a
    while before the next.
    """

    def __init__(
        self,
        runner: LoopRunner,
        manager: KVCacheManager,
        running: RunningSequences,
        decode: DecodePlanner,
        pause: Pause,
    ) -> None:
        self._runner = runner
        self._pause = pause
        self._manager = manager
        self._running = running
        self._decode = decode
        self._num_decodes = 0  # since the last other launch
        self._num_needed = 0  # of them, before the next loop

    def launched(self, plan: Plan) -> None:
        self._num_decodes = self._num_decodes + 1 if plan.kind is LaunchKind.DECODE else 0

    def extend(self, plan: Plan, before: Plan | None, *, only_decodes: bool) -> Plan:
        """Return a decode of all running sequences with as many steps as they have tokens left and
        pages for, if these are enough; any other plan as it is. `before`: what is in flight.
        """
        if plan.kind is not LaunchKind.DECODE or not only_decodes:
            return plan
        if not all(_may_loop(row.sequence) for row in plan.rows):
            return plan
        if len(plan.rows) < len(self._running) or self._num_decodes < self._num_needed:
            return plan
        lengths = [tokens_left(row.sequence) for row in plan.rows]
        fewest = _FEWEST_STEPS + max(latest_block(row.sequence) for row in plan.rows)
        if min(lengths) < fewest or plan.under_pressure:
            return plan
        widest = 1 + max(row.num_drafts for row in plan.rows)
        steps = min(MAX_STEPS, max(lengths), min(lengths) * widest)
        most = self._most_pages()
        while steps >= fewest and self._num_missing(plan, steps) > most:
            steps //= 2
        if steps < fewest:
            return plan
        for row in plan.rows:
            steps = min(steps, self._reserve(row, steps))
        after = () if before is None else self._after(plan, before)
        return dataclasses.replace(plan, num_steps=steps, after=after)

    def follow(
        self, record: StepRecord, outputs: OutputProcessor, *, ends: bool, is_cut: bool
    ) -> NoTokens | None:
        """Wait for the next step and process its tokens, if there are any.

        A launch may give up before any of its steps: the rows go on after the last one that there
        was.

        `ends`: another launch waits that cannot be enqueued behind the loop, which ends after the
        step that it is in; `is_cut`: `ends`, or the launch behind the loop is no decode.
        """
        launch = record.launch
        rows = launch.plan.rows
        if ends or any(row.sequence.finalized for row in rows):
            self.end(record)
        if not record.num_followed:
            self._num_needed = 0
        if is_cut and record.num_followed < (steps := self._runner.worthwhile_steps(launch)):
            self._num_needed = steps
        tokens = self._runner.next_tokens(launch, self._pause)
        if isinstance(tokens, NoTokens):
            return tokens
        record.zombies = sum(row.sequence.finalized for row in rows)
        num_tokens = outputs.num_tokens
        for row, output in zip(rows, tokens, strict=True):
            if not row.sequence.finalized:
                self._process(record, row, output, outputs)
        record.num_followed += 1
        record.tokens += outputs.num_tokens - num_tokens
        return None

    def end(self, record: StepRecord) -> None:
        """Let a loop end after the step that it is in."""
        self._runner.end_loop(record.launch)

    def is_ending(self, record: StepRecord) -> bool:
        """Whether a loop has no further step for some row, after the one that it is in."""
        finalized = any(row.sequence.finalized for row in record.launch.plan.rows)
        return finalized or is_in_last_step(record)

    @abstractmethod
    def behind(self, record: StepRecord) -> Plan | None:
        """The next decode of a loop's rows, wherever it ends, to be launched before it has.

        Rows without a page for it are left out.
        """

    @abstractmethod
    def settle(self, record: StepRecord, behind: Plan | None, outputs: OutputProcessor) -> None:
        """After a loop, take back what neither it nor the launch behind it has run."""

    @abstractmethod
    def _after(self, plan: Plan, before: Plan) -> tuple[int, ...]:
        """That of a loop, if the device can follow the tokens of the launch before it."""

    def _most_pages(self) -> int:
        """The most that a loop may take."""
        return self._manager.pages_available // _SHARE

    @abstractmethod
    def _reserve(self, row: ScheduledSequence, steps: int) -> int:
        """Take pages for so many steps; return the number that there are pages for."""

    @abstractmethod
    def _process(
        self,
        record: StepRecord,
        row: ScheduledSequence,
        output: RowTokens,
        outputs: OutputProcessor,
    ) -> None:
        """Count the step that is read, and pass on its tokens."""

    def _num_missing(self, plan: Plan, steps: int) -> int:
        """Pages that the rows lack for so many steps."""
        size = self._manager.page_size
        needed = (
            -(-row.end_after(steps) // size) - len(row.sequence.pages.ids) for row in plan.rows
        )
        return sum(max(0, count) for count in needed)


def pages_begun(num_rows: int, page_size: int, max_block: int = 0) -> int:
    """The most pages that begin in a loop of so many rows."""
    return num_rows * (-(-(MAX_STEPS + max_block) // page_size) + 1)


def is_in_last_step(record: StepRecord) -> bool:
    return record.num_followed >= record.launch.plan.num_steps - 1


def latest_block(sequence: Sequence) -> int:
    """Draft tokens of its latest verification."""
    stats = sequence.draft_stats
    return stats.block_size_history[-1] if stats is not None and stats.block_size_history else 0


def tokens_left(sequence: Sequence) -> int:
    return sequence.task.max_tokens - sequence.progress.num_launched


def _may_loop(sequence: Sequence) -> bool:
    """Its constraint needs no host, nor do alternatives, and it was prefilled."""
    task = sequence.task
    known = task.follows_table or not task.constrained
    known = known and not sequence.request.top_logprobs
    return known and not sequence.preempted and sequence.progress.last_position >= 0
