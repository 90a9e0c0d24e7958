"""Decode loops: several decode steps in one launch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import LaunchKind, Plan, ScheduledSequence, StepRecord
from legato_engine.scheduler.decode import DecodePlanner, RunningSequences
from legato_engine.scheduler.interfaces import LoopPoll, LoopRunner, Pause
from legato_engine.scheduler.output import OutputProcessor
from legato_engine.sequence import RowTokens, Sequence
from legato_engine.speculation import PRESSURE_RATIO

MAX_STEPS = 256
"""Maximum steps of a loop."""

_MIN_STEPS = 4  # fewer are faster as single steps
_MAX_PAGE_FRACTION = 0.5  # of the free pages, for one loop


@dataclasses.dataclass(eq=False)
class Loops(ABC):
    """Policy that turns decodes whose rows need no host between steps into loops.

    Subclasses decide how.

    Only the device knows how far a loop is. It stops early when a request waits or when one of its
    own rows has ended: the next launch is queued behind it with the loop's other rows, whose
    positions the device fills in. A request that interrupted a loop may be one of many, so a number
    of single decodes must run before the next loop.
    """

    runner: LoopRunner
    manager: KVCacheManager
    running: RunningSequences
    decode: DecodePlanner
    pause: Pause
    _num_decodes: int = 0  # since the last launch of another kind
    _min_decodes: int = 0  # of `_num_decodes`, before the next loop

    def record_launch(self, plan: Plan) -> None:
        self._num_decodes = self._num_decodes + 1 if plan.kind is LaunchKind.DECODE else 0

    def extend(self, plan: Plan, before: Plan | None, *, only_decodes: bool) -> Plan:
        """Turn a decode of all running sequences into a loop if they have enough tokens left.

        The loop has as many steps as there are tokens and pages for. Return any other plan
        unchanged. `before` is the plan in flight.
        """
        if plan.kind is not LaunchKind.DECODE or not only_decodes:
            return plan
        if not all(_may_loop(row.sequence) for row in plan.rows):
            return plan
        if len(plan.rows) < len(self.running) or self._num_decodes < self._min_decodes:
            return plan
        lengths = [tokens_left(row.sequence) for row in plan.rows]
        min_steps = _MIN_STEPS + max(latest_block(row.sequence) for row in plan.rows)
        if min(lengths) < min_steps or plan.under_pressure:
            return plan
        max_tokens_per_step = 1 + max(row.num_drafts for row in plan.rows)
        steps = min(MAX_STEPS, max(lengths), min(lengths) * max_tokens_per_step)
        max_pages = self._max_pages()
        while steps >= min_steps and self._num_missing_pages(plan, steps) > max_pages:
            steps //= 2
        if steps < min_steps:
            return plan
        for row in plan.rows:
            steps = min(steps, self._reserve(row, steps))
        after = () if before is None else self._after(plan, before)
        return dataclasses.replace(plan, num_steps=steps, after=after)

    def poll(
        self, record: StepRecord, outputs: OutputProcessor, *, stop: bool, is_interrupted: bool
    ) -> LoopPoll | None:
        """Wait for the next step and process its tokens; return why there are none, or None.

        A loop may abort before any of its steps: its rows continue after the last step that ran.

        Args:
            record: the loop's.
            outputs: processes the tokens.
            stop: stop after the current step: a launch that cannot be queued behind the loop is
                waiting.
            is_interrupted: `stop`, or the launch behind the loop is not a decode.
        """
        launch = record.launch
        rows = launch.plan.rows
        if stop or any(row.sequence.finalized for row in rows):
            self.stop(record)
        if not record.num_steps_read:
            self._min_decodes = 0
        if is_interrupted:
            steps = self.runner.break_even_steps(launch)
            if record.num_steps_read < steps:
                self._min_decodes = steps
        tokens = self.runner.poll_loop(launch, self.pause)
        if isinstance(tokens, LoopPoll):
            return tokens
        record.zombies = sum(row.sequence.finalized for row in rows)
        num_tokens = outputs.num_tokens
        for row, output in zip(rows, tokens, strict=True):
            if not row.sequence.finalized:
                self._process(record, row, output, outputs)
        record.num_steps_read += 1
        record.tokens += outputs.num_tokens - num_tokens
        return None

    def stop(self, record: StepRecord) -> None:
        self.runner.stop_loop(record.launch)

    def is_ending(self, record: StepRecord) -> bool:
        """Return whether the current step is the last for some row."""
        finalized = any(row.sequence.finalized for row in record.launch.plan.rows)
        return finalized or is_in_last_step(record)

    @abstractmethod
    def plan_behind(self, record: StepRecord) -> Plan | None:
        """Plan the next decode of a loop's rows, to be launched before the loop ends.

        It is valid after any step of the loop. Rows without a page for it are left out.
        """

    @abstractmethod
    def roll_back(self, record: StepRecord, behind: Plan | None, outputs: OutputProcessor) -> None:
        """Uncount the steps that neither a finished loop nor the launch behind it has run."""

    @abstractmethod
    def _after(self, plan: Plan, before: Plan) -> tuple[int, ...]:
        """Return per-row indices into the previous launch's tokens.

        Return () if the device cannot advance the constraints.
        """

    def _max_pages(self) -> int:
        """Return the maximum pages that a loop may allocate."""
        return int(self.manager.pages_available * _MAX_PAGE_FRACTION)

    @abstractmethod
    def _reserve(self, row: ScheduledSequence, steps: int) -> int:
        """Allocate pages for `steps` steps; return the number of steps that have pages."""

    @abstractmethod
    def _process(
        self,
        record: StepRecord,
        row: ScheduledSequence,
        output: RowTokens,
        outputs: OutputProcessor,
    ) -> None:
        """Count a step that was read and process its tokens."""

    def _num_missing_pages(self, plan: Plan, steps: int) -> int:
        """Return the pages that the rows lack for `steps` steps."""
        size = self.manager.page_size
        needed = (
            -(-row.end_after(steps) // size) - len(row.sequence.pages.ids) for row in plan.rows
        )
        return sum(max(0, count) for count in needed)


def max_new_pages(num_rows: int, page_size: int, max_block: int = 0) -> int:
    return num_rows * (-(-(MAX_STEPS + max_block) // page_size) + 1)


def is_in_last_step(record: StepRecord) -> bool:
    return record.num_steps_read >= record.launch.plan.num_steps - 1


def latest_block(sequence: Sequence) -> int:
    """Return the number of draft tokens in the sequence's latest verification."""
    history = sequence.draft_stats.block_size_history
    return history[-1] if history else 0


