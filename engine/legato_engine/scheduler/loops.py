"""When several decode steps are one launch."""

from __future__ import annotations

import dataclasses

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.launch import LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.output_processor import OutputProcessor
from legato_engine.scheduler.runner import LoopRunner, RowTokens
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.scheduler.step_record import StepRecord
from legato_engine.sequence import Sequence
from legato_engine.speculative.block_policy import PRESSURE_RATIO

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

    With speculation a step commits several tokens of a row. Then a loop's positions are draft
    tokens that it may accept, and it ends on the device after a row's last token, or where a row
    has too few positions left for a block.
    """

    def __init__(
        self,
        runner: LoopRunner,
        manager: KVCacheManager,
        running: RunningSequences,
        decode: DecodePlanner,
        *,
        speculates: bool,
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._running = running
        self._decode = decode
        self._speculates = speculates
        self._num_decodes = 0  # since the last other launch
        self._num_needed = 0  # of them, before the next loop

    def launched(self, plan: Plan) -> None:
        self._num_decodes = self._num_decodes + 1 if plan.kind is LaunchKind.DECODE else 0
        if plan.loops and self._speculates:
            for row in plan.rows:
                row.sequence.progress.inflight_drafts += plan.num_steps - 1

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
        lengths = [_tokens_left(row.sequence) for row in plan.rows]
        fewest = _FEWEST_STEPS + max(_latest_block(row.sequence) for row in plan.rows)
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
        return dataclasses.replace(plan, num_steps=steps, loops=steps > 1)

    def _most_pages(self) -> int:
        """The most that a loop may take; draft tokens must leave one to each row, and not be what
        puts the pool under pressure.
        """
        manager = self._manager
        most = manager.pages_available // _SHARE
        if not self._speculates:
            return most
        relaxed = int(PRESSURE_RATIO * manager.pages_total) - manager.pages_used
        return min(most, relaxed, manager.pages_available - len(self._running))

    def _reserve(self, row: ScheduledSequence, steps: int) -> int:
        """Take pages for so many steps; return the number that there are pages for."""
        sequence = row.sequence
        if self._speculates:
            reserved = self._manager.reserve_draft(sequence, row.end_after(steps))
            assert reserved, f"no pages for {steps} steps of sequence {sequence.seq_id}"
            return steps
        while row.position + steps > sequence.pages.capacity and self._manager.grow(sequence):
            pass
        return sequence.pages.capacity - row.position

    def is_ending(self, record: StepRecord) -> bool:
        """Whether a loop has no further step for some row, after the one that it is in. With
        speculation it may go on, if the device accepts fewer tokens than in its latest step.
        """
        rows = record.launch.plan.rows
        if any(row.sequence.finalized for row in rows) or _is_in_last_step(record):
            return True
        return self._speculates and any(_may_end(row, record) for row in rows)

    def behind(self, record: StepRecord) -> Plan | None:
        """The next decode of a loop's rows, wherever it ends, to be launched before it has.

        Rows without a page for it are left out.
        """
        if self._runner.loops_differ:
            return None  # a row that loops always does
        if self._speculates:
            goes_on = any(_goes_on(row, record) for row in record.launch.plan.rows)
            return self._decode.plan() if goes_on and self.is_ending(record) else None
        rows = {
            index: scheduled
            for index, row in enumerate(record.launch.plan.rows)
            if (scheduled := self._behind(row, record)) is not None
        }
        if not rows:
            return None
        return Plan(LaunchKind.DECODE, tuple(rows.values()), behind=tuple(rows))

    def settle(self, record: StepRecord, behind: Plan | None, outputs: OutputProcessor) -> None:
        """After a loop, take back what the launch behind it has not run, rows that had ended; with
        speculation, what the loop has not.
        """
        if self._speculates:
            self._settle_drafts(record.launch.plan, behind, outputs)
        elif behind is not None:
            self._settle_behind(record, behind)

    def _settle_drafts(self, loop: Plan, behind: Plan | None, outputs: OutputProcessor) -> None:
        in_flight = {row.sequence: row.num_drafts for row in behind.rows} if behind else {}
        for row in loop.rows:
            sequence = row.sequence
            if not sequence.finalized:
                num_drafts = sequence.progress.inflight_drafts - in_flight.get(sequence, 0)
                sequence.settle_drafts(num_drafts, 0)
                outputs.commit_pages(sequence, row.num_drafts, pressed=False)

    def _settle_behind(self, record: StepRecord, behind: Plan) -> None:
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
        record.zombies = sum(row.sequence.finalized for row in rows)
        num_tokens = outputs.num_tokens
        for row, output in zip(rows, tokens, strict=True):
            if not row.sequence.finalized:
                self._process(record, row, output, outputs)
        record.num_followed += 1
        record.tokens += outputs.num_tokens - num_tokens
        return True

    def _process(
        self,
        record: StepRecord,
        row: ScheduledSequence,
        output: RowTokens,
        outputs: OutputProcessor,
    ) -> None:
        sequence, progress = row.sequence, row.sequence.progress
        is_counted = not record.num_followed  # the launch counts its first step
        if self._speculates:
            if not is_counted:  # what is certain of a step was a draft of the launch
                sequence.settle_drafts(1, 1)
            outputs.process_block(record, row, output, len(output.tokens) - 1)
            return
        if not is_counted:
            progress.num_launched += 1
            progress.last_position += 1
        (token,) = output.tokens
        outputs.process(sequence, token)

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


def _is_in_last_step(record: StepRecord) -> bool:
    return record.num_followed >= record.launch.plan.num_steps - 1


def _may_end(row: ScheduledSequence, record: StepRecord) -> bool:
    """Whether a loop that drafts ends with the step that it is in, if this row accepts as many
    tokens as it has drafted in its latest step.
    """
    end = row.reach(record.launch.plan.num_steps)
    newest = _newest_fed(row, record) + 1 + min(_latest_block(row.sequence), row.num_drafts)
    num_left = row.sequence.max_length - 1 - newest
    return num_left < 0 or newest + 1 + min(row.num_drafts, num_left) > end


def _goes_on(row: ScheduledSequence, record: StepRecord) -> bool:
    """Whether a row has tokens left after the step that its loop is in, whatever that accepts."""
    sequence = row.sequence
    newest = _newest_fed(row, record) + 1 + row.num_drafts
    return newest < sequence.max_length and not (sequence.finalized or sequence.preempted)


def _newest_fed(row: ScheduledSequence, record: StepRecord) -> int:
    """The position of the newest token that a loop's step in flight feeds."""
    return row.sequence.progress.last_position - (not record.num_followed)


def _latest_block(sequence: Sequence) -> int:
    """Draft tokens of its latest verification."""
    stats = sequence.draft_stats
    return stats.block_size_history[-1] if stats is not None and stats.block_size_history else 0


def _tokens_left(sequence: Sequence) -> int:
    return sequence.task.max_tokens - sequence.progress.num_launched


def _may_loop(sequence: Sequence) -> bool:
    """Its constraint needs no host, nor do alternatives, and it was prefilled."""
    task = sequence.task
    known = task.follows_table or not task.constrained
    known = known and not sequence.request.top_logprobs
    return known and not sequence.preempted and sequence.progress.last_position >= 0
