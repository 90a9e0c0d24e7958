"""A scheduler on a fake device, and its invariants between steps and at rest."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence as Many

import msgspec
from legato_engine.errors import LegatoError
from legato_engine.ipc.messages import SchedulerLoad
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.batch import (
    ALONE,
    BatchLimits,
    LaunchKind,
    Plan,
    Refinement,
    ScheduledSequence,
    StepRecord,
)
from legato_engine.scheduler.decode import DecodePlanner, RunningSequences
from legato_engine.scheduler.prefill import PrefillPlanner
from legato_engine.scheduler.queue import WaitingQueue
from legato_engine.scheduler.scheduler import Pipeline, Scheduler
from legato_engine.sequence import RowTokens, Sequence
from legato_engine.speculation import BlockSizes
from legato_engine.types import RequestKey

from tests.fake_runner import FakeRunner
from tests.fakes import FakeClock, FakeSink, FakeTask, make_sequence

# ---------------------------------------------------------------- tasks

LONG_SEED = 1
"""Both kinds of task read at least 14 tokens with it, after any prefix and prompt used here."""


def long_task(*, constrained: bool = False, max_tokens: int = 14) -> FakeTask:
    """Return a task that reads `max_tokens` tokens."""
    task = FakeTask(seed=LONG_SEED, max_tokens=max_tokens, constrained=constrained)
    assert len(task.expected_tokens(2)) == max_tokens
    return task


def stopping_task(length: int, *, constrained: bool) -> FakeTask:
    """Return a task that stops by itself after `length` tokens."""
    for seed in range(10_000):
        task = FakeTask(seed=seed, max_tokens=length + 5, constrained=constrained)
        if len(task.expected_tokens(2)) == length:
            return task
    raise AssertionError("no seed stops there")


# ---------------------------------------------------------------- planning
# Sequences, planners and plans for tests of the planners.

PAGE = 4


def make_planner(
    manager: KVCacheManager, *, max_overtakes: int = 16, limits: BatchLimits = ALONE
) -> PrefillPlanner:
    """Return a planner with an empty queue."""
    queue = WaitingQueue[Sequence](max_overtakes=max_overtakes, priority_seconds=1.0)
    return PrefillPlanner(manager, queue, limits)


def running(seq_id: int, *, launched: int, max_tokens: int = 8, refs: int = 0) -> Sequence:
    """Return a sequence of prefix 1 and prompt 3 with `launched` tokens launched."""
    sequence = make_sequence(seq_id, FakeTask(num_prompt=3, max_tokens=max_tokens))
    sequence.progress.num_launched = launched
    sequence.progress.last_position = sequence.prompt_length + launched - 1
    sequence.inflight_refs = refs
    sequence.pages.capacity = sequence.max_length
    sequence.pages.ids = tuple(range(1, -(-sequence.max_length // PAGE) + 1))
    return sequence


def members_of(*sequences: Sequence) -> RunningSequences:
    """Return these as the running sequences."""
    queue = WaitingQueue[Sequence](max_overtakes=0, priority_seconds=1.0)
    members = RunningSequences(KVCacheManager(17, PAGE, 1), queue)
    for sequence in sequences:
        members.add(sequence)
    return members


def sized(seq_id: int, positions: int) -> Sequence:
    """Return a text-only sequence that needs all its positions at once."""
    return make_sequence(seq_id, FakeTask(num_prompt=positions - 1, max_tokens=1))


def planned(plan: Plan | None) -> list[int]:
    """Return the ids of the sequences in a plan."""
    return [] if plan is None else [row.sequence.seq_id for row in plan.rows]


def plain(*sequences: Sequence) -> DecodePlanner:
    """Return a planner without speculation."""
    return DecodePlanner(KVCacheManager(17, PAGE, 2), members_of(*sequences), None)


def decodes_of(*sequences: Sequence) -> tuple[ScheduledSequence, ...]:
    """Return these as scheduled in a decode."""
    plan = plain(*sequences).plan()
    assert plan is not None
    return plan.rows


# ---------------------------------------------------------------- world
# A scheduler on a fake device, with its invariants between steps and at rest.


def shared(
    prompts: int,
    images: int = 3,
    tokens: int = 16,
    pass_tokens: int = 0,
    long_chunk_tokens: int = 0,
) -> BatchLimits:
    """Make limits that only a long prompt or many rows exceed.

    With `long_chunk_tokens` every prompt that does not share a launch is chunked.
    """
    return BatchLimits(
        prompts,
        tokens,
        4,
        images,
        min_queue_length=0,
        pass_tokens=pass_tokens,
        chunk_above=(tokens if long_chunk_tokens else 3 * tokens) if pass_tokens else 0,
        long_chunk_tokens=long_chunk_tokens,
    )


def num_images(plan: Plan) -> int:
    """Return the number of images that the encoder computes."""
    return sum(row.encodes for row in plan.rows)


class RandomBlocks(BlockSizes):
    """Block sizes of random bounds that checks its arguments."""

    def __init__(self, largest: int, seed: int = 0) -> None:
        self._largest = largest
        self._random = random.Random(seed)
        self.learnt: list[tuple[int, int, int]] = []  # sequence, accepted, drafted

    def allot(self, sequences: Many[Sequence], *, under_pressure: bool) -> list[int]:
        """Return any sizes up to the largest."""
        assert all(sequence.may_draft and not sequence.finalized for sequence in sequences)
        return [self._random.randint(0, self._largest) for _ in sequences]

    def learn(self, sequence: Sequence, output: RowTokens) -> None:
        """Record it."""
        num_accepted, num_drafted = len(output.tokens) - 1, output.num_drafted
        assert 0 <= num_accepted <= num_drafted <= self._largest
        assert not sequence.finalized
        self.learnt.append((sequence.seq_id, num_accepted, num_drafted))


class World:
    """One scheduler, its surroundings and all its sequences."""

    def __init__(
        self,
        *,
        depth: int = 2,
        num_pages: int = 65,
        page_size: int = 4,
        num_rows: int = 4,
        not_finite: frozenset[tuple[int, int]] = frozenset(),
        max_waiting: int = 256,
        max_waiting_per_tenant: int = 0,
        max_prefill_rows: int = 1,
        max_overtakes: int = 16,
        crops_per_launch: int = 5,
        image_tokens: int = 0,
        streams: bool = True,
        num_adapter_slots: int = 0,
        block_sizes: BlockSizes | None = None,
        seed: int = 0,
    ) -> None:
        """Create a world; chunks of prompts have `image_tokens`, too (0: prompts are whole)."""
        self.page_size = page_size
        self.clock = FakeClock()
        self.sink = FakeSink()
        self.runner = FakeRunner(page_size, not_finite, seed)
        self.manager = KVCacheManager(
            num_pages, page_size, num_rows, num_adapter_slots=num_adapter_slots
        )
        self.pipeline = Pipeline(depth)
        self.records: list[StepRecord] = []
        self.scheduler = Scheduler(
            self.runner,
            self.manager,
            self.pipeline,
            self.clock,
            self.sink,
            max_waiting=max_waiting,
            max_waiting_per_tenant=max_waiting_per_tenant,
            limits=dataclasses.replace(
                shared(max_prefill_rows),
                chunk_above=image_tokens,
                long_chunk_tokens=image_tokens,
                image_tokens=image_tokens,
            ),
            max_overtakes=max_overtakes,
            crops_per_launch=crops_per_launch,
            block_sizes=block_sizes,
            observer=self.committed,
        )
        self._crops_per_launch = crops_per_launch
        self._image_tokens = image_tokens
        self._streams = streams
        self._streak = 0  # encodes and prefills since the last decode
        self.sequences: list[Sequence] = []
        self.refinements: list[Refinement] = []
        self.refined: list[int] = []  # their indices, in the order of completion
        self.aborted: set[RequestKey] = set()

    def committed(self, record: StepRecord) -> None:
        """Keep the record; the world is the scheduler's observer."""
        self.records.append(record)

    def submit(
        self,
        task: FakeTask | None = None,
        *,
        prefix_key: str | None = None,
        prefix_length: int = 1,
        num_crops: int = 0,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = "",
        adapter: str = "",
        images: Many[tuple[int, int]] = (),
    ) -> Sequence:
        """Submit request `r<n>`, counting from 0; raise what the scheduler raises."""
        sequence = make_sequence(
            len(self.sequences),
            task,
            prefix_key=prefix_key,
            prefix_length=prefix_length,
            num_crops=num_crops,
            deadline=deadline,
            arrival=self.clock.now(),
            priority=priority,
            tenant=tenant,
            adapter=adapter,
            images=images,
        )
        sequence.request = msgspec.structs.replace(sequence.request, deltas=self._streams)
        self.sequences.append(sequence)
        try:
            self.scheduler.submit(sequence)
        except Exception:
            self.sequences.pop()
            raise
        return sequence

    def refine(self) -> Refinement:
        """Submit a refinement of its own index."""
        number = len(self.refinements)
        refinement = Refinement(number, lambda done: self.refined.append(done.inputs))
        self.refinements.append(refinement)
        self.scheduler.refine(refinement)
        return refinement

    def step(self) -> bool:
        """Run one checked step; streams wait for at most one bounded launch at a time."""
        now = self.clock.now()
        decoding = [
            s
            for s in self.sequences
            if s.progress.last_position >= 0
            and s.progress.num_launched < s.task.max_tokens
            and not (s.finalized or s.preempted)
            and (s.request.deadline or math.inf) > now
        ]
        streaming = any(s.request.deltas for s in decoding)
        due = any(
            s.progress.last_position < s.pages.capacity for s in decoding
        )  # has a page for it
        num_planned = len(self.runner.plans)
        progressed = self.scheduler.step()
        for plan in self.runner.plans[num_planned:]:
            self._check_turn(plan, due=due, streaming=streaming)
        self.check()
        return progressed

    def steps(self, count: int) -> None:
        """Run checked steps."""
        for _ in range(count):
            self.step()

    def drain(self) -> None:
        """Run checked steps until idle."""
        while not self.scheduler.idle:
            self.step()
        self.check_rest()

    def _check_turn(self, plan: Plan, *, due: bool, streaming: bool) -> None:
        assert not streaming or num_images(plan) <= 1, "several images delay a stream"
        if plan.decodes:
            self._streak = 0
            return
        self._streak += 1
        assert not (due and self._streak > 1), "a decode is due"
        if plan.kind is LaunchKind.ENCODE and (visual := plan.rows[0].sequence.inputs.visual):
            work = plan.rows[0].work
            costs = [visual.prompt.cost(at) for at in range(work.first_piece, work.stop_piece)]
            assert len(costs) == 1 or sum(costs) <= self._image_tokens, f"{costs} tokens at once"
            return
        assert streaming or plan.kind is not LaunchKind.ENCODE, "split without a stream"
        limit = self._crops_per_launch if streaming else 0
        for row in plan.rows:
            stop = row.work.stop_piece or row.sequence.num_crops
            crops = stop - row.work.first_piece if row.work.compute_pages else 0
            assert crops <= limit or limit == 0, f"{crops} crops at once"

    def abort(self, sequence: Sequence) -> None:
        """Abort a request in any state."""
        if sequence.request.request_id not in self.sink.ended:
            self.aborted.add(sequence.request.request_id)
        self.scheduler.abort(sequence.request.request_id)

    def tokens(self, sequence: Sequence) -> list[int]:
        """Return the tokens that the sequence's task has read."""
        assert isinstance(sequence.task, FakeTask)
        return sequence.task.tokens

    def failure(self, sequence: Sequence) -> LegatoError:
        """Return the error that a request ended with."""
        error = self.sink.ended[sequence.request.request_id]
        assert isinstance(error, LegatoError)
        return error

    def check(self) -> None:
        """Assert the invariants between steps."""
        load = self.scheduler.load()
        admitted = [s for s in self.sequences if s.row >= 0]
        zombies = [s for s in admitted if s.finalized]
        assert all(s.inflight_refs > 0 for s in zombies), "released too late"
        assert all(s.row >= 0 for s in self.sequences if s.inflight_refs), "released too early"
        assert load.rows_used == len(admitted) == load.running + len(zombies)
        assert load.inflight <= self.pipeline.depth
        assert self.refined == list(range(len(self.refined))), "refined out of order"
        for refinement in self.refinements[: len(self.refined)]:
            assert refinement.result == ("better", refinement.inputs)
        assert load.adapters_used == len({s.adapter.key for s in admitted} - {""})
        assert load.pages_used >= len({page for s in admitted for page in s.pages.ids})
        assert load.pages_used + load.prefix_pages <= load.pages_total
        self.manager.check()
        for sequence in self.sequences:
            ahead = sequence.progress.num_launched - sequence.num_committed
            assert 0 <= ahead <= sequence.inflight_refs or sequence.finalized
            assert (
                sequence.inflight_refs
                or sequence.finalized
                or sequence.progress.inflight_drafts == 0
            )
            assert 0 <= sequence.inflight_refs <= load.inflight
            assert len(self.tokens(sequence)) == sequence.num_committed

    def check_rest(self) -> None:
        """Assert the invariants at rest."""
        load = self.scheduler.load()
        assert self.scheduler.idle
        rest = SchedulerLoad(
            pipeline_depth=self.pipeline.depth,
            prefix_pages=load.prefix_pages,
            pages_total=load.pages_total,
            kv=load.kv,
        )
        assert load == rest, f"resources are in use: {load}"
        assert len(self.refined) == len(self.refinements), "a refinement is lost"
        ended = set(self.sink.ended)
        assert not ended & self.aborted, "an aborted request was mentioned again"
        assert ended | self.aborted == {s.request.request_id for s in self.sequences}
        for sequence in self.sequences:
            assert sequence.finalized
            assert (sequence.inflight_refs, sequence.row, sequence.adapter.slot) == (0, -1, 0)
            assert sequence.inputs.adapter is None, "the host still has the adapter"
        commits = [launch for call, launch in self.runner.calls if call == "collect"]
        assert commits == sorted(commits) == [r.launch.launch_id for r in self.records]
        assert self.scheduler.steps_committed == len(commits)
