"""The tick: launch ahead, commit the oldest, then finalize the newest."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence as Many

from legato_engine.core import FinishReason, Request
from legato_engine.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    InternalError,
    InvalidField,
    LegatoError,
    PromptTooLong,
    QueueFull,
)
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.messages import Load
from legato_engine.scheduler.clock import Clock
from legato_engine.scheduler.decode import DecodePlanner
from legato_engine.scheduler.launch import Launch, LaunchKind, Plan
from legato_engine.scheduler.pipeline import Pipeline
from legato_engine.scheduler.prefill import PrefillPlanner
from legato_engine.scheduler.runner import Runner
from legato_engine.scheduler.sink import Sink
from legato_engine.scheduler.step_record import Observer, StepRecord
from legato_engine.scheduler.wait_estimate import WaitEstimate
from legato_engine.sequence import Sequence, SequenceStatus
from legato_engine.tasks import SampledToken

FREE = 0
"""The constraint that allows every token."""

NOT_FINITE = -1
"""The token id that reports logits that were not finite."""

log = logging.getLogger(__name__)


class Scheduler:
    """Runs sequences through the pipeline; single-threaded, owns all of its state.

    A sequence ends in one place, `_finalize`, whatever ended it. If launches in flight still name
    it then, it rides along as a zombie and `_commit` releases it behind the last of them.
    """

    def __init__(
        self,
        runner: Runner,
        manager: KVCacheManager,
        pipeline: Pipeline,
        clock: Clock,
        sink: Sink,
        *,
        max_waiting: int = 256,
        max_prefill_rows: int = 1,
        max_overtakes: int = 16,
        prefills_per_decode: int = 1,
        observer: Observer | None = None,
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._pipeline = pipeline
        self._clock = clock
        self._sink = sink
        self._observer = observer
        self._max_waiting = max_waiting
        self._prefills_per_decode = prefills_per_decode
        self._prefill = PrefillPlanner(
            manager, max_prefill_rows=max_prefill_rows, max_overtakes=max_overtakes
        )
        self._decode = DecodePlanner()
        self._wait = WaitEstimate()
        self._live: dict[str, Sequence] = {}  # by request id: all that are not finalized
        self._running: list[Sequence] = []  # of these, those whose prefill was launched
        self._records: deque[StepRecord] = deque()  # one per launch in flight, same order
        self._prefill_streak = 0  # prefills launched since the last decode
        self._next_deadline = math.inf  # no live sequence has an earlier one
        self.steps_committed = 0

    # ------------------------------------------------------------ requests in

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises `PromptTooLong` if it can never fit, `QueueFull` if too many wait, and
        `DeadlineUnreachable` if the predicted wait is longer than the time left.
        """
        request = sequence.request
        assert sequence.prompt, "a prefill needs a prompt token to take its logits from"
        assert sequence.task.max_tokens > 0, "a task samples at least one token"
        if request.request_id in self._live:
            raise InvalidField("request id is in use", field="request_id")
        self._check_room(sequence)
        if request.deadline is not None:
            self._check_deadline(request.deadline)
            self._next_deadline = min(self._next_deadline, request.deadline)
        self._live[request.request_id] = sequence
        self._prefill.add(sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._finalize(sequence)

    def check_queue(self, preparing: int = 0) -> None:
        """Raise `QueueFull` when those who wait and `preparing` more leave no place for another."""
        if len(self._prefill) + preparing >= self._max_waiting:
            raise QueueFull(
                "the waiting queue is full",
                limit=self._max_waiting,
                retry_after_ms=max(1, round(self.estimated_wait() * 1000)),
            )

    def _check_room(self, sequence: Sequence) -> None:
        if not self._manager.fits_ever(sequence):
            raise PromptTooLong(
                "prompt and max_tokens do not fit the context",
                limit=self._manager.max_length,
                actual=sequence.max_length,
            )
        self.check_queue()

    def _check_deadline(self, deadline: float) -> None:
        wait = self._predict_wait()
        if wait is not None and wait > deadline - self._clock.now():
            raise DeadlineUnreachable(
                "the predicted wait is longer than the time left",
                estimated_wait_ms=round(wait * 1000),
            )

    # ------------------------------------------------------------ state out

    @property
    def idle(self) -> bool:
        """Nothing lives and nothing is in flight."""
        return not self._live and not len(self._pipeline)

    @property
    def num_waiting(self) -> int:
        """Sequences whose prefill is yet to be launched."""
        return len(self._prefill)

    def estimated_wait(self) -> float:
        """Seconds a request arriving now would wait; 0 while nothing is known."""
        return self._predict_wait() or 0.0

    def load(self) -> Load:
        """What is held right now; `images_cached` is not known here."""
        return Load(
            running=len(self._running),
            waiting=len(self._prefill),
            inflight=len(self._pipeline),
            rows_used=self._manager.rows_used,
            pages_used=self._manager.pages_used,
            prefix_pages=self._manager.prefix_pages,
            pages_total=self._manager.pages_total,
        )

    def _predict_wait(self) -> float | None:
        manager = self._manager
        return self._wait.predict(len(self._prefill), manager.rows_free, manager.num_rows)

    # ------------------------------------------------------------ the tick

    def step(self) -> bool:
        """One tick; whether anything was launched or committed.

        The next forward is launched before the oldest launch is committed. A launch with
        constrained rows is sampled only behind that commit, when its constraints are current.
        """
        self._expire()
        launch = self._launch()
        if launch is not None and not (launch.plan.constrained and len(self._pipeline) > 1):
            self._sample(launch)
        oldest = self._pipeline.oldest()
        if oldest is not None and (launch is None or len(self._pipeline) == self._pipeline.depth):
            self._commit(oldest)
        unsampled = self._pipeline.unsampled()
        if unsampled is not None:
            self._sample(unsampled)
        return oldest is not None

    def drain(self) -> None:
        """Step until idle."""
        while not self.idle:
            progressed = self.step()
            assert progressed or self.idle, "sequences are live, yet nothing can run"

    def _expire(self) -> None:
        now = self._clock.now()
        if now < self._next_deadline:
            return
        for sequence in list(self._live.values()):
            if deadline_of(sequence.request) <= now and not sequence.finalized:
                self._fail(sequence, DeadlineExceeded("the deadline passed"))
        deadlines = (deadline_of(sequence.request) for sequence in self._live.values())
        self._next_deadline = min(deadlines, default=math.inf)

    def _plan(self) -> Plan | None:
        """A prefill when one fits, but only so many in a row while sequences wait to decode."""
        if self._prefill_streak < self._prefills_per_decode:
            return self._prefill.plan() or self._decode.plan(self._running)
        return self._decode.plan(self._running) or self._prefill.plan()

    def _launch(self) -> Launch | None:
        """Plan and enqueue the next forward; every tick leaves a slot free for it."""
        plan_start = self._clock.perf_ns()
        plan = self._plan()
        if plan is None:
            return None
        plan_end = self._clock.perf_ns()
        launch = self._pipeline.launch(plan)
        self._runner.forward(launch)
        for row in plan.rows:
            row.sequence.num_launched += 1
        if plan.kind is LaunchKind.PREFILL:
            self._prefill_streak += 1
            self._start([row.sequence for row in plan.rows])
        else:
            self._prefill_streak = 0
        self._records.append(StepRecord(launch, plan_start, plan_end, self._clock.perf_ns()))
        return launch

    def _start(self, sequences: Many[Sequence]) -> None:
        now = self._clock.now()
        for sequence in sequences:
            sequence.status = SequenceStatus.PREFILLING
            sequence.prefill_start = now
            sequence.pixels = None
            self._manager.prefix_launched(sequence)
            self._running.append(sequence)
        for sequence in sequences:
            if not sequence.finalized:
                self._sink.started(sequence)

    def _sample(self, launch: Launch) -> None:
        record = self._records[-1]
        record.finalize_start = self._clock.perf_ns()
        sequences = (row.sequence for row in launch.plan.rows)
        self._runner.sample(
            launch, [FREE if s.finalized else s.task.constraint() for s in sequences]
        )
        self._pipeline.mark_sampled(launch)
        record.finalize_end = self._clock.perf_ns()

    def _commit(self, launch: Launch) -> None:
        record = self._records.popleft()
        record.wait_start = self._clock.perf_ns()
        tokens = self._runner.collect(launch)
        record.wait_end = self._clock.perf_ns()
        for row, token in zip(launch.plan.rows, tokens, strict=True):
            if row.sequence.finalized:
                record.zombies += 1
            else:
                self._consume(row.sequence, token)
        for sequence in self._pipeline.commit(launch):
            self._manager.release(sequence)
        self.steps_committed += 1
        record.commit_end = self._clock.perf_ns()
        if self._observer is not None:
            self._observer.committed(record)

    def _consume(self, sequence: Sequence, token: SampledToken) -> None:
        """Commit one token of a live sequence, and end it when the token does."""
        task = sequence.task
        if token.token_id == NOT_FINITE:
            if sequence.num_committed == 0:  # its prefill's: the prefix may be what is broken
                self._manager.forget_prefix(sequence)
            self._fail(sequence, InternalError("non-finite logits", reason="NUMERIC"))
            return
        try:
            events = task.consume(token)
        except Exception:  # a skill's bug ends its own request, not its batch mates
            log.exception("task of request %s failed", sequence.request.request_id)
            self._fail(sequence, InternalError("the task could not read its tokens"))
            return
        sequence.num_committed += 1
        if sequence.status is SequenceStatus.PREFILLING:
            sequence.status = SequenceStatus.RUNNING
            sequence.first_token = self._clock.now()
        if events:
            self._sink.delta(sequence, events)
        reason = task.finish_reason
        if reason is None and sequence.num_committed == task.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None and not sequence.finalized:
            self._finalize(sequence)
            self._wait.completed(self._clock.now() - sequence.prefill_start)
            self._sink.done(sequence, reason)

    # ------------------------------------------------------------ the end of a sequence

    def _fail(self, sequence: Sequence, error: LegatoError) -> None:
        self._finalize(sequence)
        self._sink.failed(sequence, error)

    def _finalize(self, sequence: Sequence) -> None:
        """End a sequence now; release what it holds unless a launch in flight still names it."""
        assert not sequence.finalized, f"sequence {sequence.seq_id} is finalized twice"
        sequence.finalized = True
        del self._live[sequence.request.request_id]
        if sequence.status is SequenceStatus.WAITING:
            self._prefill.remove(sequence)
        else:
            self._running.remove(sequence)
            if sequence.inflight_refs == 0:
                self._manager.release(sequence)
        sequence.status = SequenceStatus.FINISHED


def deadline_of(request: Request) -> float:
    """Its deadline in `time.monotonic()` seconds, infinite when it has none."""
    return math.inf if request.deadline is None else request.deadline
