"""What committed tokens make of their sequences: read by their tasks, told, and ended by them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from legato_engine.core import FinishReason
from legato_engine.errors import InternalError, LegatoError
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.admission import Admission
from legato_engine.scheduler.block_sizes import BlockSizes
from legato_engine.scheduler.clock import Clock
from legato_engine.scheduler.launch import ScheduledSequence
from legato_engine.scheduler.runner import RowTokens
from legato_engine.scheduler.sink import Sink
from legato_engine.scheduler.step_record import StepRecord
from legato_engine.sequence import Sequence, SequenceStatus
from legato_engine.tasks import SampledToken

NOT_FINITE = -1
"""The token id that reports logits that were not finite."""

log = logging.getLogger(__name__)


class OutputProcessor:
    """Gives live sequences their tokens, in the order of the commits."""

    def __init__(
        self,
        manager: KVCacheManager,
        admission: Admission,
        clock: Clock,
        sink: Sink,
        block_sizes: BlockSizes | None,
        *,
        finalize: Callable[[Sequence], None],
    ) -> None:
        """`finalize` ends a sequence, before its listener is told."""
        self._manager = manager
        self._admission = admission
        self._clock = clock
        self._sink = sink
        self._block_sizes = block_sizes
        self._finalize = finalize
        self.num_tokens = 0  # read so far, by all sequences

    def prefilled(self, sequence: Sequence, token: SampledToken) -> None:
        """Note what the commit of a prefill makes true of a live sequence, its token unread."""
        sequence.status = SequenceStatus.RUNNING
        if token.token_id == NOT_FINITE:  # what it read may be what is broken
            self._manager.invalidate(sequence)
        elif sequence.num_committed == 0:
            sequence.timing.first_token = self._clock.now()

    def read_block(self, record: StepRecord, row: ScheduledSequence, output: RowTokens) -> None:
        """Commit a live sequence's tokens, none behind the one that ends it, and their pages."""
        sequence, accepted = row.sequence, len(output.tokens) - 1
        assert accepted >= 0, f"sequence {sequence.seq_id} lives behind its last token"
        record.drafted += output.num_drafted
        record.accepted += accepted
        record.rejected += accepted < output.num_drafted
        sequence.settle_drafts(row.num_drafts, accepted)
        if self._block_sizes is not None and sequence.may_draft:
            self._block_sizes.learn(sequence, accepted, output.num_drafted)
        for token in output.tokens:
            self.read(sequence, token)
            if sequence.finalized:
                break
        end = (
            sequence.progress.last_position
        )  # the launch behind may write to what it has proposed for
        self._manager.commit_to(sequence, end, reserved=end + sequence.progress.inflight_drafts)

    def read(self, sequence: Sequence, token: SampledToken) -> None:
        """Commit one token of a live sequence, and end it when the token does."""
        task = sequence.task
        if token.token_id == NOT_FINITE:
            self._manager.invalidate(sequence, sequence.prompt_length)
            self.fail(sequence, InternalError("non-finite logits", reason="NUMERIC"))
            return
        try:
            events = task.consume(token)
        except Exception:  # a skill's bug ends its own request, not its batch mates
            log.exception("task of request %s failed", sequence.request.request_id.name)
            self.fail(sequence, InternalError("the task could not read its tokens"))
            return
        self.num_tokens += 1
        sequence.tokens.append((token.token_id, token.payload))
        if events:
            self._sink.delta(sequence, events)
        if task.finish_reason is not None or sequence.num_committed == task.max_tokens:
            self._complete(sequence)

    def fail(self, sequence: Sequence, error: LegatoError) -> None:
        """End a live sequence without its result."""
        self._finalize(sequence)
        self._sink.failed(sequence, error)

    def _complete(self, sequence: Sequence) -> None:
        """End a sequence behind its last token, unless its listener has just given it up."""
        if sequence.finalized:
            return
        self._finalize(sequence)
        self._admission.completed(sequence)
        self._sink.done(sequence, sequence.task.finish_reason or FinishReason.LENGTH)
