"""Loops whose steps verify draft tokens, and commit several tokens of a row."""

from __future__ import annotations

from legato_engine.scheduler.launch import Plan, ScheduledSequence
from legato_engine.scheduler.loops import Loops, latest_block
from legato_engine.scheduler.output_processor import OutputProcessor
from legato_engine.scheduler.runner import RowTokens
from legato_engine.scheduler.step_record import StepRecord
from legato_engine.speculative.block_policy import PRESSURE_RATIO


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
        """None: it would have to know how many tokens were accepted."""
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
    """Whether a loop ends with the step that it is in, if this row accepts as many tokens as it has
    drafted in its latest step.
    """
    sequence, end = row.sequence, row.reach(record.launch.plan.num_steps)
    accepted = min(latest_block(sequence), row.num_drafts)
    newest = sequence.progress.last_position + 1 + accepted
    num_left = sequence.max_length - 1 - newest
    return num_left < 0 or newest + 1 + min(row.num_drafts, num_left) > end


def _goes_on(row: ScheduledSequence) -> bool:
    """Whether a row has tokens left after the step that its loop is in, whatever that accepts."""
    sequence = row.sequence
    newest = sequence.progress.last_position + 1 + row.num_drafts
    return newest < sequence.max_length and not (sequence.finalized or sequence.preempted)
