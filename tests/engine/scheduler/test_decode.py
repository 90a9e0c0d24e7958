"""Decode plans: turns, positions, draft tokens, loops, and preemption when pages run out."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from collections.abc import Sequence as SequenceOf
from typing import Any

import msgspec
import pytest
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.runtime.backend import have_common_pages
from legato_engine.scheduler.batch import BatchLimits, Launch, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.decode import DecodePlanner, RunningSequences, preemption_rank
from legato_engine.scheduler.queue import WaitingQueue
from legato_engine.scheduler.scheduler import Pipeline, Planner, Scheduler
from legato_engine.sequence import RowTokens, Sequence
from legato_engine.speculation import BlockSizes
from legato_engine.types import FinishReason, RequestKey

from tests.engine.scheduler.schedules import PAGE as READ_PAGE
from tests.engine.scheduler.schedules import WORTHWHILE, ReadingRunner, alone
from tests.engine.scheduler.world import (
    LONG_SEED,
    PAGE,
    World,
    decodes_of,
    make_planner,
    members_of,
    plain,
    planned,
    running,
    sized,
)
from tests.fakes import FakeClock, FakeSink, FakeTask, make_sequence

# ---------------------------------------------------------------- decode planner
# Decode plans: the sequences of the batch, their positions and draft tokens.


def speculating(
    blocks: BlockSizes, *sequences: Sequence, manager: KVCacheManager | None = None
) -> DecodePlanner:
    """Return a planner that drafts."""
    manager = manager or KVCacheManager(17, PAGE, 8)
    return DecodePlanner(manager, members_of(*sequences), blocks)


def test_decode_starts_with_the_last_launched_token() -> None:
    """The first decode is at the prompt's end, each later one a position further."""
    first, later = running(0, launched=1), running(1, launched=3, refs=1)
    assert plain(first, later).plan() == Plan(
        LaunchKind.DECODE,
        (ScheduledSequence(first, position=4), ScheduledSequence(later, position=6)),
    )


def test_sequences_about_one_image_are_neighbours() -> None:
    """In whatever order they came, and without those that have gone; others stay in order."""
    sequences = [running(number, launched=1) for number in range(7)]
    for sequence, page in zip(sequences, (3, 5, 3, 8, 5, 3, 9), strict=True):
        sequence.pages.ids = (page, *range(20, 24))
    planner = plain(*sequences)
    plan = planner.plan()
    assert planned(plan) == [0, 2, 5, 1, 4, 3, 6]
    assert plan is not None
    assert not have_common_pages(plan.rows)  # 3 of 7
    sequences[3].preempted = sequences[2].preempted = True
    plan = planner.plan()
    assert planned(plan) == [0, 5, 1, 4, 6]
    assert plan is not None
    assert not have_common_pages(plan.rows)
    sequences[6].preempted = True
    plan = planner.plan()
    assert plan is not None
    assert have_common_pages(plan.rows)  # 2 of 4


def test_decode_skips_sequences_that_cannot_continue() -> None:
    """Preempted, with all tokens launched, in two launches or not prefilled."""
    leaving = running(0, launched=1)
    leaving.preempted = True
    encoding = running(4, launched=2)
    encoding.progress.last_position = -1
    full = running(1, launched=8)
    ahead = running(2, launched=3, refs=2)
    last = running(3, launched=7)
    assert planned(plain(leaving, full, ahead, encoding, last).plan()) == [3]
    assert plain(leaving, full, ahead, encoding).plan() is None


