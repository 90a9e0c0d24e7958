"""A large image among decodes: encoded in parts, and aborted between any of them."""

import msgspec
import pytest
from legato_engine.errors import DeadlineExceeded
from legato_engine.scheduler.batch import LaunchKind, Plan
from legato_engine.sequence import Sequence, SequenceStatus
from legato_engine.types import FinishReason, RequestKey

from tests.engine.scheduler.tasks import LONG_SEED
from tests.engine.scheduler.world import World
from tests.fakes import FakeTask

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
    return plan.kind, work.first_crop, work.stop_crop


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
    assert sequence.status is SequenceStatus.PREFILLING
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
