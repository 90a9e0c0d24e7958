"""Decode loops: several decode steps in one launch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import LaunchKind, Plan, ScheduledSequence, StepRecord
from legato_engine.scheduler.decode import DecodePlanner, RunningSequences
from legato_engine.scheduler.interfaces import LoopRunner, NoTokens, Pause, RowTokens
from legato_engine.scheduler.output import OutputProcessor
from legato_engine.sequence import Sequence
from legato_engine.speculative.policy import PRESSURE_RATIO

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
        """Return whether the current step is the last for some row."""
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
        """Return per-row indices into the previous launch's tokens, or () without them."""

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
    """Return whether a row may loop: prefilled, its constraint and logprobs need no host."""
    task = sequence.task
    known = task.follows_table or not task.constrained
    known = known and not sequence.request.top_logprobs
    return known and not sequence.preempted and sequence.progress.last_position >= 0


# ---------------------------------------------------------------- single loops

# Loops whose steps commit one token of each row.


class SingleLoops(Loops):
    """Loops without speculation: how many steps a row has left is known before they run."""

    def settle(self, record: StepRecord, behind: Plan | None, outputs: OutputProcessor) -> None:
        """Take back what the launch behind a loop has not run: rows that had ended."""
        if behind is None:
            return
        for index, row in zip(behind.behind, behind.decodes, strict=True):
            next_position = record.launch.plan.rows[index].position + record.num_followed
            if next_position > row.position + row.slack:
                row.sequence.take_back()

    def behind(self, record: StepRecord) -> Plan | None:
        rows = {
            index: scheduled
            for index, row in enumerate(record.launch.plan.rows)
            if (scheduled := self._behind(row, record)) is not None
        }
        if not rows:
            return None
        return Plan(LaunchKind.DECODE, tuple(rows.values()), behind=tuple(rows))

    def _behind(self, row: ScheduledSequence, record: StepRecord) -> ScheduledSequence | None:
        sequence = row.sequence
        num_left = tokens_left(sequence)
        if sequence.finalized or sequence.preempted or not num_left:
            return None
        position = sequence.progress.last_position
        last = row.position + record.launch.plan.num_steps
        if num_left == last - position:  # it ends if the loop runs all of its steps
            if is_in_last_step(record):
                return None
            last -= 1
        while last >= sequence.pages.capacity:
            if not self._manager.grow(sequence):
                return None
        return ScheduledSequence(sequence, position, slack=last - position)

    def _after(self, plan: Plan, before: Plan) -> tuple[int, ...]:
        if not plan.constrained:
            return ()
        indices = {row.sequence: index for index, row in enumerate(before.counted_rows)}
        return tuple(indices.get(row.sequence, -1) for row in plan.rows)

    def _reserve(self, row: ScheduledSequence, steps: int) -> int:
        pages = row.sequence.pages
        while row.position + steps > pages.capacity and self._manager.grow(row.sequence):
            pass
        return pages.capacity - row.position

    def _process(
        self,
        record: StepRecord,
        row: ScheduledSequence,
        output: RowTokens,
        outputs: OutputProcessor,
    ) -> None:
        progress = row.sequence.progress
        progress.num_launched += 1
        progress.last_position += 1
        (token,) = output.tokens
        outputs.process(row.sequence, token)


# ---------------------------------------------------------------- drafting loops

# Loops whose steps verify draft tokens, and commit several tokens of a row.


class DraftingLoops(Loops):
    """Loops with speculation: all positions of one are draft tokens that it may accept.

    It ends on the device after a row's last token, or where a row has too few positions left for a
    block.
    """

    def launched(self, plan: Plan) -> None:
        super().launched(plan)
        if plan.loops:
            for row in plan.rows:
                row.sequence.progress.inflight_drafts += row.num_drafts + plan.num_steps

    def is_ending(self, record: StepRecord) -> bool:
        """It may go on nonetheless, if the device accepts fewer tokens than in its latest step."""
        rows = record.launch.plan.rows
        return super().is_ending(record) or any(_may_end(row, record) for row in rows)

    def settle(self, record: StepRecord, behind: Plan | None, outputs: OutputProcessor) -> None:
        """Take back what a loop has not run."""
        in_flight = {row.sequence: row.num_drafts for row in behind.rows} if behind else {}
        for row in record.launch.plan.rows:
            sequence = row.sequence
            if not sequence.finalized:
                num_drafts = sequence.progress.inflight_drafts - in_flight.get(sequence, 0)
                sequence.settle_drafts(num_drafts, 0)
                outputs.commit_pages(sequence, row.num_drafts, pressed=False)

    def _after(self, plan: Plan, before: Plan) -> tuple[int, ...]:
        """Return no indices: the host must first know how many tokens were accepted."""
        return ()

    def behind(self, record: StepRecord) -> Plan | None:
        goes_on = any(_goes_on(row) for row in record.launch.plan.rows)
        return self._decode.plan() if goes_on and self.is_ending(record) else None

    def _most_pages(self) -> int:
        """Draft tokens leave a page to each row, and do not put the pool under pressure."""
        manager = self._manager
        relaxed = int(PRESSURE_RATIO * manager.pages_total) - manager.pages_used
        return min(super()._most_pages(), relaxed, manager.pages_available - len(self._running))

    def _reserve(self, row: ScheduledSequence, steps: int) -> int:
        reserved = self._manager.reserve_draft(row.sequence, row.end_after(steps))
        assert reserved, f"no pages for {steps} steps of sequence {row.sequence.seq_id}"
        return steps

    def _process(
        self,
        record: StepRecord,
        row: ScheduledSequence,
        output: RowTokens,
        outputs: OutputProcessor,
    ) -> None:
        row.sequence.settle_drafts(1, 1)  # what is certain of a step was a draft of the launch
        outputs.process_block(record, row, output, len(output.tokens) - 1)


def _may_end(row: ScheduledSequence, record: StepRecord) -> bool:
    """Return whether the loop ends with its current step if this row accepts all tokens
    drafted in its latest step.
    """
    sequence, end = row.sequence, row.reach(record.launch.plan.num_steps)
    accepted = min(latest_block(sequence), row.num_drafts)
    newest = sequence.progress.last_position + 1 + accepted
    num_left = sequence.max_length - 1 - newest
    return num_left < 0 or newest + 1 + min(row.num_drafts, num_left) > end


def _goes_on(row: ScheduledSequence) -> bool:
    """Return whether a row surely has tokens left after its loop's current step."""
    sequence = row.sequence
    newest = sequence.progress.last_position + 1 + row.num_drafts
    return newest < sequence.max_length and not (sequence.finalized or sequence.preempted)
