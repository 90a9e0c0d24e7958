"""Prefill plans: admission, shared launches, prompts in parts and encodes."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
from legato_engine.errors import DeadlineExceeded
from legato_engine.kv_cache.manager import KVCacheManager, PrefillWork
from legato_engine.scheduler.batch import ALONE, BatchLimits, LaunchKind, Plan, ScheduledSequence
from legato_engine.scheduler.prefill import PrefillPlanner
from legato_engine.sequence import Sequence
from legato_engine.types import FinishReason, RequestKey

from tests.engine.scheduler.test_decode import Looping
from tests.engine.scheduler.world import (
    LONG_SEED,
    PAGE,
    World,
    decodes_of,
    make_planner,
    planned,
    running,
    sized,
)
from tests.fakes import FakeTask, make_sequence

# ---------------------------------------------------------------- prefill planner
# Prefill plans: admission, shared launches and encodes.


def test_a_prefill_starts_after_the_prefix() -> None:
    """The whole prompt is scheduled, from the end of the prefix."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    sequence = make_sequence(0, FakeTask(num_prompt=3), prefix_key="k", prefix_length=9)
    planner.add(sequence)
    plan = planner.plan()
    assert plan is not None
    pages = plan.rows[0].work.compute_pages
    work = PrefillWork(pages, (pages[2], sequence.pages.ids[2]))
    assert plan == Plan(LaunchKind.PREFILL, (ScheduledSequence(sequence, 9, 3, work),))
    assert len(planner) == 0
    assert planner.plan() is None


def test_prefills_are_first_come_first_served() -> None:
    """One sequence per launch by default, in the order of arrival."""
    planner = make_planner(KVCacheManager(17, PAGE, 3))
    for seq_id in range(3):
        planner.add(sized(seq_id, 4))
    assert [planned(planner.plan()) for _ in range(3)] == [[0], [1], [2]]


def test_a_prefill_batch_has_bounded_rows() -> None:
    """The limits of prompts, tokens and sampled sequences are kept."""
    for limits, batches in (
        (BatchLimits(3, tokens=99, sampled=9), [[0, 1, 2], [3, 4]]),
        (BatchLimits(9, tokens=11, sampled=9), [[0, 1], [2, 3], [4]]),
        (BatchLimits(9, tokens=99, sampled=4), [[0, 1, 2, 3], [4]]),
        (BatchLimits(9, tokens=3, sampled=9), [[0], [1], [2], [3], [4]]),
    ):
        planner = make_planner(KVCacheManager(17, PAGE, 5), limits=limits)
        for seq_id in range(5):
            planner.add(sized(seq_id, 4))
        assert [planned(planner.plan()) for _ in batches] == batches


def test_an_image_to_compute_begins_a_launch() -> None:
    """No earlier request waits for an image; requests about a cached or the same image join."""
    manager = KVCacheManager(33, PAGE, 9)
    planner = make_planner(manager, limits=BatchLimits(9, tokens=99, sampled=9))
    keys = ("a", "a", "b", None, "a")
    sequences = [
        make_sequence(n, prefix_key=key, prefix_length=4 if key else 1)
        for n, key in enumerate(keys)
    ]
    for sequence in sequences[:4]:
        planner.add(sequence)
    plan = planner.plan()
    assert planned(plan) == [0, 1], "the next request computes an image"
    assert plan is not None
    assert [bool(row.work.compute_pages) for row in plan.rows] == [True, False]
    planner.add(sequences[4])
    assert planned(planner.plan()) == [2, 3, 4]
    assert [sequence.pages.cached_tokens for sequence in sequences] == [0, 4, 0, 0, 4]