def tokens_left(sequence: Sequence) -> int:
    return sequence.task.max_tokens - sequence.progress.num_launched


def _may_loop(sequence: Sequence) -> bool:
    """Return whether a row is prefilled and needs no host for constraints and logprobs."""
    task = sequence.task
    needs_host = task.constrained and not task.uses_transition_table
    needs_host = needs_host or bool(sequence.request.top_logprobs)
    return not needs_host and not sequence.preempted and sequence.progress.last_position >= 0


# ---------------------------------------------------------------- single loops


class SingleLoops(Loops):
    """Loops without speculation; each step commits one token of each row."""

    def roll_back(self, record: StepRecord, behind: Plan | None, outputs: OutputProcessor) -> None:
        """Uncount rows that had ended and that the launch behind the loop therefore skipped."""
        if behind is None:
            return
        for index, row in zip(behind.behind, behind.decodes, strict=True):
            next_position = record.launch.plan.rows[index].position + record.num_steps_read
            if next_position > row.position + row.slack:
                row.sequence.roll_back_decode()

    def plan_behind(self, record: StepRecord) -> Plan | None:
        rows = {
            index: scheduled
            for index, row in enumerate(record.launch.plan.rows)
            if (scheduled := self._plan_row_behind(row, record)) is not None
        }
        if not rows:
            return None
        return Plan(LaunchKind.DECODE, tuple(rows.values()), behind=tuple(rows))

    def _plan_row_behind(
        self, row: ScheduledSequence, record: StepRecord
    ) -> ScheduledSequence | None:
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
            if not self.manager.grow(sequence):
                return None
        return ScheduledSequence(sequence, position, slack=last - position)

    def _after(self, plan: Plan, before: Plan) -> tuple[int, ...]:
        if not plan.constrained:
            return ()
        indices = {row.sequence: index for index, row in enumerate(before.counted_rows)}
        return tuple(indices.get(row.sequence, -1) for row in plan.rows)

    def _reserve(self, row: ScheduledSequence, steps: int) -> int:
        pages = row.sequence.pages
        while row.position + steps > pages.capacity and self.manager.grow(row.sequence):
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