class Forcing:
    """A grammar that forces tokens after the committed ones."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def forced(self, num_inflight: int) -> tuple[int, ...]:
        """Those after the ones in flight."""
        return self._tokens[num_inflight:]


def test_decodes_include_forced_tokens() -> None:
    """As many as the launch has room for and the answer may have, after those in flight."""
    many, few, free = running(0, launched=1, refs=1), running(1, launched=5), running(2, launched=2)
    few.tokens += [(token, (0.0, 0.0)) for token in range(5)]  # committed
    for sequence, tokens in ((many, range(10, 14)), (few, range(20, 30))):
        task: Any = sequence.task
        task.grammar = Forcing(*tokens)
    for room, forced in ((0, [(), ()]), (3, [(), ()]), (5, [(11, 12), ()])):
        planner = DecodePlanner(
            KVCacheManager(17, PAGE, 3), members_of(many, few, free), None, max_tokens=room
        )
        plan = planner.plan()
        assert plan is not None
        assert [row.forced for row in plan.rows] == [*forced, ()]
    planner = DecodePlanner(
        KVCacheManager(17, PAGE, 3), members_of(many, few, free), None, max_tokens=16
    )
    plan = planner.plan()
    assert plan is not None
    assert [row.forced for row in plan.rows] == [(11, 12, 13), (20, 21), ()]
    assert [row.end for row in plan.rows] == [8, 11, 6]
    many.task.has_payload = True
    plan = planner.plan()
    assert plan is not None
    assert not plan.rows[0].forced


def test_a_stream_without_a_page_is_a_stream() -> None:
    """Images are split for a streaming sequence even if no page is free for its next token."""
    waiting = running(0, launched=2)
    waiting.pages.capacity = waiting.progress.last_position
    assert plain(waiting).is_streaming
    waiting.preempted = True
    assert not plain(waiting).is_streaming
    whole = running(1, launched=2)
    whole.request = msgspec.structs.replace(whole.request, deltas=False)
    assert not plain(whole, running(2, launched=8)).is_streaming


class Blocks(BlockSizes):
    """Block sizes of one bound that records what it is asked."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.calls: list[tuple[list[int], bool]] = []

    def allot(self, sequences: Many[Sequence], *, under_pressure: bool) -> list[int]:
        """Return the same bound for all."""
        self.calls.append(([sequence.seq_id for sequence in sequences], under_pressure))
        return [self._size] * len(sequences)

    def learn(self, sequence: Sequence, output: RowTokens) -> None:
        """Ignore it."""


def test_a_decode_drafts_no_more_than_its_task_may_sample() -> None:
    """Near its end a sequence drafts less; with constraints or payloads it does not draft."""
    long, near = running(0, launched=1, max_tokens=20), running(1, launched=3, max_tokens=6)
    last, boxes = running(2, launched=7), running(3, launched=2)
    outline = running(4, launched=2)
    boxes.task.constrained = outline.task.has_payload = True
    blocks = Blocks(4)
    plan = speculating(blocks, long, boxes, near, outline, last).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [4, 0, 2, 0, 0]
    assert blocks.calls == [([0, 1, 2], False)]


def test_a_scheduled_sequence_knows_the_last_position_it_may_write() -> None:
    """After launches with draft tokens it may start later, but never exceeds its maximal length."""
    sequence = running(0, launched=2, max_tokens=30, refs=1)
    sequence.progress.inflight_drafts = 3
    plan = speculating(Blocks(4), sequence).plan()
    assert plan is not None
    (row,) = plan.rows
    assert (row.position, row.slack, row.num_drafts) == (5, 3, 4)
    assert row.end == 5 + 3 + 5
    sequence.progress.num_launched = 28
    sequence.progress.last_position = sequence.prompt_length + 27
    plan = speculating(Blocks(4), sequence).plan()
    assert plan is not None
    assert plan.rows[0].num_drafts == 1
    assert plan.rows[0].end == sequence.max_length


def grown(seq_id: int, manager: KVCacheManager) -> Sequence:
    """Return a sequence of prefix 1 and prompt 3, admitted, with its first token launched."""
    sequence = make_sequence(seq_id, FakeTask(num_prompt=3, max_tokens=30))
    manager.admit(sequence)
    sequence.progress.num_launched, sequence.progress.last_position = 1, sequence.prompt_length
    manager.mark_launched(sequence)
    return sequence