def test_images_share_a_launch_while_many_requests_wait() -> None:
    """Up to the limit, before all other prompts, which may be first and are not fewer for it.

    None is added if few requests wait, an answer is long, a decode streams, or the first image is
    not supported by the encoder.
    """

    def plan(
        *keys: str | None,
        images: int = 2,
        min_queue_length: int = 1,
        said: int = 0,
        streaming: bool = False,
    ) -> list[int]:
        manager = KVCacheManager(65, PAGE, 9)
        limits = BatchLimits(
            3, tokens=99, sampled=9, images=images, min_queue_length=min_queue_length
        )
        planner = make_planner(manager, limits=limits)
        for n, key in enumerate(keys):
            length, crops = (4, 0 if key == "host" else 3) if key else (1, 0)
            planner.add(make_sequence(n, prefix_key=key, prefix_length=length, num_crops=crops))
        decodes = decodes_of(running(90, launched=said, max_tokens=99)) if said else ()
        made = planner.plan(decodes=decodes, streaming=streaming)
        assert made is not None
        computed = [row.encodes for row in made.prefills]
        assert computed == sorted(computed, reverse=True), "images are not first"
        assert made.num_mixed_decodes == len(decodes)
        return planned(made)[made.num_mixed_decodes :]

    assert plan("a", "b", "c") == [0, 1]
    assert plan("a", "b", "c", images=3, min_queue_length=0) == [0, 1, 2]
    assert plan("a", "a", "b", "b", "c", None) == [0, 2, 1, 3]
    assert plan("a", "a", "b", "b", "a", "b") == [0, 2, 1, 3], "an image adds a prompt"
    assert plan("a", "b", min_queue_length=2) == [0]
    assert plan("a", "b", "c", min_queue_length=2) == [0, 1]
    assert plan("a", "b", "c", said=7) == [0, 1]
    assert plan("a", "b", "c", said=8) == [0]
    assert plan("a", "b", "c", streaming=True) == [0]
    assert plan(None, "b", "c") == [1, 2, 0]
    assert plan(None, "b", "c", min_queue_length=9) == [0]
    assert plan(None, "b", images=1, min_queue_length=0) == [0]
    assert plan("host", "b", "c") == [0]
    assert plan("a", "host", "c") == [0]


def test_decodes_join_a_prefill() -> None:
    """All of them or none, before the prompts, which join up to the limits."""
    decodes = decodes_of(running(7, launched=1), running(8, launched=2))
    for limits, seq_ids, num_mixed_decodes in (
        (BatchLimits(4, tokens=10, sampled=4), [7, 8, 0, 1], 2),
        (BatchLimits(4, tokens=9, sampled=4), [7, 8, 0], 2),
        (BatchLimits(4, tokens=99, sampled=3), [7, 8, 0], 2),
        (BatchLimits(4, tokens=5, sampled=4), [0], 0),
        (BatchLimits(4, tokens=99, sampled=2), [0, 1], 0),
        (ALONE, [0], 0),
    ):
        planner = make_planner(KVCacheManager(17, PAGE, 5), limits=limits)
        planner.add(sized(0, 4))
        planner.add(sized(1, 4))
        plan = planner.plan(decodes=decodes)
        assert plan is not None
        assert (planned(plan), plan.num_mixed_decodes) == (seq_ids, num_mixed_decodes)
        assert plan.decodes == decodes[:num_mixed_decodes]
        assert [row.sequence.seq_id for row in plan.prefills] == seq_ids[num_mixed_decodes:]


def test_a_large_request_is_overtaken_only_so_often() -> None:
    """Small requests overtake a large one that does not fit, until it blocks them and is next."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=2)
    blocker = sized(0, 16)
    manager.admit(blocker)
    planner.add(sized(1, 32))
    small = [sized(seq_id, 4) for seq_id in range(2, 6)]
    for sequence in small:
        planner.add(sequence)
    assert [planned(planner.plan()) for _ in range(3)] == [[2], [3], []]
    manager.release(blocker)
    assert planner.plan() is None
    for sequence in small[:2]:
        manager.release(sequence)
    assert planned(planner.plan()) == [1]


def test_a_blocking_request_goes_before_all_later_ones() -> None:
    """When the large request fits, it is taken first."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=0)
    blocker = sized(0, 4)
    manager.admit(blocker)
    planner.add(sized(1, 32))
    planner.add(sized(2, 4))
    assert planner.plan() is None
    manager.release(blocker)
    assert planned(planner.plan()) == [1]


def test_a_search_skips_no_more_than_may_overtake() -> None:
    """A request further back waits even if it fits."""
    manager = KVCacheManager(9, PAGE, 8)
    planner = make_planner(manager, max_overtakes=1)
    manager.admit(sized(0, 16))
    for seq_id, positions in ((1, 32), (2, 32), (3, 4)):
        planner.add(sized(seq_id, positions))
    assert planner.plan() is None


