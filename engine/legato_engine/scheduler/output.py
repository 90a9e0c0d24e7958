"""Output processing: commit tokens to tasks, emit events, finish sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

import structlog

from legato_engine.errors import InternalError, LegatoError, NumericError
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import LaunchKind, ScheduledSequence, StepRecord
from legato_engine.scheduler.interfaces import Clock
from legato_engine.scheduler.queue import Admission
from legato_engine.sequence import RowTokens, SampledToken, Sequence
from legato_engine.speculation import BlockSizes
from legato_engine.types import Event, FinishReason


class Sink(Protocol):
    """Receiver of a request's events in order: `started`, `delta`*, then `done` or `failed`.

    A request may fail before it started. An aborted request has no further events. Calls are made
    inside `Scheduler.step` or `stop` and may call `Scheduler.abort`.
    """

    def started(self, sequence: Sequence) -> None:
        """Report that its prefill, or the first part of its image, was launched."""

    def delta(self, sequence: Sequence, events: Many[Event]) -> None: ...

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None: ...

    def failed(self, sequence: Sequence, error: LegatoError) -> None: ...


class SilentSink:
    """Sink that ignores events and raises failures."""

    def started(self, sequence: Sequence) -> None:
        pass

    def delta(self, sequence: Sequence, events: Many[Event]) -> None:
        pass

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        pass

    def failed(self, sequence: Sequence, error: LegatoError) -> None:
        raise error


# ---------------------------------------------------------------- output processor

NOT_FINITE = -1
"""The token id of non-finite logits."""

_log = structlog.get_logger()


@dataclasses.dataclass(slots=True, eq=False)
class OutputProcessor:
    """Processor of tokens in the order of the commits."""

    manager: KVCacheManager
    admission: Admission[Sequence]
    clock: Clock
    sink: Sink
    block_sizes: BlockSizes | None
    finalize: Callable[[Sequence], None]  # ends a sequence, before the sink is called
    num_tokens: int = 0

    def process_launch(self, record: StepRecord, outputs: list[RowTokens]) -> None:
        """Process the tokens of a launch that is not a loop; count them in its record."""
        plan = record.launch.plan
        num_tokens, num_decodes = self.num_tokens, len(plan.decodes)
        num_counted = len(plan.counted_rows)
        speculates = self.block_sizes is not None and plan.kind is LaunchKind.DECODE
        for index, (row, output) in enumerate(zip(plan.sampled_rows, outputs, strict=True)):
            sequence = row.sequence
            if sequence.finalized:
                record.zombies += 1
            elif speculates:
                self.process_block(record, row, output, row.num_drafts)
            elif index < num_counted:
                if index >= num_decodes:
                    self._prefilled(sequence, output.tokens[0])
                if sequence.task.grammar is None:
                    self.process(sequence, output.tokens[0])
                else:
                    self._process_all(record, row, output)
        record.tokens = self.num_tokens - num_tokens

    def roll_back(self, record: StepRecord, *, before_loop: bool) -> None:
        """Uncount decodes that ran behind an aborted loop.

        `before_loop`: the next launch is a loop, which ends one position later than it would have
        without them.
        """
        plan = record.launch.plan
        for row in plan.rows:
            sequence = row.sequence
            sequence.roll_back_decode()  # also if it has ended: its pages may be cached
            if sequence.finalized:
                record.zombies += 1
            elif self.block_sizes is not None:
                sequence.commit_drafts(row.num_drafts - before_loop, 0)
                self.commit_pages(sequence, row.num_drafts, pressed=plan.under_pressure)

    def _prefilled(self, sequence: Sequence, token: SampledToken) -> None:
        """Update the timing at a prefill's commit, before its token is processed."""
        if token.token_id == NOT_FINITE:  # the cached prefix may have caused it
            self.manager.invalidate(sequence)
        elif sequence.num_committed == 0:
            sequence.timing.first_token = self.clock.now()

    def process_block(
        self, record: StepRecord, row: ScheduledSequence, output: RowTokens, num_committed: int
    ) -> None:
        """Commit a decode's accepted draft tokens, its own token and their pages.

        `num_committed` of the launch's draft tokens are no longer in flight, accepted or not.
        """
        pressed = record.launch.plan.under_pressure
        sequence, num_forced = row.sequence, len(row.forced)
        assert output.tokens, f"launch returned no token for live sequence {sequence.seq_id}"
        num_drafted, num_accepted = output.num_drafted, len(output.tokens) - 1
        if num_forced:
            num_drafted = max(0, num_drafted - num_forced)
            num_accepted = max(0, num_accepted - num_forced)
        record.blocks.append(num_drafted)
        record.drafted += num_drafted
        record.accepted += num_accepted
        record.rejected += num_accepted < num_drafted
        sequence.commit_drafts(num_committed, num_accepted)
        if self.block_sizes is not None and sequence.may_draft:
            self.block_sizes.learn(sequence, output)
        self._process_all(record, row, output)
        is_complete = len(output.tokens) > num_forced or sequence.finalized
        assert is_complete, "a forced token was not sampled"
        self.commit_pages(sequence, row.num_drafts, pressed=pressed)

    def commit_pages(self, sequence: Sequence, num_drafts: int, *, pressed: bool) -> None:
        """Free pages of draft tokens that no launch in flight may write."""
        end = sequence.progress.last_position
        reserved = end + sequence.progress.inflight_drafts
        if not pressed:  # keep the next launch's pages, too: freeing them is not worth it
            reserved += 1 + num_drafts
        self.manager.commit_to(sequence, end, reserved=reserved)

    def _process_all(self, record: StepRecord, row: ScheduledSequence, output: RowTokens) -> None:
        """Process a row's tokens, and those that its answer certainly ends with, up to its end.

        The latter have no keys and values, which is why they must be the last.
        """
        sequence, num_tokens = row.sequence, self.num_tokens
        for token in output.tokens:
            self.process(sequence, token)
            if sequence.finalized:
                break
        task = sequence.task
        if task.grammar is None:
            return
        record.forced += min(self.num_tokens - num_tokens, len(row.forced))
        closing = () if sequence.finalized or task.has_payload else task.grammar.closing()
        for token_id in closing:
            self.process(sequence, SampledToken.forced(token_id))
            record.forced += 1
            if sequence.finalized:
                return
        if closing:
            self.fail(sequence, InternalError("the task goes on after the end of its grammar"))

    def process(self, sequence: Sequence, token: SampledToken) -> None:
        task = sequence.task
        if token.token_id == NOT_FINITE:
            self.manager.invalidate(sequence, sequence.prompt_length)
            self.fail(sequence, NumericError("the logits are not finite"))
            return
        try:
            events = task.consume(token)
        except LegatoError as error:
            self.fail(sequence, error)
            return
        except Exception as error:  # noqa: BLE001 - a task's bug ends its own request only
            _log.error("task_failed", request_id=sequence.request.request_id.name, exc_info=error)
            self.fail(sequence, InternalError("the task could not read its tokens"))
            return
        self.num_tokens += 1
        is_last = sequence.commit(token)
        if events:
            self.sink.delta(sequence, events)
        if is_last or task.finish_reason is not None:
            self._complete(sequence)

    def fail(self, sequence: Sequence, error: LegatoError) -> None:
        self.finalize(sequence)
        self.sink.failed(sequence, error)

    def _complete(self, sequence: Sequence) -> None:
        if sequence.finalized:  # aborted by the sink, during `delta`
            return
        self.finalize(sequence)
        self.admission.wait.record_completion(self.clock.now() - sequence.timing.prefill_start)
        self.sink.done(sequence, sequence.task.finish_reason or FinishReason.LENGTH)
