"""Requests from their submission to their end."""

from __future__ import annotations

import math

from legato_engine.core.request_key import RequestKey
from legato_engine.core.results import FinishReason
from legato_engine.errors import InvalidField, PromptTooLong
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.clock import Clock
from legato_engine.scheduler.prefill_planner import PrefillPlanner
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.scheduler.sink import Sink
from legato_engine.scheduler.step_record import FlightRecorder
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import NO_INPUTS, Sequence, SequenceStatus


class LiveRequests:
    """Sequences that have not ended, by request id.

    Every sequence ends in `finalize`, as a zombie while launches in flight name it.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        queue: WaitingQueue[Sequence],
        prefill: PrefillPlanner,
        running: RunningSequences,
        *,
        clock: Clock,
        sink: Sink,
        recorder: FlightRecorder | None,
    ) -> None:
        self._manager = manager
        self._queue = queue
        self._prefill = prefill
        self._running = running
        self._clock = clock
        self._sink = sink
        self._recorder = recorder
        self._live: dict[RequestKey, Sequence] = {}
        self._next_deadline = math.inf  # at most the earliest deadline of a live sequence

    def __len__(self) -> int:
        return len(self._live)

    def check(self, sequence: Sequence) -> None:
        """Refuse what can never run.

        Raises:
            InvalidField: its request id is in use.
            PromptTooLong: it does not fit the context or the KV cache.
        """
        assert sequence.prompt, f"sequence {sequence.seq_id} has no prompt token to sample from"
        assert sequence.task.max_tokens > 0, f"sequence {sequence.seq_id} may not sample a token"
        if sequence.request.request_id in self._live:
            raise InvalidField("request id is in use", field="request_id")
        if not self._manager.fits_ever(sequence):
            raise PromptTooLong(
                "prompt and max_tokens do not fit the context",
                limit=self._manager.max_length,
                actual=sequence.max_length,
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that was checked."""
        request = sequence.request
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        self._live[request.request_id] = sequence
        self._prefill.add(sequence)
        if self._recorder is not None:
            self._recorder.submitted(sequence)

    def abort(self, request_id: RequestKey) -> None:
        """End a request without further events; ignore unknown ids."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self.finalize(sequence)

    def stop(self, request_id: RequestKey) -> None:
        """End a request with the result so far; ignore unknown ids.

        The sink receives `started`, unless it has, and `done`.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return
        now = self._clock.now()
        if sequence.num_committed == 0:
            sequence.timing.first_token = now
        if sequence.status is SequenceStatus.WAITING and not sequence.pages.num_preemptions:
            sequence.timing.prefill_start = now
            self._sink.started(sequence)
        if not sequence.finalized:
            self.finalize(sequence)
            self._sink.done(sequence, FinishReason.CANCELLED)

    def expired(self) -> list[Sequence]:
        """Return those whose deadline has passed; ending one may end others."""
        now = self._clock.now()
        if now < self._next_deadline:
            return []
        late, left = [], math.inf
        for sequence in self._live.values():
            if sequence.request.ends_by <= now:
                late.append(sequence)
            else:
                left = min(left, sequence.request.ends_by)
        self._next_deadline = left
        return late

    def finalize(self, sequence: Sequence) -> None:
        """End a sequence; release it unless a launch in flight names it."""
        assert not sequence.finalized, f"sequence {sequence.seq_id} is finalized twice"
        sequence.finalized = True
        del self._live[sequence.request.request_id]
        self._queue.settle(sequence)
        if sequence.progress.last_position < 0:
            self._prefill.remove(sequence)
        if sequence.status is not SequenceStatus.WAITING:
            self._running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        if self._recorder is not None:
            self._recorder.ended(sequence)
        sequence.inputs = NO_INPUTS  # observers may keep the launch, and with it the sequence