def test_a_removed_sequence_is_not_planned() -> None:
    """A sequence that left the queue is not prefilled."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    first, second = sized(0, 4), sized(1, 4)
    planner.add(first)
    planner.add(second)
    planner.remove(first)
    assert planned(planner.plan()) == [1]


def test_an_encode_names_its_crops_and_has_no_input() -> None:
    """Each part of an image has the same pages and its own crops, the prefill has the rest."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    sequence = make_sequence(0, prefix_key="k", prefix_length=8, num_crops=5)
    planner.add(sequence)
    plans = [planner.plan(max_crops=2), planner.plan(max_crops=2), planner.plan()]
    assert plans[0] is not None
    pages = plans[0].rows[0].work.compute_pages
    parts = [PrefillWork(pages, None, first, stop) for first, stop in ((0, 2), (2, 4), (4, 0))]
    assert plans == [
        Plan(LaunchKind.ENCODE, (ScheduledSequence(sequence, 8, 0, parts[0]),)),
        Plan(LaunchKind.ENCODE, (ScheduledSequence(sequence, 8, 0, parts[1]),)),
        Plan(LaunchKind.PREFILL, (ScheduledSequence(sequence, 8, 1, parts[2]),)),
    ]
    assert not planner.has_work


def test_a_sequence_aborted_between_its_encodes_is_not_planned() -> None:
    """The next in the queue is planned, and the planner forgets the first."""
    planner = make_planner(KVCacheManager(17, PAGE, 2))
    large, text = make_sequence(0, num_crops=5), sized(1, 4)
    planner.add(large)
    planner.add(text)
    assert planned(planner.plan(max_crops=2)) == [0]
    assert len(planner) == 1
    planner.remove(large)
    assert planned(planner.plan(max_crops=2)) == [1]
    assert not planner.has_work


# ---------------------------------------------------------------- parts
# Prompts in parts, a launch each, while others decode.

LIMITS = BatchLimits(4, tokens=24, sampled=8, pass_tokens=8, chunk_above=64)
DECODES = decodes_of(*(running(seq_id, launched=1) for seq_id in range(7, 15)))


def planner_of(*sequences: Sequence, limits: BatchLimits = LIMITS) -> PrefillPlanner:
    planner = make_planner(KVCacheManager(65, PAGE, 5), limits=limits)
    for sequence in sequences:
        planner.add(sequence)
    return planner


def plan_of(planner: PrefillPlanner, num_decodes: int = 3) -> Plan:
    plan = planner.plan(decodes=DECODES[:num_decodes])
    assert plan is not None
    return plan


def spans(plan: Plan) -> list[tuple[int, int]]:
    return [(row.position, row.num_tokens) for row in plan.prefills]


def test_a_lone_prompt_is_cut_where_that_adds_few_passes() -> None:
    """A part leaves the pass its decodes; BOS, which it computes too, is no token of the prompt."""
    planner = planner_of(sized(0, 10))
    first = plan_of(planner)
    assert (spans(first), first.has_partial_prefill, planned(first)) == (
        [(1, 4)],
        True,
        [7, 8, 9, 0],
    )
    assert first.counted_rows == first.decodes == DECODES[:3]
    assert first.prefills[0].work.compute_pages
    last = plan_of(planner)
    assert (spans(last), last.has_partial_prefill, planned(last)) == ([(5, 5)], False, [7, 8, 9, 0])
    assert last.counted_rows == last.rows
    assert not last.prefills[0].work.compute_pages
    assert not planner.has_work


@pytest.mark.parametrize(
    ("positions", "num_decodes", "why"),
    [
        (5, 3, "it fits one pass"),
        (12, 3, "three parts instead of two passes"),
        (10, 0, "no decode waits"),
    ],
)
def test_a_prompt_is_whole_where_parts_win_nothing(
    positions: int, num_decodes: int, why: str
) -> None:
    plan = plan_of(planner_of(sized(0, positions)), num_decodes)
    assert not plan.has_partial_prefill, why
    assert spans(plan) == [(1, positions - 1)]