class DraftingLoops(Loops):
    """Loops with speculation; all positions of a loop are draft tokens that it may accept.

    The device ends a loop after any row's last token, or when a row has too few positions left for
    a block.
    """

    def record_launch(self, plan: Plan) -> None:
        super().record_launch(plan)
        if plan.is_loop:
            for row in plan.rows:
                row.sequence.progress.inflight_drafts += row.num_drafts + plan.num_steps

    def is_ending(self, record: StepRecord) -> bool:
        """Return whether the current step may be the last for some row.

        The loop still continues if the device accepts fewer tokens than in its latest step.
        """
        rows = record.launch.plan.rows
        return super().is_ending(record) or any(_may_end(row, record) for row in rows)

    def roll_back(self, record: StepRecord, behind: Plan | None, outputs: OutputProcessor) -> None:
        """Uncount the draft tokens of the steps that the loop has not run."""
        in_flight = {row.sequence: row.num_drafts for row in behind.rows} if behind else {}
        for row in record.launch.plan.rows:
            sequence = row.sequence
            if not sequence.finalized:
                num_drafts = sequence.progress.inflight_drafts - in_flight.get(sequence, 0)
                sequence.commit_drafts(num_drafts, 0)
                outputs.commit_pages(sequence, row.num_drafts, pressed=False)

    def _after(self, plan: Plan, before: Plan) -> tuple[int, ...]:
        """Return no indices: the host must first know how many tokens were accepted."""
        return ()

    def plan_behind(self, record: StepRecord) -> Plan | None:
        has_next = any(_has_next(row) for row in record.launch.plan.rows)
        return self.decode.plan() if has_next and self.is_ending(record) else None

    def _max_pages(self) -> int:
        """Leave a page to each row, and keep the pool of pages below the pressure limit."""
        manager = self.manager
        relaxed = int(PRESSURE_RATIO * manager.pages_total) - manager.pages_used
        return min(super()._max_pages(), relaxed, manager.pages_available - len(self.running))

    def _reserve(self, row: ScheduledSequence, steps: int) -> int:
        reserved = self.manager.reserve_draft(row.sequence, row.end_after(steps))
        assert reserved, f"no pages for {steps} steps of sequence {row.sequence.seq_id}"
        return steps

    def _process(
        self,
        record: StepRecord,
        row: ScheduledSequence,
        output: RowTokens,
        outputs: OutputProcessor,
    ) -> None:
        row.sequence.commit_drafts(1, 1)  # a step's own token counted as a draft of the launch
        outputs.process_block(record, row, output, len(output.tokens) - 1)


def _may_end(row: ScheduledSequence, record: StepRecord) -> bool:
    """Return whether the loop ends with its current step if this row accepts all its drafts.

    The row is assumed to draft as many tokens as in its latest step.
    """
    sequence, end = row.sequence, row.reach(record.launch.plan.num_steps)
    accepted = min(latest_block(sequence), row.num_drafts)
    newest = sequence.progress.last_position + 1 + accepted
    num_left = sequence.max_length - 1 - newest
    return num_left < 0 or newest + 1 + min(row.num_drafts, num_left) > end


def _has_next(row: ScheduledSequence) -> bool:
    """Return whether a row certainly has tokens left after its loop's current step."""
    sequence = row.sequence
    newest = sequence.progress.last_position + 1 + row.num_drafts
    return newest < sequence.max_length and not (sequence.finalized or sequence.preempted)