def test_draft_tokens_take_no_page_that_a_sequence_needs_to_grow() -> None:
    """A sequence may draft as many as it has pages for: all, a half, a quarter, or none."""
    manager = KVCacheManager(7, PAGE, 2)  # two of two pages each; two are free
    first, second = grown(0, manager), grown(1, manager)
    plan = speculating(Blocks(8), first, second, manager=manager).plan()
    assert plan is not None
    assert [row.num_drafts for row in plan.rows] == [4, 2]
    assert manager.stats().free == 1


def test_a_sequence_that_may_exceed_its_pages_waits_for_its_launch() -> None:
    """While draft tokens are in flight, a sequence needs pages for all of them."""
    manager = KVCacheManager(5, PAGE, 2)  # two of two pages each
    first, second = grown(0, manager), grown(1, manager)
    first.progress.inflight_drafts, first.inflight_refs = 3, 1
    planner = speculating(Blocks(1), first, second, manager=manager)
    assert planned(planner.plan()) == [0, 1]
    first.progress.inflight_drafts = 4
    assert planned(planner.plan()) == [1]
    first.progress.inflight_drafts = 0
    assert planned(planner.plan()) == [0, 1]


def test_a_launch_is_under_pressure_above_a_share_of_the_pages() -> None:
    """Bounds and the device are told alike."""
    for pages, pressed in ((13, False), (14, True)):
        manager = KVCacheManager(17, PAGE, 8)
        manager.admit(sized(0, pages * PAGE))
        blocks = Blocks(1)
        plan = speculating(blocks, running(1, launched=1), manager=manager).plan()
        assert plan is not None
        assert plan.under_pressure is pressed
        assert blocks.calls == [([1], pressed)]


# ---------------------------------------------------------------- planner


def test_adapters_share_launches() -> None:
    """Prompts and decodes of any adapters share; only a missing adapter slot makes one wait."""
    manager = KVCacheManager(33, PAGE, 9, num_adapter_slots=1)
    planner = make_planner(manager, limits=BatchLimits(4, tokens=99, sampled=9))
    for seq_id, adapter in enumerate(("x", "", "y", "x")):
        planner.add(make_sequence(seq_id, adapter=adapter))
    one = running(9, launched=1)
    one.adapter.key = "x"
    turns = Planner(planner, plain(one), prefills_per_decode=1, crops_per_launch=0)
    plan = turns.plan()
    assert plan is not None
    assert (planned(plan), plan.num_mixed_decodes) == ([9, 0, 1], 1)


def test_mixed_decodes_count_as_decodes() -> None:
    """No decode runs between two prefills that include all decodes."""
    prefill = make_planner(KVCacheManager(65, PAGE, 8), limits=BatchLimits(2, 20, 4))
    one = running(9, launched=1)
    planner = Planner(prefill, plain(one), prefills_per_decode=1, crops_per_launch=0)
    for seq_id, positions in enumerate((4, 4, 4, 30, 4)):
        prefill.add(sized(seq_id, positions))
    batches = [planned(planner.plan()) for _ in range(5)]
    assert batches == [[9, 0, 1], [9, 2], [3], [9], [9, 4]]


def test_prefills_and_decodes_take_turns() -> None:
    """`prefills_per_decode` prefills, then a decode; each continues alone while it has work."""
    prefill = make_planner(KVCacheManager(65, PAGE, 8))
    one = running(9, launched=1)
    members = members_of()
    decode = DecodePlanner(KVCacheManager(17, PAGE, 2), members, None)
    planner = Planner(prefill, decode, prefills_per_decode=2, crops_per_launch=0)
    for seq_id in range(5):
        prefill.add(sized(seq_id, 4))
    plans = []
    for decodes in (True, True, True, False, False, False, True, False):
        one.preempted = not decodes
        members.add(one)
        plans.append(planner.plan())
    kinds = [None if plan is None else plan.kind.value for plan in plans]
    assert kinds == [*["prefill"] * 2, "decode", *["prefill"] * 3, "decode", None]


# ---------------------------------------------------------------- launch