def test_other_prompts_are_not_kept_waiting_by_parts() -> None:
    """They share a launch of several passes, as do those that come between two parts."""
    both = plan_of(planner_of(sized(0, 10), sized(1, 4)))
    assert (planned(both), both.has_partial_prefill) == ([7, 8, 9, 0, 1], False)
    planner = planner_of(sized(0, 15))
    assert plan_of(planner, num_decodes=2).has_partial_prefill
    planner.add(sized(1, 4))
    rest = plan_of(planner)
    assert (spans(rest), rest.has_partial_prefill) == ([(6, 9), (1, 3)], False)


def with_image(num_prompt: int) -> Sequence:
    task = FakeTask(num_prompt=num_prompt, max_tokens=1)
    return make_sequence(0, task, prefix_key="k", prefix_length=9, num_crops=3)


@pytest.mark.parametrize(
    ("positions", "num_decodes", "expected"),
    [
        (24, 3, [(1, 12), (13, 11)]),  # four passes instead of three; parts of one would be five
        (33, 2, [(1, 5), (6, 6), (12, 6), (18, 6), (24, 6), (30, 3)]),  # six passes instead of five
        (33, 7, [(1, 16), (17, 9), (26, 7)]),  # no parts add so few, then the rest fits a launch
        (33, 8, [(1, 23), (24, 9)]),  # no room for it beside them
        (20, 8, [(1, 19)]),  # nor does it share a launch with them
        (65, 3, [(1, 64)]),  # its passes are of another kind
    ],
)
def test_parts_are_the_smallest_that_add_few_passes(
    positions: int, num_decodes: int, expected: list[tuple[int, int]]
) -> None:
    """All but the last are parts, and decodes go on in each, or between them if they are many."""
    planner = planner_of(sized(0, positions))
    plans = [plan_of(planner, num_decodes) for _ in expected]
    assert [spans(plan) for plan in plans] == [[span] for span in expected]
    assert [plan.has_partial_prefill for plan in plans] == [True] * (len(plans) - 1) + [False]
    is_cut = len(plans) > 1
    beside = num_decodes if is_cut and num_decodes < LIMITS.sampled else 0
    assert {len(plan.decodes) for plan in plans} == {beside}
    assert not planner.has_work


def test_a_long_prompt_is_cut_though_others_wait() -> None:
    """They share the launch of its last part. An image is computed with the first."""
    planner = planner_of(with_image(33), sized(1, 4))
    first = plan_of(planner, 7)
    assert (spans(first), first.has_partial_prefill) == ([(9, 17)], True)
    assert first.prefills[0].encodes
    rest = plan_of(planner, num_decodes=4)
    assert (spans(rest), rest.has_partial_prefill) == ([(26, 16), (1, 3)], False)
    assert not rest.prefills[0].encodes


def test_parts_of_a_long_prompt_are_its_own_passes() -> None:
    """They are whole passes with BOS, which no decode and no other prompt joins, even the last."""
    limits = dataclasses.replace(LIMITS, chunk_above=24, long_chunk_tokens=12)
    planner = planner_of(sized(0, 30), sized(1, 4), limits=limits)
    plans = [plan_of(planner) for _ in range(3)]
    assert [spans(plan) for plan in plans] == [[(1, 11)], [(12, 12)], [(24, 6)]]
    assert [plan.has_partial_prefill for plan in plans] == [True, True, False]
    assert [planned(plan) for plan in plans] == [[0], [0], [0]]
    assert planned(plan_of(planner)) == [7, 8, 9, 1]
    alone = plan_of(planner_of(sized(0, 30), limits=limits), num_decodes=0)
    assert (spans(alone), alone.has_partial_prefill) == ([(1, 29)], False)


def test_no_part_is_bos_alone() -> None:
    """Nothing would be sampled after it."""
    limits = dataclasses.replace(LIMITS, chunk_above=1, long_chunk_tokens=1)
    plan = plan_of(planner_of(sized(0, 4), limits=limits))
    assert (spans(plan)[-1], plan.has_partial_prefill) == ((1, 3), False)


