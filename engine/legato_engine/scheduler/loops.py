"""When several decode steps are one launch."""

from __future__ import annotations

import dataclasses

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.launch import LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.output_processor import OutputProcessor
from legato_engine.scheduler.runner import LoopRunner
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.scheduler.step_record import StepRecord
from legato_engine.sequence import Sequence

MAX_STEPS = 256
"""The most steps of a loop."""

_FEWEST_STEPS = 4  # fewer are faster as single steps
_SETTLED = 8  # steps of a loop that was worth its start and end
_SHARE = 2  # of the free pages, a loop may take one in so many


class Loops:
    """Turns decodes of rows that need no host between steps into loops.

    Only the device knows how far a loop is. It ends early when a request waits or when one of its
    own has ended: then what follows is launched behind it, with its other rows, whose positions the
    device fills in. A request that cut a loop short may be one of many, so decodes must go on for a
    while before the next.
    """

    def __init__(
        self, runner: LoopRunner, manager: KVCacheManager, running: RunningSequences
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._running = running
        self._num_decodes = 0  # since the last other launch
        self._num_needed = 0  # of them, before the next loop

    def launched(self, plan: Plan) -> None:
        self._num_decodes = self._num_decodes + 1 if plan.kind is LaunchKind.DECODE else 0

    def extend(self, plan: Plan, *, only_decodes: bool) -> Plan:
        """Return a decode of all running sequences with as many steps as they have tokens left and
        pages for, if these are enough; any other plan as it is.

        Where loops differ from single steps, any other decode becomes a loop of one step.
        """
        if plan.kind is not LaunchKind.DECODE or not all(_may_loop(s.sequence) for s in plan.rows):
            return plan
        steps = self._extended(plan) if only_decodes else plan
        if self._runner.loops_differ:
            return dataclasses.replace(steps, loops=True)
        return steps

    def _extended(self, plan: Plan) -> Plan:
        if len(plan.rows) < len(self._running) or self._num_decodes < self._num_needed:
            return plan
        steps = min(MAX_STEPS, *(_tokens_left(row.sequence) for row in plan.rows))
        most = self._manager.pages_available // _SHARE
        while steps >= _FEWEST_STEPS and self._num_missing(plan, steps) > most:
            steps //= 2
        if steps < _FEWEST_STEPS:
            return plan
        for row in plan.rows:
            pages = row.sequence.pages
            while row.position + steps > pages.capacity and self._manager.grow(row.sequence):
                pass
            steps = min(steps, pages.capacity - row.position)
        return dataclasses.replace(plan, num_steps=steps, loops=steps > 1)

    def is_ending(self, record: StepRecord) -> bool:
        """Whether a loop has no further step for some row, after the one that it is in."""
        rows = record.launch.plan.rows
        return _is_in_last_step(record) or any(row.sequence.finalized for row in rows)

    def behind(self, record: StepRecord) -> Plan | None:
        """The next decode of a loop's rows, wherever it ends, to be launched before it has.

        Rows without a page for it are left out.
        """
        if self._runner.loops_differ:
            return None  # a row that loops always does
        rows = {
            index: scheduled
            for index, row in enumerate(record.launch.plan.rows)
            if (scheduled := self._behind(row, record)) is not None
        }
        if not rows:
            return None
        return Plan(LaunchKind.DECODE, tuple(rows.values()), behind=tuple(rows))

    def settle(self, record: StepRecord, behind: Plan) -> None:
        """After a loop, take back what the launch behind it has not run: rows that had ended."""
        for index, row in zip(behind.behind, behind.decodes, strict=True):
            next_position = record.launch.plan.rows[index].position + record.num_followed
            if next_position > row.position + row.slack:
                row.sequence.progress.num_launched -= 1
                row.sequence.progress.last_position -= 1

    def _behind(self, row: ScheduledSequence, record: StepRecord) -> ScheduledSequence | None:
        sequence = row.sequence
        num_left = _tokens_left(sequence)
        if sequence.finalized or sequence.preempted or not num_left:
            return None
        position = sequence.progress.last_position
        last = row.position + record.launch.plan.num_steps
        if num_left == last - position:  # it ends if the loop runs all of its steps
            if _is_in_last_step(record):
                return None
            last -= 1
        while last >= sequence.pages.capacity:
            if not self._manager.grow(sequence):
                return None
        return ScheduledSequence(sequence, position, slack=last - position)

    def follow(
        self, record: StepRecord, outputs: OutputProcessor, *, ends: bool, is_cut: bool
    ) -> bool:
        """Wait for the next step and process its tokens; return False when there was none.

        A launch may end before its steps do: the rows go on after the last step that there was.

        `ends`: another launch waits, so the loop ends after the step that it is in; `is_cut`: one
        that is no decode.
        """
        launch = record.launch
        rows = launch.plan.rows
        if ends or any(row.sequence.finalized for row in rows):
            self._runner.end_loop(launch)
        if not record.num_followed:
            self._num_needed = 0
        if is_cut and record.num_followed < _SETTLED:
            self._num_needed = _SETTLED
        tokens = self._runner.next_tokens(launch)
        if tokens is None:
            if not record.num_followed:  # the launch gave up before its first step
                for row in rows:
                    row.sequence.progress.num_launched -= 1
                    row.sequence.progress.last_position -= 1
            return False
        num_tokens = outputs.num_tokens
        record.zombies = sum(row.sequence.finalized for row in rows)
        for row, output in zip(rows, tokens, strict=True):
            sequence = row.sequence
            if sequence.finalized:
                continue
            if record.num_followed:  # the launch counts its first step
                sequence.progress.num_launched += 1
                sequence.progress.last_position += 1
            (token,) = output.tokens
            outputs.process(sequence, token)
        record.num_followed += 1
        record.tokens += outputs.num_tokens - num_tokens
        return True

    def _num_missing(self, plan: Plan, steps: int) -> int:
        """Pages that the rows lack for so many steps."""
        size = self._manager.page_size
        lacking = (row.position + steps - row.sequence.pages.capacity for row in plan.rows)
        return sum(-(-positions // size) for positions in lacking if positions > 0)


def pages_begun(num_rows: int, page_size: int) -> int:
    """The most pages that begin in a loop of so many rows."""
    return num_rows * (-(-MAX_STEPS // page_size) + 1)


def _is_in_last_step(record: StepRecord) -> bool:
    return record.num_followed >= record.launch.plan.num_steps - 1


def _tokens_left(sequence: Sequence) -> int:
    return sequence.task.max_tokens - sequence.progress.num_launched


def _may_loop(sequence: Sequence) -> bool:
    """Its constraint needs no host, nor do alternatives, and it was prefilled."""
    task = sequence.task
    known = task.follows_table or not task.constrained
    known = known and not sequence.request.top_logprobs
    return known and not sequence.preempted and sequence.progress.last_position >= 0
