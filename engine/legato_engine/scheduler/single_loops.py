"""Loops whose steps commit one token of each row."""

from __future__ import annotations

from legato_engine.scheduler.launch import LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.loops import Loops, is_in_last_step, tokens_left
from legato_engine.scheduler.output_processor import OutputProcessor
from legato_engine.scheduler.runner import RowTokens
from legato_engine.scheduler.step_record import StepRecord


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