def test_what_is_not_cut() -> None:
    """A prompt that could share its launch with an image stays whole.

    So does any without limits of a pass.
    """
    assert not plan_of(planner_of(with_image(10))).has_partial_prefill
    unlimited = BatchLimits(4, tokens=24, sampled=8)
    assert not plan_of(planner_of(sized(0, 10), limits=unlimited)).has_partial_prefill


def test_the_rest_is_one_part_when_no_decode_is_left() -> None:
    planner = planner_of(sized(0, 10))
    assert plan_of(planner).has_partial_prefill
    rest = plan_of(planner, num_decodes=0)
    assert (spans(rest), rest.has_partial_prefill) == ([(5, 5)], False)


def test_a_request_ends_between_two_parts() -> None:
    """Then nothing is left to plan."""
    sequence = sized(0, 10)
    planner = planner_of(sequence)
    plan_of(planner)
    planner.remove(sequence)
    assert not planner.has_work
    assert planner.plan(decodes=DECODES) is None


@pytest.mark.parametrize("aborted", [False, True])
def test_decodes_go_on_in_each_part(aborted: bool) -> None:
    """Every answer is what it is alone; a request that is aborted between parts leaves nothing."""
    world = Looping(
        random.Random(0), limits=BatchLimits(3, 40, 6, pass_tokens=6, chunk_above=40), loops=False
    )
    first, second = world.submit(12), world.submit(12)
    world.until(second, 2)
    late = world.submit(3, num_prompt=8)
    have = len(first.tokens)
    while not world.runner.plans[-1].has_partial_prefill:
        world.scheduler.step()
    if aborted:
        world.scheduler.abort(world.sequences.pop().request.request_id)
    else:
        world.until(late, 1)
        assert len(first.tokens) >= have + 2
        parts = [plan for plan in world.runner.plans if plan.has_partial_prefill]
        assert [len(plan.decodes) for plan in parts] == [2]
    world.drain()


# ---------------------------------------------------------------- encodes
# A large image among decodes: encoded in parts, and aborted between any of them.

R0, R1 = RequestKey("r0"), RequestKey("r1")

ENCODE, PREFILL, DECODE, _ = LaunchKind
STEPS_TO_PREFILL = 7  # of an image of 13 crops: three encodes and the prefill, decodes between


def decoding(world: World, max_tokens: int = 14) -> Sequence:
    """Submit a sequence that decodes from the next step on."""
    sequence = world.submit(FakeTask(seed=LONG_SEED, max_tokens=max_tokens))
    world.steps(1)
    return sequence


def image(
    world: World, num_crops: int = 13, *, key: str | None = "image", seconds: float | None = None
) -> Sequence:
    """Submit a sequence with an image of that many crops."""
    deadline = None if seconds is None else world.clock.now() + seconds
    task = FakeTask(seed=LONG_SEED, max_tokens=4)
    return world.submit(
        task, prefix_key=key, prefix_length=9, num_crops=num_crops, deadline=deadline
    )


def crops_of(plan: Plan) -> tuple[LaunchKind, int, int]:
    """Return the kind of a launch and the crops of its first row."""
    work = plan.rows[0].work
    return plan.kind, work.first_piece, work.stop_piece


@pytest.mark.parametrize("depth", [1, 2])
def test_a_large_image_is_encoded_between_decodes(depth: int) -> None:
    """Groups of at most five crops, then the prefill, with a decode between any two."""
    world = World(depth=depth)
    decoding(world)
    image(world)
    world.steps(1 + STEPS_TO_PREFILL)
    assert [crops_of(plan) for plan in world.runner.plans[1:]] == [
        (DECODE, 0, 0),
        (ENCODE, 0, 5),
        (DECODE, 0, 0),
        (ENCODE, 5, 10),
        (DECODE, 0, 0),
        (ENCODE, 10, 13),
        (DECODE, 0, 0),
        (PREFILL, 13, 0),
    ]
    world.drain()


def test_without_a_stream_an_image_is_not_split() -> None:
    """Among decodes that do not stream, an image is prefilled in one launch."""
    world = World()
    sequence = decoding(world)
    sequence.request = msgspec.structs.replace(sequence.request, deltas=False)
    image(world)
    world.steps(3)
    assert [crops_of(plan) for plan in world.runner.plans[1:]] == [
        (DECODE, 0, 0),
        (PREFILL, 0, 0),
        (DECODE, 0, 0),
    ]
    world.drain()


