"""The scheduler: plan, launch, commit.

A request enters by `Scheduler.submit` and waits in the queue. Each `Scheduler.step` launches the
next batch that `Planner` plans and commits the oldest of the launches in `Pipeline`, until the
request's last token is committed.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from legato_engine import failpoints
from legato_engine.errors import DeadlineExceeded, InvalidField, PromptTooLong
from legato_engine.ipc.messages import SchedulerLoad
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import (
    ALONE,
    BatchLimits,
    Launch,
    LaunchKind,
    Plan,
    Refinement,
    StepRecord,
)
from legato_engine.scheduler.decode import DecodePlanner, RunningSequences
from legato_engine.scheduler.interfaces import (
    Clock,
    LoopPoll,
    LoopRunner,
    Pause,
    Runner,
    sleep,
)
from legato_engine.scheduler.loops import DraftingLoops, Loops, SingleLoops
from legato_engine.scheduler.output import OutputProcessor, Sink
from legato_engine.scheduler.prefill import PrefillPlanner
from legato_engine.scheduler.queue import Admission, WaitingQueue
from legato_engine.sequence import NO_INPUTS, Sequence
from legato_engine.speculation import BlockSizes
from legato_engine.types import FinishReason, RequestKey

if TYPE_CHECKING:
    from legato_engine.crash import FlightRecorder

FREE = 0
"""The constraint that allows every token."""


class Scheduler:
    """Single-threaded scheduler of sequences; it owns all of its state.

    Every live sequence ends in `_finalize`, as a zombie while launches in flight name it.
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
        max_decode_tokens: int = 0,
        block_sizes: BlockSizes | None = None,
        loops: LoopRunner | None = None,
        pause: Pause = sleep,
        observer: Callable[[StepRecord], None] | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        """Create a scheduler; with `block_sizes` the runner must support drafts.

        Decodes of up to `max_decode_tokens` tokens in all include tokens that grammars force; 0:
        none does.

        With `loops`, which is the runner, decodes of several steps are one launch if no row needs
        the host. `step` polls for tokens of such a launch, with `pause` between polls, and returns
        without tokens when a pause is cut short.
        """
        self._runner = runner
        self._manager = manager
        self._pipeline = pipeline
        self._target_depth = pipeline.depth
        self._clock = clock
        self._sink = sink
        self._observer = observer
        self._recorder = recorder
        self._live: dict[RequestKey, Sequence] = {}
        self._next_deadline = math.inf  # at most the earliest deadline of a live sequence
        self.queue = WaitingQueue[Sequence](
            max_overtakes=max_overtakes, priority_seconds=priority_seconds
        )
        if block_sizes is not None:
            limits = dataclasses.replace(ALONE, image_tokens=limits.image_tokens)
        self._prefill = PrefillPlanner(manager, self.queue, limits)
        self._running = RunningSequences(manager, self.queue)
        decode = DecodePlanner(manager, self._running, block_sizes, max_tokens=max_decode_tokens)
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
        self.admission = Admission(
            clock,
            self.queue,
            num_rows=manager.rows.size,
            rows_free=lambda: manager.rows.num_free,
            max_waiting=max_waiting,
            max_waiting_per_tenant=max_waiting_per_tenant,
        )
        self._outputs = OutputProcessor(
            manager, self.admission, clock, sink, block_sizes, finalize=self._finalize
        )
        self._records: deque[StepRecord] = deque()  # of the launches in flight
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
        self._check_can_run(sequence)
        request = sequence.request
        if not request.was_admitted:
            displaced = self.make_room_for(
                request.tenant, request.priority, sequence.timing.arrival
            )
            assert displaced is None, "nothing is being prepared"
            self.admission.check_deadline(sequence)
        if request.deadline is not None:
            self._next_deadline = min(self._next_deadline, request.deadline)
        self._live[request.request_id] = sequence
        self._prefill.add(sequence)
        if self._recorder is not None:
            self._recorder.submitted(sequence)

    def _check_can_run(self, sequence: Sequence) -> None:
        assert sequence.prompt, f"sequence {sequence.seq_id} has no prompt token to sample from"
        assert sequence.task.max_tokens > 0, f"sequence {sequence.seq_id} may not sample a token"
        if sequence.request.request_id in self._live:
            raise InvalidField("request id is in use", field="request_id")
        if not self._manager.can_ever_fit(sequence):
            raise PromptTooLong(
                "prompt and max_tokens do not fit the context",
                limit=self._manager.max_length,
                actual=sequence.max_length,
            )

    def make_room_for(
        self, tenant: str, priority: int, arrival: float, preparing: Collection[str] = ()
    ) -> str | None:
        """Make room for another request if the queue is full.

        `preparing` are the tenants of all requests in preparation. Return the tenant of one that
        the caller must end, or None. Raises as `Admission.choose_displaced`.
        """
        displaced = self.admission.choose_displaced(tenant, priority, arrival, preparing)
        if isinstance(displaced, Sequence):
            self._outputs.fail(displaced, self.admission.displaced_error())
            return None
        return displaced

    def abort(self, request_id: RequestKey) -> None:
        """End a request without further events; ignore unknown ids."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._finalize(sequence)

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
        if sequence.is_waiting and not sequence.pages.num_preemptions:
            sequence.timing.prefill_start = now
            self._sink.started(sequence)
        if not sequence.finalized:
            self._finalize(sequence)
            self._sink.done(sequence, FinishReason.CANCELLED)

    def refine(self, refinement: Refinement) -> None:
        """Queue a refinement. It is not tied to a request, so it cannot be aborted."""
        self._planner.refinements.append(refinement)

    def set_depth(self, depth: int) -> None:
        """Have at most `depth` launches in flight, 1 or 2, once enough of them are committed."""
        self._target_depth = depth

    # ------------------------------------------------------------ step

    def drain(self) -> None:
        """Step until no work is left."""
        while not self.idle:
            progressed = self.step()
            assert progressed or self.idle, f"{len(self._live)} live sequences, none can run"

    def step(self) -> bool:
        """Return whether anything was launched or committed.

        The next batch is launched before the oldest is committed, to keep the device busy. A launch
        with constrained rows is sampled after that commit, which its constraints depend on.
        """
        self._expire()
        launch = self._launch() if self._reach_target_depth() else None
        if launch is not None and not (launch.plan.constrained and len(self._pipeline) > 1):
            self._sample(launch)
        oldest = self._pipeline.oldest()
        if oldest is not None and oldest.plan.is_loop:
            if launch is None and self._poll_loop() is LoopPoll.FINISHED:
                self._commit(oldest)
        elif oldest is not None and (launch is None or len(self._pipeline) == self._pipeline.depth):
            self._commit(oldest)
        unsampled = self._pipeline.unsampled()
        if unsampled is not None and not self._is_behind_loop(unsampled):
            self._sample(unsampled)  # its constraints are current now
        return oldest is not None

    def _expire(self) -> None:
        now = self._clock.now()
        if now < self._next_deadline:
            return
        ends = {sequence: sequence.request.ends_by for sequence in self._live.values()}
        expired = [sequence for sequence, end in ends.items() if end <= now]
        self._next_deadline = min((end for end in ends.values() if end > now), default=math.inf)
        for sequence in expired:
            if not sequence.finalized:  # the sink may abort others
                self._outputs.fail(sequence, DeadlineExceeded("the deadline passed"))

    def _reach_target_depth(self) -> bool:
        """Resize the pipeline when enough launches are committed; return whether it is resized.

        A step leaves a slot free for the next launch; a shorter pipeline must leave one, too.
        """
        if self._pipeline.depth != self._target_depth and len(self._pipeline) < self._target_depth:
            self._pipeline.resize(self._target_depth)
        return self._pipeline.depth == self._target_depth

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
        counted = () if plan.is_loop else plan.counted_rows  # a loop's steps count as they are read
        for sequence, position, num_tokens, _, num_drafts, _, forced in counted:
            progress = sequence.progress
            progress.num_launched += 1
            progress.last_position = position + num_tokens
            if num_drafts:
                progress.inflight_drafts += num_drafts
            if forced:
                progress.num_launched += len(forced)
        if plan.kind is not LaunchKind.DECODE:
            self._start_prefills(plan)
        self._records.append(StepRecord(launch, plan_start, plan_end, self._clock.perf_ns()))
        return launch

    def _plan(self) -> Plan | None:
        oldest, loops = self._pipeline.oldest(), self._loops
        if oldest is not None and oldest.plan.is_loop:
            plan = self._plan_behind_loop() if len(self._pipeline) < self._pipeline.depth else None
        else:
            plan = self._planner.plan()
            if plan is not None and loops is not None:
                before = None if oldest is None else oldest.plan
                plan = loops.extend(plan, before, only_decodes=self._planner.only_decodes)
        if plan is not None and loops is not None:
            loops.record_launch(plan)
        return plan

    def _plan_behind_loop(self) -> Plan | None:
        """Plan the launch that ends the loop in flight, if there is any.

        The loop is stopped first: it takes up to a step to end, and the launch about as long to be
        planned and enqueued. If nothing gets launched, the next plan just starts another loop.
        """
        assert self._loops is not None, "loop launch, but loops are disabled"
        record = self._records[0]
        is_ending = self._loops.is_ending(record)
        if not is_ending and not self._planner.has_non_decode_work:
            return None
        if self._planner.expects_non_decode_launch:
            self._loops.stop(record)
        plan = self._planner.plan_behind(self._loops.plan_behind(record), is_ending=is_ending)
        if plan is not None:
            self._loops.stop(record)
        return plan

    def _start_prefills(self, plan: Plan) -> None:
        """Count the launched prefills; report the sequences whose first launch this is."""
        sequences = [row.sequence for row in plan.rows[plan.num_mixed_decodes :]]
        if plan.kind is LaunchKind.PREFILL:
            for row in plan.counted_rows[plan.num_mixed_decodes :]:
                self._manager.mark_launched(row.sequence)
        starting = [s for s in sequences if s.is_waiting]
        now = self._clock.now()
        if starting:
            self.admission.record_start(len(starting))
        for sequence in starting:
            sequence.is_waiting = False
            self._running.add(sequence)
        for sequence in starting:  # the sink may abort any of them
            if not (sequence.finalized or sequence.pages.num_preemptions):
                sequence.timing.prefill_start = now
                self._sink.started(sequence)

    def _sample(self, launch: Launch) -> None:
        record = self._records[-1]
        record.sample_start = self._clock.perf_ns()
        rows = launch.plan.sampled_rows
        constraints: Many[int] = [
            FREE if row.sequence.finalized else row.sequence.task.constraint() for row in rows
        ]
        grammars = [row.sequence.task.grammar for row in rows]
        if any(grammars):
            constraints = self._runner.mask(launch, constraints)
            record.mask_end = self._clock.perf_ns()
        self._runner.sample(launch, constraints)
        self._pipeline.mark_sampled(launch)
        record.sample_end = self._clock.perf_ns()

    def _is_behind_loop(self, launch: Launch) -> bool:
        oldest = self._pipeline.oldest()
        return oldest is not None and oldest is not launch and oldest.plan.is_loop

    def _poll_loop(self) -> LoopPoll | None:
        """Process the next step of the loop in flight; return why there is none, or None."""
        assert self._loops is not None, "loop launch, but loops are disabled"
        newest = self._records[-1].launch.plan
        blocks_prefill = self._pipeline.depth == 1 and bool(self._prefill)
        stop = blocks_prefill or self._pipeline.depth != self._target_depth
        is_interrupted = stop or newest.kind is not LaunchKind.DECODE
        poll = self._loops.poll(
            self._records[0], self._outputs, stop=stop, is_interrupted=is_interrupted
        )
        self.steps_committed += poll is None
        return poll

    def _commit(self, launch: Launch) -> None:
        record = self._records.popleft()
        failpoints.hit("engine.commit")
        record.wait_start = self._clock.perf_ns()
        outputs = self._runner.collect(launch)
        record.wait_end = self._clock.perf_ns()
        behind = self._records[0].launch.plan if self._records else None
        if outputs is None:
            self._outputs.roll_back(record, before_loop=behind is not None and behind.is_loop)
        elif not launch.plan.is_loop:
            self._outputs.process_launch(record, outputs)
        elif self._loops is not None:
            self._loops.roll_back(record, behind, self._outputs)
        for sequence in self._pipeline.commit(launch):
            self._running.release_or_requeue(sequence)
        refinement = launch.plan.refinement
        if refinement is not None:
            refinement.done(refinement)
        self.steps_committed += 1
        record.commit_end = self._clock.perf_ns()
        if self._observer is not None:
            self._observer(record)

    def _finalize(self, sequence: Sequence) -> None:
        """End a sequence; release it unless a launch in flight names it."""
        assert not sequence.finalized, f"sequence {sequence.seq_id} is finalized twice"
        sequence.finalized = True
        del self._live[sequence.request.request_id]
        self.queue.refund(sequence)
        if sequence.progress.last_position < 0:
            self._prefill.remove(sequence)
        if not sequence.is_waiting:
            self._running.remove(sequence)
        sequence.is_waiting = False
        if self._recorder is not None:
            self._recorder.ended(sequence)
        sequence.inputs = NO_INPUTS  # observers may keep the launch, and with it the sequence

    # ------------------------------------------------------------ state

    @property
    def idle(self) -> bool:
        return not (self._live or self._planner.refinements or len(self._pipeline))

    def load(self) -> SchedulerLoad:
        """Return the current load; `images_cached` is not set."""
        return SchedulerLoad(
            running=len(self._running),
            waiting=len(self._prefill),
            inflight=len(self._pipeline),
            pipeline_depth=self._pipeline.depth,
            rows_used=self._manager.rows.num_used,
            pages_used=self._manager.pages_used,
            prefix_pages=self._manager.prefix_pages,
            pages_total=self._manager.pages_total,
            adapters_used=self._manager.adapters.num_used,
            kv=self._manager.stats(),
        )


# ---------------------------------------------------------------- planner


@dataclasses.dataclass(slots=True, eq=False)
class Planner:
    """Planner that alternates between decodes and other launches while there is work for both.

    At most `prefills_per_decode` encodes, prefills and refinements run between two decodes.
    Refinements go first, because they create no further work.

    A shared prefill takes all decodes into its launch, or none if they do not fit, and then counts
    as a decode.

    While a decoding sequence streams, an image is encoded in launches of at most `crops_per_launch`
    crops (0: all), so that no stream waits for a whole large image; images of a visual prompt are
    always encoded in pieces. This delays the image's own first token and
    the queue, because the device encodes one image at a time.
    """

    prefill: PrefillPlanner
    decode: DecodePlanner
    prefills_per_decode: int
    crops_per_launch: int
    only_decodes: bool = False  # at the last plan, no other launch was possible
    refinements: deque[Refinement] = dataclasses.field(default_factory=deque, init=False)
    _num_since_decode: int = 0

    def __post_init__(self) -> None:
        assert self.crops_per_launch >= 0, f"{self.crops_per_launch} crops per launch"

    @property
    def has_non_decode_work(self) -> bool:
        return bool(self.refinements) or self.prefill.has_work

    @property
    def expects_non_decode_launch(self) -> bool:
        """Return whether such work can probably be launched now."""
        return bool(self.refinements) or self.prefill.expects_plan

    def plan(self) -> Plan | None:
        """Plan the next launch; a plan must be launched."""
        decode = self.decode.plan()
        plan = decode
        is_others_turn = decode is None or self._num_since_decode < self.prefills_per_decode
        if is_others_turn:
            plan = self._plan_non_decode(decode) or decode
        self.only_decodes = plan is decode and (is_others_turn or not self.has_non_decode_work)
        if plan is not None:
            self._num_since_decode = 0 if plan.decodes else self._num_since_decode + 1
        return plan

    def plan_behind(self, decode: Plan | None, *, is_ending: bool) -> Plan | None:
        """Plan a launch behind a loop in flight; it must be launched.

        Args:
            decode: the loop's rows that continue; they join the launch as in `plan`.
            is_ending: the loop ends by itself; `decode` is launched alone if nothing else can be.
        """
        plan = self._plan_non_decode(decode)
        if plan is None:
            plan = decode if is_ending else None
        elif decode is not None and plan.decodes:
            plan = dataclasses.replace(plan, behind=decode.behind)
        if plan is not None:
            self._num_since_decode = 0 if plan.decodes else self._num_since_decode + 1
        return plan

    def _plan_non_decode(self, decode: Plan | None) -> Plan | None:
        if self.refinements:
            return Plan(LaunchKind.REFINE, (), refinement=self.refinements.popleft())
        if not self.prefill.has_work:
            return None
        streaming = self.decode.is_streaming
        rows = decode.rows if decode is not None else ()
        return self.prefill.plan(
            self.crops_per_launch if streaming else 0,
            tuple(row.with_forced(()) if row.forced else row for row in rows),
            streaming=streaming,
        )


# ---------------------------------------------------------------- pipeline

NUM_SLOTS = 2


class Pipeline:
    """FIFO of at most `depth` launches in flight.

    A launch has a slot from `launch` to `commit`, and a reference on each of its sequences. At most
    one is not sampled yet.
    """

    def __init__(self, depth: int) -> None:
        self.depth = _checked(depth)
        self._free_slots = deque(range(NUM_SLOTS))
        self._inflight: deque[Launch] = deque()
        self._num_launched = 0

    def __len__(self) -> int:
        return len(self._inflight)

    def resize(self, depth: int) -> None:
        assert len(self) < _checked(depth), f"depth {depth} leaves no slot beside {len(self)}"
        self.depth = depth

    def can_launch(self) -> bool:
        return len(self._inflight) < self.depth and self.unsampled() is None

    def launch(self, plan: Plan) -> Launch:
        assert self.can_launch(), f"{len(self)} of {self.depth} in flight, or unsampled"
        used = NUM_SLOTS - len(self._free_slots)
        assert used == len(self._inflight), f"{used} slots used by {len(self._inflight)} launches"
        launch = Launch(self._num_launched, self._free_slots.popleft(), plan, self.depth)
        self._num_launched += 1
        self._inflight.append(launch)
        for row in plan.rows:
            sequence = row.sequence
            assert not sequence.finalized, f"sequence {sequence.seq_id} launched when finalized"
            sequence.inflight_refs = refs = sequence.inflight_refs + 1
            assert refs <= self.depth, f"sequence {sequence.seq_id} is in {refs} launches"
        return launch

    def oldest(self) -> Launch | None:
        return self._inflight[0] if self._inflight else None

    def unsampled(self) -> Launch | None:
        """Return the launch that is not sampled yet, if any: always the newest."""
        if self._inflight and not self._inflight[-1].is_sampled:
            return self._inflight[-1]
        return None

    def mark_sampled(self, launch: Launch) -> None:
        assert launch is self.unsampled(), f"launch {launch.launch_id} is not the unsampled one"
        launch.is_sampled = True

    def commit(self, launch: Launch) -> list[Sequence]:
        """Free the slot; return finalized or preempted sequences that no launch names any more."""
        assert launch is self.oldest(), f"launch {launch.launch_id} is not the oldest in flight"
        assert launch.is_sampled, f"launch {launch.launch_id} commits unsampled"
        self._inflight.popleft()
        self._free_slots.append(launch.slot)
        releasable = []
        for row in launch.plan.rows:
            sequence = row.sequence
            sequence.inflight_refs = refs = sequence.inflight_refs - 1
            assert refs >= 0, f"sequence {sequence.seq_id} has negative refs"
            if refs == 0 and (sequence.finalized or sequence.preempted):
                releasable.append(sequence)
        return releasable


def _checked(depth: int) -> int:
    assert 1 <= depth <= NUM_SLOTS, f"depth {depth} is not 1 (blocking) or 2 (pipelined)"
    return depth
