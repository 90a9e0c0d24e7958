"""A large picture among those who decode: encoded in parts, and given up in any of them."""

import msgspec
import pytest
from legato_engine.core import FinishReason, RequestKey
from legato_engine.errors import DeadlineExceeded
from legato_engine.scheduler.launch import LaunchKind, Plan
from legato_engine.sequence import Sequence, SequenceStatus

from tests.engine.scheduler.tasks import LONG_SEED
from tests.engine.scheduler.world import World
from tests.fakes import FakeTask

R0, R1 = RequestKey("r0"), RequestKey("r1")

ENCODE, PREFILL, DECODE, _ = LaunchKind
TICKS_TO_PREFILL = 7  # of a picture of 13 crops: three encodes and the prefill, decodes between


def talker(world: World, max_tokens: int = 14) -> Sequence:
    """A sequence that decodes from the next tick on."""
    sequence = world.submit(FakeTask(seed=LONG_SEED, max_tokens=max_tokens))
    world.steps(1)
    return sequence


def picture(
    world: World, num_crops: int = 13, *, key: str | None = "picture", seconds: float | None = None
) -> Sequence:
    """A sequence with a picture of that many crops."""
    deadline = None if seconds is None else world.clock.now() + seconds
    task = FakeTask(seed=LONG_SEED, max_tokens=4)
    return world.submit(
        task, prefix_key=key, prefix_length=9, num_crops=num_crops, deadline=deadline
    )


def crops_of(plan: Plan) -> tuple[LaunchKind, int, int]:
    """What a launch does, and which crops its first row names."""
    work = plan.rows[0].work
    return plan.kind, work.first_crop, work.stop_crop


@pytest.mark.parametrize("depth", [1, 2])
def test_a_large_picture_is_encoded_between_decodes(depth: int) -> None:
    """Groups of at most five crops, then the prefill behind them, a decode between any two."""
    world = World(depth=depth)
    talker(world)
    picture(world)
    world.steps(1 + TICKS_TO_PREFILL)
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


def test_whoever_waits_for_a_whole_answer_is_not_held_up() -> None:
    """Beside requests that nobody reads token by token, a picture is prefilled in one launch."""
    world = World()
    sequence = talker(world)
    sequence.request = msgspec.structs.replace(sequence.request, deltas=False)
    picture(world)
    world.steps(3)
    assert [crops_of(plan) for plan in world.runner.plans[1:]] == [
        (DECODE, 0, 0),
        (PREFILL, 0, 0),
        (DECODE, 0, 0),
    ]
    world.drain()


def test_nobody_to_hold_up_nothing_to_split() -> None:
    """A picture that arrives alone is prefilled in one launch."""
    world = World()
    picture(world)
    world.steps(1)
    assert [crops_of(plan) for plan in world.runner.plans] == [(PREFILL, 0, 0)]
    world.drain()


@pytest.mark.parametrize(("crops_per_launch", "num_crops"), [(5, 5), (0, 13)])
def test_a_small_picture_and_a_limit_of_zero_split_nothing(
    crops_per_launch: int, num_crops: int
) -> None:
    """Such a picture is prefilled in one launch among those who decode, too."""
    world = World(crops_per_launch=crops_per_launch)
    talker(world)
    picture(world, num_crops)
    world.steps(2)
    assert [crops_of(plan) for plan in world.runner.plans[2:]] == [(PREFILL, 0, 0)]
    world.drain()


def test_the_prefill_encodes_the_rest_when_the_last_decode_has_ended() -> None:
    """Nobody is left to hold up, so one launch does all that is left."""
    world = World()
    talker(world, max_tokens=3)
    picture(world)
    world.drain()
    assert [crops_of(plan) for plan in world.runner.plans[1:5]] == [
        (DECODE, 0, 0),
        (ENCODE, 0, 5),
        (DECODE, 0, 0),
        (PREFILL, 5, 0),
    ]


def test_a_picture_that_is_known_is_not_encoded() -> None:
    """A hit reads the prefix, however large the picture is."""
    world = World()
    picture(world)
    world.steps(1)
    hit = picture(world)
    world.drain()
    assert hit.pages.cached_tokens == 9
    assert ENCODE not in {plan.kind for plan in world.runner.plans}