def test_an_image_alone_is_not_split() -> None:
    """An image that arrives alone is prefilled in one launch."""
    world = World()
    image(world)
    world.steps(1)
    assert [crops_of(plan) for plan in world.runner.plans] == [(PREFILL, 0, 0)]
    world.drain()


@pytest.mark.parametrize(("crops_per_launch", "num_crops"), [(5, 5), (0, 13)])
def test_a_small_image_and_a_limit_of_zero_split_nothing(
    crops_per_launch: int, num_crops: int
) -> None:
    """Such an image is prefilled in one launch, even among streaming decodes."""
    world = World(crops_per_launch=crops_per_launch)
    decoding(world)
    image(world, num_crops)
    world.steps(2)
    assert [crops_of(plan) for plan in world.runner.plans[2:]] == [(PREFILL, 0, 0)]
    world.drain()


def test_the_prefill_encodes_the_rest_when_the_last_decode_has_ended() -> None:
    """No stream is left, so one launch encodes all remaining crops."""
    world = World()
    decoding(world, max_tokens=3)
    image(world)
    world.drain()
    assert [crops_of(plan) for plan in world.runner.plans[1:5]] == [
        (DECODE, 0, 0),
        (ENCODE, 0, 5),
        (DECODE, 0, 0),
        (PREFILL, 5, 0),
    ]


def test_a_cached_image_is_not_encoded() -> None:
    """A hit reads the prefix, however large the image is."""
    world = World()
    image(world)
    world.steps(1)
    hit = image(world)
    world.drain()
    assert hit.pages.cached_tokens == 9
    assert ENCODE not in {plan.kind for plan in world.runner.plans}


def test_no_sequence_is_prefilled_between_the_parts_of_an_image() -> None:
    """There is one feature buffer: later requests wait, text and the same image alike."""
    world = World()
    decoding(world)
    first, same, other = image(world), image(world), image(world, 6, key=None)
    text = world.submit(FakeTask(seed=LONG_SEED, max_tokens=4))
    world.drain()
    order = [p.rows[0].sequence for p in world.runner.plans[1:] if p.kind is not DECODE]
    assert order == [first] * 4 + [same] + [other] * 3 + [text]
    assert (first.pages.cached_tokens, same.pages.cached_tokens) == (0, 9)


def test_a_large_image_shares_no_launch() -> None:
    """An encode has one row even if prefills are shared, and joins no other launch."""
    world = World(max_prefill_rows=3, num_rows=4)
    text = decoding(world)
    small = world.submit(FakeTask(seed=LONG_SEED, max_tokens=4))
    large = image(world)
    world.steps(4)
    rows = [[row.sequence for row in plan.rows] for plan in world.runner.plans]
    assert (rows[2], rows[3]) == ([text, small], [large])
    assert world.runner.plans[3].kind is ENCODE
    world.drain()


def test_an_encode_samples_nothing() -> None:
    """It has no constraints, tokens or zombies; its record is complete."""
    world = World()
    decoding(world)
    sequence = image(world)
    world.steps(3)
    assert world.runner.constraints[2] == []
    assert (sequence.progress.num_launched, sequence.num_committed) == (0, 0)
    world.abort(sequence)
    world.drain()
    record = next(r for r in world.records if r.launch.launch_id == 2)
    assert record.launch.plan.kind is ENCODE
    assert record.zombies == 0


