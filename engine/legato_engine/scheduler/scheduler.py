"""The tick: launch ahead, commit the oldest, then finalize the newest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from legato_engine.core import FinishReason, Request, RequestKey
from legato_engine.errors import DeadlineExceeded, InvalidField
from legato_engine.ipc.messages import Load
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.admission import Admission
from legato_engine.scheduler.block_sizes import BlockSizes
from legato_engine.scheduler.clock import Clock
from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.launch import ALONE, BatchLimits, Launch, LaunchKind, Refinement
from legato_engine.scheduler.output_processor import OutputProcessor
from legato_engine.scheduler.pipeline import Pipeline
from legato_engine.scheduler.planner import Planner
from legato_engine.scheduler.prefill_planner import PrefillPlanner
from legato_engine.scheduler.runner import Runner
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.scheduler.sink import Sink
from legato_engine.scheduler.step_record import Observer, StepRecord
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import NO_INPUTS, Sequence, SequenceStatus

FREE = 0
"""The constraint that allows every token."""


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
        max_waiting_per_tenant: int = 0,
        priority_seconds: float = 1.0,
        limits: BatchLimits = ALONE,
        max_overtakes: int = 16,
        prefills_per_decode: int = 1,
        crops_per_launch: int = 5,
        block_sizes: BlockSizes | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`prefills_per_decode` and `crops_per_launch` are the `Planner`'s, `limits` those of a
        launch that prompts share; proposed tokens share none.

        Without `block_sizes` nothing is proposed; with them the runner must know how to.
        """
        self._runner = runner
        self._manager = manager
        self._pipeline = pipeline
        self._clock = clock
        self._sink = sink
        self._speculates = block_sizes is not None
        self._observer = observer
        self._queue = WaitingQueue(max_overtakes=max_overtakes, priority_seconds=priority_seconds)
        limits = limits if block_sizes is None else ALONE
        self._prefill = PrefillPlanner(manager, self._queue, limits)
        self._running = RunningSequences(manager, self._queue)
        self._planner = Planner(
            self._prefill,
            DecodePlanner(manager, self._running, block_sizes),
            prefills_per_decode=prefills_per_decode,
            crops_per_launch=crops_per_launch,
        )
        self._admission = Admission(
            manager,
            clock,
            self._queue,
            max_waiting=max_waiting,
            max_waiting_per_tenant=max_waiting_per_tenant,
        )
        self._outputs = OutputProcessor(
            manager, self._admission, clock, sink, block_sizes, finalize=self._finalize
        )
        self._live: dict[RequestKey, Sequence] = {}  # by request id: all that are not finalized
        self._records: deque[StepRecord] = deque()  # one per launch in flight, same order
        self._next_deadline = math.inf  # no live sequence has an earlier one
        self.steps_committed = 0

    # ------------------------------------------------------------ requests in

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises `PromptTooLong` if it can never fit, `QueueFull` or `QuotaExceeded` if too many wait,
        and `DeadlineUnreachable` if the predicted wait is longer than the time left.
        """
        request = sequence.request
        assert sequence.prompt, "a prefill needs a prompt token to take its logits from"
        assert sequence.task.max_tokens > 0, "a task samples at least one token"
        if request.request_id in self._live:
            raise InvalidField("request id is in use", field="request_id")
        self._admission.check(sequence)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        self._live[request.request_id] = sequence
        self._prefill.add(sequence)

    def abort(self, request_id: RequestKey) -> None:
        """Forget a request; unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._finalize(sequence)

    def stop(self, request_id: RequestKey) -> None:
        """End a request now with what it has; unknown ids are ignored.

        Its listener is told as of any other: that it started, if it did not know, and its result.
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
            self._finalize(sequence)
            self._sink.done(sequence, FinishReason.CANCELLED)

    def refine(self, refinement: Refinement) -> None:
        """Launch it when its turn comes; it belongs to nobody, and is never given up."""
        self._planner.refine(refinement)

    def check_queue(self, tenant: str, preparing: Collection[str] = ()) -> None:
        """Raise `QueueFull` or `QuotaExceeded` when there is no place for another of `tenant`.

        `preparing` are the tenants of those who will queue before it.
        """
        self._admission.check_queue(tenant, preparing)

    # ------------------------------------------------------------ state out

    @property
    def idle(self) -> bool:
        """Nothing lives, nothing is to be refined and nothing is in flight."""
        return not (self._live or self._planner.refines or len(self._pipeline))

    @property
    def num_waiting(self) -> int:
        """Sequences without a row."""
        return len(self._prefill)

    def position(self, sequence: Sequence) -> int:
        """How many go before a sequence that waits; 0 is next."""
        return self._queue.position(sequence)

    def estimated_wait(self) -> float:
        """Seconds a request arriving now would wait behind all others; 0 while that is unknown."""
        return self._admission.estimated_wait()

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
            adapters_used=self._manager.adapters_used,
            kv=self._manager.stats(),
        )

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
                self._outputs.fail(sequence, DeadlineExceeded("the deadline passed"))
        deadlines = (deadline_of(sequence.request) for sequence in self._live.values())
        self._next_deadline = min(deadlines, default=math.inf)

    def _launch(self) -> Launch | None:
        """Plan and enqueue the next forward; every tick leaves a slot free for it."""
        plan_start = self._clock.perf_ns()
        plan = self._planner.plan()
        if plan is None:
            return None
        plan_end = self._clock.perf_ns()
        launch = self._pipeline.launch(plan)
        self._runner.forward(launch)
        for sequence, position, num_tokens, _, num_drafts, _ in plan.sampled_rows:
            progress = sequence.progress
            progress.num_launched += 1
            progress.last_position = position + num_tokens
            progress.inflight_drafts += num_drafts
        if plan.kind is not LaunchKind.DECODE:
            self._advance(launch)
        self._records.append(StepRecord(launch, plan_start, plan_end, self._clock.perf_ns()))
        return launch

    def _advance(self, launch: Launch) -> None:
        """An encode or a prefill is enqueued: note what it makes true of its sequences."""
        plan = launch.plan
        sequences = [row.sequence for row in plan.rows[plan.num_mixed_decodes :]]
        if plan.kind is LaunchKind.PREFILL:
            for sequence in sequences:
                self._manager.launched(sequence)
        starting = [s for s in sequences if s.status is SequenceStatus.WAITING]
        now = self._clock.now()
        for sequence in starting:
            sequence.status = SequenceStatus.PREFILLING
            self._running.add(sequence)
        for sequence in starting:
            if not (sequence.finalized or sequence.pages.num_preemptions):
                sequence.timing.prefill_start = now
                self._sink.started(sequence)

    def _sample(self, launch: Launch) -> None:
        record = self._records[-1]
        record.sample_start = self._clock.perf_ns()
        constraints = [
            FREE if row.sequence.finalized else row.sequence.task.constraint()
            for row in launch.plan.sampled_rows
        ]
        self._runner.sample(launch, constraints)
        self._pipeline.mark_sampled(launch)
        record.sample_end = self._clock.perf_ns()

    def _commit(self, launch: Launch) -> None:
        record = self._records.popleft()
        record.wait_start = self._clock.perf_ns()
        outputs = self._runner.collect(launch)
        record.wait_end = self._clock.perf_ns()
        before, plan = self._outputs.num_tokens, launch.plan
        drafting = self._speculates and plan.kind is LaunchKind.DECODE
        num_decodes = len(plan.decodes)
        for place, (row, output) in enumerate(zip(plan.sampled_rows, outputs, strict=True)):
            sequence = row.sequence
            if sequence.finalized:
                record.zombies += 1
            elif drafting:
                self._outputs.read_block(record, row, output)
            else:
                (token,) = output.tokens
                if place >= num_decodes:
                    self._outputs.prefilled(sequence, token)
                self._outputs.read(sequence, token)
        record.tokens = self._outputs.num_tokens - before
        for sequence in self._pipeline.commit(launch):
            self._running.settle(sequence)
        if plan.refinement is not None:
            plan.refinement.done(plan.refinement)
        self.steps_committed += 1
        record.commit_end = self._clock.perf_ns()
        if self._observer is not None:
            self._observer.committed(record)

    # ------------------------------------------------------------ the end of a sequence

    def _finalize(self, sequence: Sequence) -> None:
        """End a sequence now; release what it holds unless a launch in flight still names it."""
        assert not sequence.finalized, f"sequence {sequence.seq_id} is finalized twice"
        sequence.finalized = True
        del self._live[sequence.request.request_id]
        if sequence.progress.last_position < 0:
            self._prefill.remove(sequence)
        if sequence.status is not SequenceStatus.WAITING:
            self._running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        # Observers may keep the launch, and it the sequence.
        sequence.inputs = NO_INPUTS


def deadline_of(request: Request) -> float:
    """Its deadline in `time.monotonic()` seconds, infinite when it has none."""
    return math.inf if request.deadline is None else request.deadline