def test_new_pages_are_those_that_no_earlier_launch_could_reach() -> None:
    """They begin between its farthest start and its end; there may be several."""
    sequence = running(0, launched=2, max_tokens=60)
    rows = [
        ScheduledSequence(sequence, 5, num_drafts=k, slack=s)
        for k, s in ((0, 0), (2, 0), (8, 2), (8, 4))
    ]
    assert [list(row.new_pages(PAGE)) for row in rows] == [[], [], [2, 3], [3, 4]]
    assert list(ScheduledSequence(sequence, 8).new_pages(PAGE)) == [2]


def test_a_shared_launch_waits_for_the_constraints_of_its_decodes() -> None:
    """A prompt's constraint is known when it is planned."""
    free, boxes = running(0, launched=1), running(1, launched=1)
    boxes.task.constrained = True
    prompt = ScheduledSequence(boxes, 0, 3)
    for decodes, waits in ((decodes_of(free), False), (decodes_of(free, boxes), True)):
        plan = Plan(LaunchKind.PREFILL, (*decodes, prompt), len(decodes))
        assert plan.constrained is waits


def test_a_loop_behind_tokens_that_the_device_follows_waits_for_no_constraints() -> None:
    boxes = running(0, launched=1)
    boxes.task.constrained = True
    plan = Plan(LaunchKind.DECODE, decodes_of(boxes), num_steps=4)
    assert plan.constrained
    assert not dataclasses.replace(plan, after=(0,)).constrained


# ---------------------------------------------------------------- loops
# What is launched behind a loop, while only the device knows how far that is.

LIMITS = BatchLimits(3, tokens=40, sampled=6)
ROWS = 4


class Late(random.Random):
    """A device that goes on for as many steps as it may after it was told to end a loop."""

    def randint(self, a: int, b: int) -> int:
        """The most."""
        return b