def test_a_request_starts_with_the_first_part_of_its_image() -> None:
    """The sink is told once; the request keeps its image to the end and counts as running."""
    world = World()
    decoding(world)
    sequence = image(world)
    world.steps(2)
    started = world.clock.now()
    assert world.sink.started_ids == [R0, R1]
    assert not sequence.is_waiting
    assert sequence.inputs.image is not None
    load = world.scheduler.load()
    assert (load.running, load.waiting) == (2, 0)
    world.clock.advance(1.0)
    world.steps(STEPS_TO_PREFILL - 1)
    assert sequence.timing.prefill_start == started
    assert sequence.inputs.image is not None, "released before the end"
    world.drain()
    assert sequence.inputs.image is None
    assert world.sink.started_ids == [R0, R1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("expires", [False, True])
@pytest.mark.parametrize("key", ["image", None])
@pytest.mark.parametrize("phase", range(STEPS_TO_PREFILL + 4))
def test_a_request_may_be_aborted_in_any_phase_of_its_image(
    depth: int, expires: bool, key: str | None, phase: int
) -> None:
    """Whatever the phase, an abort releases resources once and blocks no other request.

    It may wait, be between two encodes, prefilled or decoding; the other asks about the same image.
    """
    world = World(depth=depth)
    text = decoding(world)
    aborted = image(world, key=key, seconds=5.0 if expires else None)
    world.steps(phase)
    following = image(world, key=key)
    if expires:
        world.clock.advance(5.0)
    else:
        world.abort(aborted)
    world.drain()
    assert aborted.inputs.image is None
    if expires:
        assert type(world.sink.ended[R1]) is DeadlineExceeded
    computed = key is not None and phase > STEPS_TO_PREFILL
    assert following.pages.cached_tokens == (9 if computed else 0)
    for sequence in (text, following):
        assert isinstance(world.sink.ended[sequence.request.request_id], FinishReason)
        assert isinstance(sequence.task, FakeTask)
        assert sequence.task.tokens == sequence.task.expected_tokens(sequence.prompt_length)


def test_the_sink_may_abort_when_the_first_part_starts() -> None:
    """The sequence is a zombie from its first encode on and is not planned again."""
    world = World()
    decoding(world)
    world.sink.started = world.abort  # type: ignore[method-assign]  # aborts at once
    image(world)
    world.drain()
    assert [plan.kind for plan in world.runner.plans if plan.kind is not DECODE] == [
        PREFILL,
        ENCODE,
    ]


# ---------------------------------------------------------------- images in prompts


VISUAL = ((1, 6), (8, 10), (20, 4))  # 24 tokens of a prompt of 26; pieces of 3, 5 and 2
NUM_PIECES = 6
VISUAL_TOKENS = 5


def visual(world: World, *, seconds: float | None = None, tenant: str = "") -> Sequence:
    """Submit a sequence with three images in its prompt."""
    deadline = None if seconds is None else world.clock.now() + seconds
    task = FakeTask(seed=LONG_SEED, num_prompt=26, max_tokens=4)
    return world.submit(
        task, prefix_key="", prefix_length=0, deadline=deadline, tenant=tenant, images=VISUAL
    )


def launches(world: World, sequence: Sequence) -> list[tuple[LaunchKind, int, int]]:
    """Return the kinds of a sequence's launches up to its first token, with pieces or positions."""
    found = []
    for plan in world.runner.plans:
        for row in plan.rows[plan.num_mixed_decodes :]:
            if row.sequence is sequence and plan.kind is not DECODE:
                work, start = row.work, row.position
                at = (work.first_piece, work.stop_piece)
                found.append(
                    (plan.kind, *(at if plan.kind is ENCODE else (start, start + row.num_tokens)))
                )
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("streams", [True, False])
def test_images_of_a_prompt_are_encoded_between_decodes(depth: int, streams: bool) -> None:
    """A decode commits between any two launches, each of which has at most five tokens.

    A chunk's images are encoded before it, so that only its features are kept.
    """
    world = World(depth=depth, image_tokens=VISUAL_TOKENS, streams=streams)
    text = decoding(world)
    asked = visual(world)
    committed = []
    while asked.progress.last_position < 0:
        world.step()
        if world.runner.plans[-1].rows[0].sequence is asked:
            committed.append(text.num_committed)
    assert launches(world, asked) == [
        (ENCODE, 0, 1),
        (ENCODE, 1, 2),
        (PREFILL, 0, 5),
        (ENCODE, 2, 3),
        (ENCODE, 3, 4),
        (PREFILL, 5, 10),
        (PREFILL, 10, 15),
        (PREFILL, 15, 20),
        (PREFILL, 20, 25),
        (PREFILL, 25, 26),
    ]
    assert committed == [*range(committed[0], committed[0] + len(committed))]
    assert world.runner.encoded == [(asked, piece) for piece in range(NUM_PIECES)]
    world.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_new_request_waits_for_a_piece_of_a_lone_prompt_only(depth: int) -> None:
    """A prompt with images is split before others come; a whole one holds up even its deadline."""
    world = World(depth=depth, image_tokens=VISUAL_TOKENS)
    asked = visual(world)
    world.steps(2)
    text = world.submit(FakeTask(seed=LONG_SEED, max_tokens=4))
    world.steps(2)
    kinds = [(plan.kind, plan.rows[0].sequence) for plan in world.runner.plans]
    assert kinds[:3] == [(ENCODE, asked), (ENCODE, asked), (PREFILL, text)]
    world.drain()
    assert world.runner.encoded == [(asked, piece) for piece in range(NUM_PIECES)]


def test_cached_images_of_a_prompt_are_not_encoded() -> None:
    """The pieces of images that the prefix cache has are skipped; one that it cuts is encoded."""
    world = World(image_tokens=VISUAL_TOKENS, page_size=4, num_pages=130)
    visual(world)
    world.drain()
    decoding(world)
    encoded = len(world.runner.encoded)
    again = visual(world)
    cut = world.submit(
        FakeTask(seed=LONG_SEED, num_prompt=26, max_tokens=4),
        prefix_key="",
        prefix_length=0,
        images=VISUAL,
    )
    cut.tokens[14:] = [(token, (1.0, 1.0)) for token, _ in cut.tokens[14:]]
    world.drain()
    assert again.pages.cached_tokens == 24
    assert [piece for who, piece in world.runner.encoded[encoded:] if who is again] == []
    assert cut.pages.cached_tokens == 14
    assert [piece for who, piece in world.runner.encoded[encoded:] if who is cut] == [2, 3, 4, 5]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("expires", [False, True])
@pytest.mark.parametrize("phase", range(0, 26, 2))
def test_a_request_may_be_aborted_between_pieces_of_its_images(
    depth: int, expires: bool, phase: int
) -> None:
    """Its features end with its inputs, and the next request encodes what it needs itself.

    That holds beside a decode and after the last one.
    """
    world = World(depth=depth, image_tokens=VISUAL_TOKENS)
    text = decoding(world, max_tokens=5)
    aborted = visual(world, seconds=5.0 if expires else None)
    world.steps(phase)
    following = visual(world)
    if expires:
        world.clock.advance(5.0)
    else:
        world.abort(aborted)
    world.drain()
    assert aborted.inputs.visual is None
    for sequence in (text, following):
        assert isinstance(world.sink.ended[sequence.request.request_id], FinishReason)
        assert isinstance(sequence.task, FakeTask)
        assert sequence.task.tokens == sequence.task.expected_tokens(sequence.prompt_length)


def test_tenants_with_images_take_turns() -> None:
    """One with many requests delays another's by the one that has begun."""
    world = World(image_tokens=VISUAL_TOKENS, num_rows=8, num_pages=130)
    decoding(world, max_tokens=14)
    many = [visual(world, tenant="many") for _ in range(4)]
    for each in many:
        each.tokens = [(token + each.seq_id, payload) for token, payload in each.tokens]
    world.steps(4)
    few = visual(world, tenant="few")
    world.drain()
    order = [plan.rows[0].sequence for plan in world.runner.plans if plan.kind is not DECODE]
    assert order.index(few) < order.index(many[1])
    assert order.index(many[0]) < order.index(few)


def test_short_prompts_pass_one_with_many_images() -> None:
    """Every other launch, with images or without; a long prompt and one with a prefix wait."""
    world = World(image_tokens=VISUAL_TOKENS, num_rows=8, num_pages=130)
    decoding(world, max_tokens=14)
    many = visual(world)
    world.steps(2)
    short = [
        world.submit(
            FakeTask(seed=LONG_SEED, num_prompt=4 + number, max_tokens=1),
            prefix_key="",
            prefix_length=0,
            images=[(0, 5)] * number,
        )
        for number in range(2)
    ]
    world.submit(FakeTask(max_tokens=1), prefix_key="k", prefix_length=3)
    world.drain()
    order = [plan.rows[0].sequence for plan in world.runner.plans if plan.kind is not DECODE]
    assert order[1:6] == [many, short[0], many, short[1], many]
    assert order.count(many) == len(launches(world, many)) == 10
    assert order[-1] is world.sequences[-1]
