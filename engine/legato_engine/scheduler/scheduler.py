"""The scheduler's step."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from legato_engine import failpoints
from legato_engine.core.request_key import RequestKey
from legato_engine.errors import DeadlineExceeded, QueueFull
from legato_engine.ipc.figures import Load
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.admission import Admission
from legato_engine.scheduler.block_sizes import BlockSizes
from legato_engine.scheduler.clock import Clock
from legato_engine.scheduler.decode_planner import DecodePlanner
from legato_engine.scheduler.drafting_loops import DraftingLoops
from legato_engine.scheduler.launch import ALONE, BatchLimits, Launch, LaunchKind, Plan, Refinement
from legato_engine.scheduler.live_requests import LiveRequests
from legato_engine.scheduler.loops import Loops
from legato_engine.scheduler.output_processor import OutputProcessor
from legato_engine.scheduler.pipeline import Pipeline
from legato_engine.scheduler.planner import Planner
from legato_engine.scheduler.prefill_planner import PrefillPlanner
from legato_engine.scheduler.runner import LoopRunner, NoTokens, Pause, Runner, sleep
from legato_engine.scheduler.running_sequences import RunningSequences
from legato_engine.scheduler.single_loops import SingleLoops
from legato_engine.scheduler.sink import Sink
from legato_engine.scheduler.step_record import FlightRecorder, Observer, StepRecord
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import Sequence, SequenceStatus

FREE = 0
"""The constraint that allows every token."""


class Scheduler:
    """Runs sequences through the pipeline. Single-threaded; owns all of its state."""

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
        loops: LoopRunner | None = None,
        pause: Pause = sleep,
        observer: Observer | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        """With `block_sizes` the runner must be able to draft, and launches are not shared.

        With `loops`, which is the runner, decodes of several steps are one launch where no row
        needs the host. `step` waits for tokens of such a launch by `pause`, and returns without
        them when that is cut short.
        """
        self._runner = runner
        self._manager = manager
        self._pipeline = pipeline
        self._depth = pipeline.depth  # that the pipeline is to have
        self._clock = clock
        self._sink = sink
        self._observer = observer
        self._recorder = recorder
        self._queue = WaitingQueue[Sequence](
            max_overtakes=max_overtakes, priority_seconds=priority_seconds
        )
        limits = limits if block_sizes is None else ALONE
        self._prefill = PrefillPlanner(manager, self._queue, limits)
        self._running = RunningSequences(manager, self._queue)
        decode = DecodePlanner(manager, self._running, block_sizes)
        self._loops: Loops | None = None
        if loops is not None:
            kind = SingleLoops if block_sizes is None else DraftingLoops
            self._loops = kind(loops, manager, self._running, decode, pause)
        self._planner = Planner(
            self._prefill,
            decode,
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
        self._requests = LiveRequests(
            manager,
            self._queue,
            self._prefill,
            self._running,
            clock=clock,
            sink=sink,
            recorder=recorder,
        )
        self._outputs = OutputProcessor(
            manager, self._admission, clock, sink, block_sizes, finalize=self._requests.finalize
        )
        self._records: deque[StepRecord] = deque()
        self.steps_committed = 0

    # ------------------------------------------------------------ requests

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            InvalidField: its request id is in use.
            PromptTooLong: it does not fit the context or the KV cache.
            QueueFull: too many requests wait.
            QuotaExceeded: too many requests of its tenant wait.
            DeadlineUnreachable: the predicted wait is longer than the time left.
        """
        self._requests.check(sequence)
        request = sequence.request
        if not request.was_admitted:
            displaced = self.displaced_by(request.tenant, request.priority, sequence.timing.arrival)
            assert displaced is None, "nothing is being prepared"
            self._admission.check_deadline(sequence)
        self._requests.add(sequence)

    def abort(self, request_id: RequestKey) -> None:
        """End a request without further events; ignore unknown ids."""
        self._requests.abort(request_id)

    def stop(self, request_id: RequestKey) -> None:
        """End a request with the result so far; ignore unknown ids."""
        self._requests.stop(request_id)

    def set_depth(self, depth: int) -> None:
        """Have at most `depth` launches in flight, 1 or 2, once enough of them are committed."""
        self._depth = depth

    def refine(self, refinement: Refinement) -> None:
        """No request can abort it."""
        self._planner.refine(refinement)

    def displaced_by(
        self, tenant: str, priority: int, arrival: float, preparing: Collection[str] = ()
    ) -> str | None:
        """Make room for another request if the queue is full.

        Returns the tenant of a request in preparation that the caller has to end for it, or None.
        `preparing` are the tenants of all of them. Raises as `Admission.displaced_by`.
        """
        displaced = self._admission.displaced_by(tenant, priority, arrival, preparing)
        if isinstance(displaced, Sequence):
            self._outputs.fail(displaced, self.displacement())
            return None
        return displaced

    def displacement(self) -> QueueFull:
        return self._admission.displacement()

    # ------------------------------------------------------------ state

    @property
    def idle(self) -> bool:
        return not (self._requests or self._planner.has_refinements or len(self._pipeline))

    @property
    def num_waiting(self) -> int:
        return len(self._prefill)

    def position(self, sequence: Sequence) -> int:
        return self._queue.position(sequence)

    def estimated_wait(self) -> float:
        return self._admission.estimated_wait()

    def load(self) -> Load:
        """`images_cached` is not set."""
        return Load(
            running=len(self._running),
            waiting=len(self._prefill),
            inflight=len(self._pipeline),
            pipeline_depth=self._pipeline.depth,
            rows_used=self._manager.rows_used,
            pages_used=self._manager.pages_used,
            prefix_pages=self._manager.prefix_pages,
            pages_total=self._manager.pages_total,
            adapters_used=self._manager.adapters_used,
            kv=self._manager.stats(),
        )

    # ------------------------------------------------------------ the step

    def step(self) -> bool:
        """Return whether anything was launched or committed.

        The next batch is launched before the oldest is committed, to keep the device busy. A launch
        with constrained rows is sampled after that commit, which its constraints depend on.
        """
        self._expire()
        launch = self._launch() if self._has_its_depth() else None
        if launch is not None and not (launch.plan.constrained and len(self._pipeline) > 1):
            self._sample(launch)
        oldest = self._pipeline.oldest()
        if oldest is not None and oldest.plan.loops:
            if launch is None and self._follow() is NoTokens.LEFT:
                self._commit(oldest)
        elif oldest is not None and (launch is None or len(self._pipeline) == self._pipeline.depth):
            self._commit(oldest)
        unsampled = self._pipeline.unsampled()
        if unsampled is not None and not self._is_behind_loop(unsampled):
            self._sample(unsampled)  # its constraints are current now
        return oldest is not None

    def _is_behind_loop(self, launch: Launch) -> bool:
        oldest = self._pipeline.oldest()
        return oldest is not None and oldest is not launch and oldest.plan.loops

    def _has_its_depth(self) -> bool:
        """A step leaves a slot free for the next launch; a shorter pipeline must leave one, too."""
        if self._pipeline.depth != self._depth and len(self._pipeline) < self._depth:
            self._pipeline.resize(self._depth)
        return self._pipeline.depth == self._depth

    def drain(self) -> None:
        while not self.idle:
            progressed = self.step()
            assert progressed or self.idle, f"{len(self._requests)} live sequences, none can run"

    def _expire(self) -> None:
        for sequence in self._requests.expired():
            if not sequence.finalized:
                self._outputs.fail(sequence, DeadlineExceeded("the deadline passed"))

    def _launch(self) -> Launch | None:
        """Plan and enqueue the next forward pass; every step leaves a slot free for it."""
        plan_start = self._clock.perf_ns()
        plan = self._plan()
        if plan is None:
            return None
        failpoints.hit("engine.plan")
        plan_end = self._clock.perf_ns()
        launch = self._pipeline.launch(plan)
        if self._recorder is not None:
            self._recorder.launching(launch, plan_start)
        failpoints.hit("engine.launch")
        self._runner.forward(launch)
        counted = () if plan.loops else plan.counted_rows  # steps of loops count when they are read
        for sequence, position, num_tokens, _, num_drafts, _ in counted:
            progress = sequence.progress
            progress.num_launched += 1
            progress.last_position = position + num_tokens
            if num_drafts:
                progress.inflight_drafts += num_drafts
        if plan.kind is not LaunchKind.DECODE:
            self._start_prefills(plan)
        self._records.append(StepRecord(launch, plan_start, plan_end, self._clock.perf_ns()))
        return launch

    def _plan(self) -> Plan | None:
        oldest, loops = self._pipeline.oldest(), self._loops
        if oldest is not None and oldest.plan.loops:
            plan = self._plan_behind() if len(self._pipeline) < self._pipeline.depth else None
        else:
            plan = self._planner.plan()
            if plan is not None and loops is not None:
                before = None if oldest is None else oldest.plan
                plan = loops.extend(plan, before, only_decodes=self._planner.only_decodes)
        if plan is not None and loops is not None:
            loops.launched(plan)
        return plan

    def _plan_behind(self) -> Plan | None:
        """Plan the launch that ends the loop in flight, if there is any.

        The loop is told first: it takes up to a step to end, and the launch about as long to be
        planned and enqueued. Told in vain it is followed by another loop.
        """
        assert self._loops is not None, "a loop without loops"
        record = self._records[0]
        ends = self._loops.is_ending(record)
        if not ends and not self._planner.has_others:
            return None
        if self._planner.expects_other:
            self._loops.end(record)
        plan = self._planner.plan_behind(self._loops.behind(record), ends=ends)
        if plan is not None:
            self._loops.end(record)
        return plan

    def _follow(self) -> NoTokens | None:
        """Process a step of the loop in flight, if there is one."""
        assert self._loops is not None, "a loop without loops"
        newest = self._records[-1].launch.plan
        blocks = self._pipeline.depth == 1 and bool(self._prefill)
        ends = blocks or self._pipeline.depth != self._depth
        is_cut = ends or newest.kind is not LaunchKind.DECODE
        missing = self._loops.follow(self._records[0], self._outputs, ends=ends, is_cut=is_cut)
        self.steps_committed += missing is None
        return missing

    def _start_prefills(self, plan: Plan) -> None:
        sequences = [row.sequence for row in plan.rows[plan.num_mixed_decodes :]]
        if plan.kind is LaunchKind.PREFILL:
            for row in plan.counted_rows[plan.num_mixed_decodes :]:
                self._manager.launched(row.sequence)
        starting = [s for s in sequences if s.status is SequenceStatus.WAITING]
        now = self._clock.now()
        if starting:
            self._admission.started(len(starting))
        for sequence in starting:
            sequence.status = SequenceStatus.PREFILLING
            self._running.add(sequence)
        for sequence in starting:  # the sink may abort any of them
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
        failpoints.hit("engine.commit")
        record.wait_start = self._clock.perf_ns()
        outputs = self._runner.collect(launch)
        record.wait_end = self._clock.perf_ns()
        behind = self._records[0].launch.plan if self._records else None
        if outputs is None:
            self._outputs.take_back(record, loops=behind is not None and behind.loops)
        elif not launch.plan.loops:
            self._outputs.process_launch(record, outputs)
        elif self._loops is not None:
            self._loops.settle(record, behind, self._outputs)
        for sequence in self._pipeline.commit(launch):
            self._running.settle(sequence)
        refinement = launch.plan.refinement
        if refinement is not None:
            refinement.done(refinement)
        self.steps_committed += 1
        record.commit_end = self._clock.perf_ns()
        if self._observer is not None:
            self._observer.committed(record)