class Keeping(ReadingRunner):
    """Keeps the plans, and how many plans and rows there were whenever a loop was told to end."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(lambda: False, draw)
        self.plans: list[Plan] = []
        self.plans_at_ends: list[int] = []
        self.rows_at_ends: list[int] = []
        self.in_flight_at_samples: list[int] = []  # launches when a loop was sampled
        self.num_rows: Callable[[], int] = lambda: 0

    def forward(self, launch: Launch) -> None:
        """As it is."""
        self.plans.append(launch.plan)
        super().forward(launch)

    def sample(self, launch: Launch, constraints: SequenceOf[int]) -> None:
        """As it is."""
        if launch.plan.is_loop:
            self.in_flight_at_samples.append(len(self._read))
        super().sample(launch, constraints)

    def stop_loop(self, launch: Launch) -> None:
        """As it is."""
        self.plans_at_ends.append(len(self.plans))
        self.rows_at_ends.append(self.num_rows())
        super().stop_loop(launch)


class Looping:
    """A scheduler that decodes by loops."""

    def __init__(
        self,
        draw: random.Random,
        num_pages: int = 60,
        *,
        limits: BatchLimits = LIMITS,
        loops: bool = True,
    ) -> None:
        self.has_command = False  # to be read before the step's tokens
        self.runner = Keeping(draw)
        self.manager = KVCacheManager(num_pages, READ_PAGE, ROWS)
        self.runner.num_rows = lambda: self.manager.rows.num_used
        self.scheduler = Scheduler(
            self.runner,
            self.manager,
            Pipeline(2),
            FakeClock(),
            FakeSink(),
            limits=limits,
            loops=self.runner if loops else None,
            pause=lambda _: self.has_command,
        )
        self.sequences: list[Sequence] = []

    def submit(
        self, max_tokens: int, *, constrained: bool = False, num_prompt: int = 1
    ) -> FakeTask:
        """A request that has all of its tokens; constraints follow the table."""
        for seed in range(1000):
            task = FakeTask(
                seed=seed,
                max_tokens=max_tokens,
                num_prompt=num_prompt,
                constrained=constrained,
                uses_transition_table=constrained,
            )
            sequence = make_sequence(len(self.sequences), task, prefix_key="")
            if len(alone(sequence)) == max_tokens:
                self.scheduler.submit(sequence)
                self.sequences.append(sequence)
                return task
        raise AssertionError("every answer stops early")

    def until(self, task: FakeTask, num_tokens: int) -> None:
        """Step until it has so many."""
        while len(task.tokens) < num_tokens:
            self.scheduler.step()

    def drain(self) -> None:
        """All answers are what they are alone, and nothing is in use."""
        self.scheduler.drain()
        self.manager.check()
        for sequence in self.sequences:
            assert isinstance(sequence.task, FakeTask)
            assert sequence.task.tokens == alone(sequence)
        assert self.scheduler.load().pages_used == 0

    def behind(self) -> list[tuple[LaunchKind, list[int], int]]:
        """Kind, decoding sequences and number of prompts of each launch behind a loop."""
        return [
            (plan.kind, [row.sequence.seq_id for row in plan.decodes], len(plan.prefills))
            for plan in self.runner.plans
            if plan.behind
        ]


@pytest.mark.parametrize("draw", [Late(), random.Random(0)])
@pytest.mark.parametrize("constrained", [False, True])
def test_a_prompt_joins_the_rows_of_the_loop_that_it_ends(
    draw: random.Random, constrained: bool
) -> None:
    """One launch has both, and the rows go on where the loop left them."""
    world = Looping(draw)
    first = world.submit(40, constrained=constrained)
    world.until(first, 10)
    world.submit(5)
    world.drain()
    assert world.behind()[0] == (LaunchKind.PREFILL, [0], 1)


def test_a_loop_is_told_to_end_before_a_prompt_is_admitted_behind_it() -> None:
    """It ends beside that, which takes the host about as long as the device has for a step."""
    world = Looping(random.Random(0))
    first = world.submit(40)
    world.until(first, 10)
    assert not world.runner.plans_at_ends
    world.submit(5)
    world.scheduler.step()
    assert world.runner.plans[-1].behind
    assert world.runner.plans_at_ends[0] == len(world.runner.plans) - 1
    assert world.runner.rows_at_ends[0] == 1
    world.drain()


def test_what_arrives_during_a_step_is_handled_before_its_end() -> None:
    """The wait for the step's tokens is cut short, and a prompt is enqueued behind the loop."""
    world = Looping(random.Random(0))
    first = world.submit(40)
    world.until(first, 10)
    have, steps = len(first.tokens), world.scheduler.steps_committed
    world.has_command = True
    world.scheduler.step()
    assert len(first.tokens) == have
    assert world.scheduler.steps_committed == steps
    world.has_command = False
    world.submit(5)
    world.scheduler.step()
    assert len(first.tokens) == have
    assert world.runner.plans[-1].behind
    world.drain()


def test_after_a_short_loop_come_as_many_single_steps_as_one_is_worth() -> None:
    """A request that cut it short may be one of many."""
    world = Looping(random.Random(0))
    first = world.submit(60)
    while not world.runner.plans[-1:] or not world.runner.plans[-1].is_loop:
        world.scheduler.step()
    world.submit(30)
    world.until(first, 30)
    plans = iter(world.runner.plans)
    next(plan for plan in plans if plan.behind)
    assert [plan.is_loop for plan in plans].index(True) == WORTHWHILE
    world.drain()


def test_prompts_without_pages_end_one_loop_in_vain() -> None:
    """The next ones go on until the prompts fit."""
    world = Looping(random.Random(0), num_pages=40)
    first = world.submit(80)
    world.until(first, 10)
    for _ in range(2):
        world.submit(4, num_prompt=100)
    world.until(first, 14)
    ends = list(world.runner.plans_at_ends)
    assert ends
    world.until(first, 60)
    assert world.runner.plans_at_ends == ends
    assert sum(plan.is_loop for plan in world.runner.plans) == 2
    world.drain()