def test_nobody_is_prefilled_between_the_parts_of_a_picture() -> None:
    """There is one feature buffer: those behind wait, text and the same picture alike."""
    world = World()
    talker(world)
    first, same, other = picture(world), picture(world), picture(world, 6, key=None)
    text = world.submit(FakeTask(seed=LONG_SEED, max_tokens=4))
    world.drain()
    order = [p.rows[0].sequence for p in world.runner.plans[1:] if p.kind is not DECODE]
    assert order == [first] * 4 + [same] + [other] * 3 + [text]
    assert (first.pages.cached_tokens, same.pages.cached_tokens) == (0, 9)


def test_a_large_picture_shares_no_launch() -> None:
    """An encode has one row even where prefills are shared, and joins no launch of others."""
    world = World(max_prefill_rows=3, num_rows=4)
    decoding = talker(world)
    small = world.submit(FakeTask(seed=LONG_SEED, max_tokens=4))
    large = picture(world)
    world.steps(4)
    rows = [[row.sequence for row in plan.rows] for plan in world.runner.plans]
    assert (rows[2], rows[3]) == ([decoding, small], [large])
    assert world.runner.plans[3].kind is ENCODE
    world.drain()


def test_an_encode_samples_nothing() -> None:
    """It has no constraints, gives no token and counts no zombie; its record is complete."""
    world = World()
    talker(world)
    sequence = picture(world)
    world.steps(3)
    assert world.runner.constraints[2] == []
    assert (sequence.progress.num_launched, sequence.num_committed) == (0, 0)
    world.abort(sequence)
    world.drain()
    record = next(r for r in world.records if r.launch.launch_id == 2)
    assert record.launch.plan.kind is ENCODE
    assert record.zombies == 0


def test_a_request_starts_with_the_first_part_of_its_picture() -> None:
    """It is told once, keeps its pixels to the end, and counts as running."""
    world = World()
    talker(world)
    sequence = picture(world)
    world.steps(2)
    started = world.clock.now()
    assert world.sink.started_ids == [R0, R1]
    assert sequence.status is SequenceStatus.PREFILLING
    assert sequence.inputs.image is not None
    load = world.scheduler.load()
    assert (load.running, load.waiting) == (2, 0)
    world.clock.advance(1.0)
    world.steps(TICKS_TO_PREFILL - 1)
    assert sequence.timing.prefill_start == started
    assert sequence.inputs.image is not None, "it may have to be computed again"
    world.drain()
    assert sequence.inputs.image is None
    assert world.sink.started_ids == [R0, R1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("expires", [False, True])
@pytest.mark.parametrize("key", ["picture", None])
@pytest.mark.parametrize("phase", range(TICKS_TO_PREFILL + 4))
def test_a_picture_may_be_given_up_in_any_phase(
    depth: int, expires: bool, key: str | None, phase: int
) -> None:
    """Waiting, between two parts, prefilled or decoding: all is released once, and the same
    picture asked again is not blocked by what was left of it.
    """
    world = World(depth=depth)
    decoding = talker(world)
    given_up = picture(world, key=key, seconds=5.0 if expires else None)
    world.steps(phase)
    following = picture(world, key=key)
    if expires:
        world.clock.advance(5.0)
    else:
        world.abort(given_up)
    world.drain()
    assert given_up.inputs.image is None
    if expires:
        assert type(world.sink.ended[R1]) is DeadlineExceeded
    computed = key is not None and phase > TICKS_TO_PREFILL
    assert following.pages.cached_tokens == (9 if computed else 0)
    for sequence in (decoding, following):
        assert isinstance(world.sink.ended[sequence.request.request_id], FinishReason)
        assert isinstance(sequence.task, FakeTask)
        assert sequence.task.tokens == sequence.task.expected_tokens(sequence.prompt_length)


def test_a_listener_may_give_up_when_it_is_told_of_the_first_part() -> None:
    """The sequence is a zombie from its first encode on, and nothing of it is planned again."""
    world = World()
    talker(world)
    world.sink.started = world.abort  # type: ignore[method-assign]  # it gives up at once
    picture(world)
    world.drain()
    assert [plan.kind for plan in world.runner.plans if plan.kind is not DECODE] == [
        PREFILL,
        ENCODE,
    ]