def test_a_loop_goes_on_while_no_waiting_prompt_has_a_row() -> None:
    """All rows are taken."""
    world = Looping(random.Random(0), num_pages=240)
    *_, last = (world.submit(40) for _ in range(ROWS))
    world.until(last, 10)
    ends = list(world.runner.plans_at_ends)
    world.submit(5)
    world.until(last, 20)
    assert world.runner.plans[-1].is_loop
    assert world.runner.plans_at_ends == ends
    world.drain()


def test_a_row_that_ends_in_its_loop_is_padding_behind_it() -> None:
    """Its answer ends while the device does not know yet of the prompt that ends the loop."""
    world = Looping(Late())
    first = world.submit(12)
    world.until(first, 10)
    world.submit(5)
    world.drain()
    assert world.behind()[0] == (LaunchKind.PREFILL, [0], 1)
    assert world.runner.num_ended == 1
    again = world.submit(12)  # what is cached of the first answer is what it read
    world.drain()
    assert again.tokens == first.tokens


@pytest.mark.parametrize("constrained", [False, True])
def test_rows_go_on_behind_the_end_of_another(constrained: bool) -> None:
    """The loop is as long as the shortest answer; no row waits for the host at its end."""
    world = Looping(random.Random(0))
    world.submit(9)
    world.submit(30, constrained=constrained)
    world.drain()
    assert (LaunchKind.DECODE, [1], 0) in world.behind()
    assert world.runner.num_ended == 0


@pytest.mark.parametrize("constrained", [False, True])
def test_a_loop_begins_before_the_tokens_in_flight_are_read(constrained: bool) -> None:
    """Constraints follow them on the device."""
    world = Looping(random.Random(0))
    world.submit(30, constrained=constrained)
    world.submit(30)
    world.drain()
    assert world.runner.in_flight_at_samples[0] == 2
    assert bool(world.runner.num_advanced) == constrained


def test_nothing_is_launched_behind_a_lone_answer() -> None:
    """It ends with its loop."""
    world = Looping(random.Random(0))
    world.submit(30)
    world.drain()
    assert world.behind() == []
    assert sum(plan.is_loop for plan in world.runner.plans) == 1


# ---------------------------------------------------------------- preemption
# Preemption when pages run out: the victims, and that only their waiting time changes.

R0, R1 = RequestKey("r0"), RequestKey("r1")


def growing(world: World, *, priority: int = 0, constrained: bool = False) -> Sequence:
    """Submit a sequence that grows to 15 positions, four pages."""
    task = FakeTask(seed=LONG_SEED, max_tokens=14, constrained=constrained)
    return world.submit(task, priority=priority)


def preempted(world: World) -> list[Sequence]:
    """Return the sequences that were preempted at least once."""
    return [sequence for sequence in world.sequences if sequence.pages.num_preemptions]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("constrained", [False, True])
def test_the_newest_is_preempted_and_loses_no_token(depth: int, constrained: bool) -> None:
    """It starts once, reads every token once and in order, and ends as it would alone."""
    world = World(depth=depth, num_pages=7)
    both = [growing(world, constrained=constrained) for _ in range(2)]
    world.drain()
    assert preempted(world) == [both[1]]
    assert world.sink.started_ids == [R0, R1]
    for sequence in both:
        assert isinstance(sequence.task, FakeTask)
        assert world.tokens(sequence) == sequence.task.expected_tokens(sequence.prompt_length)
        assert world.sink.ended[sequence.request.request_id] is FinishReason.LENGTH


def test_priority_goes_before_age() -> None:
    """An older sequence is preempted for a newer one of higher priority."""
    world = World(num_pages=7)
    old, important = growing(world), growing(world, priority=3)
    world.drain()
    assert preempted(world) == [old]
    assert list(world.sink.ended) == [important.request.request_id, old.request.request_id]


def test_the_highest_rank_is_never_preempted() -> None:
    """The highest-ranked sequence runs to its end, however many compete for pages."""
    world = World(num_pages=7, num_rows=4)
    first, *others = [growing(world) for _ in range(6)]
    world.drain()
    assert not first.pages.num_preemptions
    assert preempted(world)
    assert next(iter(world.sink.ended)) == first.request.request_id
    assert all(sequence.finalized for sequence in others)


def test_a_victim_in_flight_waits_for_its_commits() -> None:
    """While a launch names it, it keeps row and pages and commits its token; then it waits."""
    world = World(num_pages=7)
    first, second = growing(world), growing(world)
    seen: list[tuple[int, int, int]] = []

    def on_delta(sequence: Sequence) -> None:
        if second.preempted and sequence is first:
            seen.append((second.row, second.inflight_refs, second.progress.num_launched))

    world.sink.on_delta = on_delta
    while not second.pages.num_preemptions:
        world.step()
    ((row, refs, launched),) = seen
    assert row >= 0
    assert refs == 1
    assert (second.is_waiting, second.preempted, second.row) == (True, False, -1)
    assert second.num_committed == second.progress.num_launched == launched
    assert not first.finalized
    world.drain()


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_preempted_request_may_be_aborted_or_stopped(stops: bool, waits: bool) -> None:
    """While its last launch is in flight, or while it waits: it ends once, with its tokens."""
    world = World(num_pages=7)
    first, second = growing(world), growing(world)
    give_up = world.scheduler.stop if stops else world.scheduler.abort
    committed: list[int] = []

    def on_delta(sequence: Sequence) -> None:
        if not second.finalized and (second.pages.num_preemptions if waits else second.preempted):
            committed.extend(world.tokens(second))
            if not stops:
                world.aborted.add(second.request.request_id)
            give_up(second.request.request_id)

    world.sink.on_delta = on_delta
    world.drain()
    assert second.finalized
    assert world.tokens(second) == committed != []
    assert world.tokens(first) == FakeTask(seed=LONG_SEED, max_tokens=14).expected_tokens(2)
    assert world.sink.started_ids == [R0, R1]
    expected = FinishReason.CANCELLED if stops else None
    assert world.sink.ended.get(second.request.request_id) is expected


def test_an_image_is_computed_again_after_a_preemption() -> None:
    """Its prefix may be evicted while it waits; it is encoded again from the host's copy."""
    world = World(num_pages=12, crops_per_launch=2)
    first = world.submit(FakeTask(seed=LONG_SEED, max_tokens=14), priority=1)
    image = world.submit(
        FakeTask(seed=LONG_SEED, max_tokens=14), prefix_key="p", prefix_length=9, num_crops=5
    )
    big = world.submit(FakeTask(seed=LONG_SEED, num_prompt=8, max_tokens=14), priority=2)
    world.drain()
    assert image.pages.num_preemptions
    assert not big.pages.num_preemptions
    computed = [
        plan
        for plan in world.runner.plans
        for row in plan.rows
        if row.sequence is image and row.work.compute_pages and row.num_tokens
    ]
    assert len(computed) == 2
    assert first.finalized
    assert world.tokens(image) == FakeTask(seed=LONG_SEED, max_tokens=14).expected_tokens(10)


def test_a_sequence_without_a_lower_ranked_victim_stalls() -> None:
    """The lowest-ranked sequence keeps its pages and waits until another one ends."""
    queue = WaitingQueue[Sequence](max_overtakes=0, priority_seconds=1.0)
    manager = KVCacheManager(3, 4, 2)
    members = RunningSequences(manager, queue)
    both = [make_sequence(n, FakeTask(num_prompt=2)) for n in range(2)]
    for sequence in both:
        manager.admit(sequence)
        sequence.progress.last_position = sequence.length
        manager.mark_launched(sequence)
        members.add(sequence)
    assert preemption_rank(both[1]) < preemption_rank(both[0])
    members.grow([both[1]])
    assert (both[1].pages.capacity, list(members), len(queue)) == (4, both, 0)
    members.grow([both[0]])
    assert (both[0].pages.capacity, list(members), len(queue)) == (8, both[:1], 1)
    manager.check()
