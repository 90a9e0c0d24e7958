"""Requests of an engine: results of every task, ends at every stage, and what they leave."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Iterator

import pytest
from legato_engine.core.assembly import Assembly
from legato_engine.errors import ImageTooLarge, PromptTooLong
from legato_engine.ipc.messages import Done, Failed, OutputDelta, PrefillStarted, QueuePosition
from legato_engine.types import (
    CaptionOutput,
    CaptionSpec,
    DetectOutput,
    DetectSpec,
    FinishReason,
    ImageBox,
    ImagePoint,
    PointOutput,
    PointSpec,
    QueryOutput,
    QuerySpec,
    RequestKey,
    SamplingParams,
    SegmentSpec,
    TaskOutput,
    TextEvent,
    Turn,
)

from benchmarks.speculation.run import with_settings
from tests.engine.core.world import EITHER_KIND, LONG, World, png

# ---------------------------------------------------------------- tasks
# Results of every task, whatever other requests run.


@EITHER_KIND
@pytest.mark.parametrize(
    "task",
    [
        QuerySpec(question="what?"),
        QuerySpec(question="what?", reasoning=True),
        QuerySpec(question="what?", system="s", history=(Turn(question="a", answer="b"),)),
        CaptionSpec(),
        DetectSpec(object="cat", max_objects=3),
        PointSpec(object="cat", max_objects=3),
        SegmentSpec(object="cat"),
    ],
    ids=lambda task: type(task).__name__,
)
def test_every_task_on_an_image(world, task):
    """A request sends Started, deltas and Done, in that order, with usage and timings."""
    world.submit("r", task, world.encoded(png()))
    (done,) = world.run("r")
    assert isinstance(done, Done)
    kinds = [type(r) for r in world.of("r")]
    assert kinds[0] is PrefillStarted
    assert kinds[-1] is Done
    assert set(kinds[1:-1]) <= {OutputDelta}
    started = world.of("r")[0]
    assert started.image == done.image
    assert done.image is not None
    assert (done.image.width, done.image.height, done.image.cache_hit) == (40, 30, False)
    usage = done.usage
    assert usage.input_tokens == started.input_tokens > usage.image_tokens > 0
    assert usage.output_tokens > 0
    timings = done.timings
    assert 0 < timings.first_token <= timings.total
    assert timings.image > 0


def test_text_deltas_add_up_to_the_result(world):
    """The deltas of a caption add up to its result."""
    world.submit("r", CaptionSpec(), world.encoded(png()))
    (done,) = world.run("r")
    texts = [
        e.text for d in world.of("r", OutputDelta) for e in d.events if isinstance(e, TextEvent)
    ]
    assert isinstance(done.result, CaptionOutput)
    assert "".join(texts) == done.result.caption


def test_query_without_an_image(world):
    """A query needs no image; its `PrefillStarted` names none."""
    world.submit("r", QuerySpec(question="hello"))
    (done,) = world.run("r")
    assert done.image is None
    assert done.usage.image_tokens == 0


PLACED = pytest.mark.parametrize("assembly", ["random-tiny-vl"], indirect=True, scope="module")
"""A model with images between the tokens of its prompts."""


@PLACED
@pytest.mark.parametrize(
    ("task", "count"),
    [
        (QuerySpec(question="what?"), 1),
        (QuerySpec(question="which?"), 3),
        (CaptionSpec(), 1),
        (DetectSpec(object="cat", max_objects=2), 1),
        (PointSpec(object="cat", max_objects=2), 1),
    ],
    ids=lambda each: getattr(type(each), "__name__", ""),
)
def test_every_task_on_images_within_the_prompt(world, task, count):
    """Deltas add up to the result, all images are told, and the second time they are shared."""
    for name in ("first", "again"):
        first, *more = (world.encoded(png(seed, (70, 90))) for seed in range(count))
        sampling = SamplingParams(max_tokens=150, temperature=1.0, seed=1)
        world.submit(name, task, first, more_images=tuple(more), sampling=sampling)
        (done,) = world.run(name)
        assert isinstance(done, Done), done
        assert done.image is not None
        assert [each.width for each in (done.image, *done.more_images)] == [70] * count
        usage = done.usage
        assert usage.image_tokens == 6 * count
        assert usage.input_tokens > usage.image_tokens
        assert (usage.cached_tokens > usage.image_tokens) == (name == "again")
        events = [e for d in world.of(name, OutputDelta) for e in d.events]
        texts = [event.text for event in events if isinstance(event, TextEvent)]
        match done.result:
            case QueryOutput(answer=told) | CaptionOutput(caption=told):
                assert "".join(texts) == told
            case DetectOutput(objects=told) | PointOutput(points=told):
                assert told == tuple(events) != ()


@PLACED
def test_one_image_is_prepared_at_once_for_an_idle_engine(world):
    """Its prompt has it, although no future was waited for."""
    kept = world.encoded(png(9, (40, 40)))
    world.submit("seen", QuerySpec(question="?"), kept)
    world.run("seen")
    world.submit("again", QuerySpec(question="?"), world.encoded(png(9, (40, 40))))
    (done,) = world.run("again")
    assert (done.usage.image_tokens, done.image.cache_hit) == (4, True)


@PLACED
def test_the_pixels_of_a_request_are_bounded_before_any_is_decoded(world, monkeypatch):
    """Together, and without those that are decoded; the error has field, value and limit."""
    monkeypatch.setattr(world.core.preprocessor, "_max_pixels", 2000)
    pixels = [world.encoded(png(seed, (40, 50))) for seed in range(9)]
    world.submit("r", QuerySpec(question="?"), pixels[0], more_images=tuple(pixels[1:]))
    error = world.error("r")
    assert isinstance(error, ImageTooLarge)
    assert str(error) == "the images have 18000 pixels together, the limit is 16000"
    assert {name: error.metadata[name] for name in ("field", "limit", "actual", "unit")} == {
        "field": "images",
        "limit": "16000",
        "actual": "18000",
        "unit": "pixels",
    }
    assert world.core.load().waiting == 0


@PLACED
def test_a_request_stopped_before_its_images_are_prepared_is_empty(gated):
    """It has the prompt without them."""
    world, frontend = gated
    for task in (QuerySpec(question="?"), DetectSpec(object="cat")):
        name = type(task).__name__
        world.submit(name, task, world.encoded(png(4)))
        world.core.stop(RequestKey(name))
        (done,) = world.run(name)
        assert (done.finish_reason, done.usage.image_tokens) == (FinishReason.CANCELLED, 0)
    frontend.gate.set()


def test_a_long_text_holds_up_nobody(gated):
    """Others are answered while its tokens are made; then it fails if the context is too short."""
    world, frontend = gated
    world.submit("long", QuerySpec(question=LONG))
    assert world.core.load().preparing == 1
    world.submit("short", QuerySpec(question="hello"))
    (done,) = world.run("short")
    assert isinstance(done, Done)
    assert frontend.entered.wait(10)
    assert not world.of("long")
    frontend.gate.set()
    world.run("long")
    error = world.error("long")
    assert isinstance(error, PromptTooLong)
    assert "positions, the context has" in str(error)


def test_deltas_are_optional(world):
    """A request without deltas gets the same result in its `Done`."""
    world.submit("a", CaptionSpec(), world.encoded(png()))
    world.submit("b", CaptionSpec(), world.encoded(png()), deltas=False)
    first, second = world.run("a", "b")
    assert world.of("a", OutputDelta)
    assert [type(output) for output in world.of("b") if not isinstance(output, QueuePosition)] == [
        PrefillStarted,
        Done,
    ]
    assert second.result == first.result


def test_progress_is_optional(world):
    """A request without deltas and progress gets only its `Done`."""
    names = [f"r{number}" for number in range(5)]  # more than run at a time
    for name in names:
        question = QuerySpec(question="What is it?")
        world.submit(name, question, deltas=False, progress=False)
    world.run(*names)
    assert {type(output) for name in names for output in world.of(name)} == {Done}


@EITHER_KIND
def test_answers_do_not_depend_on_depth_or_order(assembly):
    """Every result is the same at any pipeline depth, order of arrival and prefix sharing.

    That includes a depth that changes between steps.
    """
    refs = (ImagePoint(x=0.25, y=0.5), ImageBox(x_min=0.1, y_min=0.2, x_max=0.6, y_max=0.9))
    requests = {
        "q": (QuerySpec(question="hello"), None),
        "t": (QuerySpec(question="why?"), 0),
        "r": (QuerySpec(question="why?", reasoning=True, spatial_refs=refs), 2),
        "c": (CaptionSpec(), 1),
        "d": (DetectSpec(object="cat", max_objects=4), 0),
        "p": (PointSpec(object="dog", max_objects=4), 1),
        "s": (SegmentSpec(object="dog"), 2),
    }
    answers: list[dict[str, TaskOutput]] = []
    shared: list[set[str]] = []
    for depth in (1, 2, 2, 2):
        world = World(assembly, pipeline_depth=depth)
        order = random.Random(len(answers)).sample(sorted(requests), len(requests))
        for name in order:
            task, seed = requests[name]
            image = None if seed is None else world.encoded(png(seed))
            world.submit(name, task, image, sampling=SamplingParams(temperature=0.7, max_tokens=20))
            for turn in range(len(answers)):
                if len(answers) == 3:
                    world.core.set_pipeline_depth(2 - turn % 2)
                world.core.step()
        world.run(*requests)
        done = {name: world.of(name, Done)[0] for name in requests}
        answers.append({name: one.result for name, one in done.items()})
        shared.append({name for name, one in done.items() if one.usage.cached_tokens})
        world.close()
    assert all(answer == answers[0] for answer in answers)
    assert len(set.union(*shared)) > len(set.intersection(*shared))


def test_seed_comes_from_the_request_id(world):
    """The same request id gives the same result, another id need not, and a given seed decides."""
    warm = SamplingParams(temperature=1.0, max_tokens=24)
    world.submit("same", QuerySpec(question="hello"), sampling=warm)
    (first,) = world.run("same")
    world.outputs.clear()
    world.submit("same", QuerySpec(question="hello"), sampling=warm)
    (second,) = world.run("same")
    assert first.result == second.result
    world.submit("other", QuerySpec(question="hello"), sampling=warm)
    (third,) = world.run("other")
    assert third.result != first.result


def test_max_objects_ends_a_detection(world):
    """A detection ends with MAX_OBJECTS exactly when it has found that many."""
    world.submit("r", DetectSpec(object="cat", max_objects=1), world.encoded(png()))
    (done,) = world.run("r")
    assert isinstance(done.result, DetectOutput)
    assert (len(done.result.objects) == 1) == (done.finish_reason is FinishReason.MAX_OBJECTS)


def test_the_load_has_cache_hits_and_cached_pages(world):
    """The second of two equal queries hits all of its prompt but the end; both cache pages."""
    world.submit("a", QuerySpec(question="what is to be seen in this picture?"))
    world.run("a")
    world.submit("b", QuerySpec(question="what is to be seen in this picture?"))
    (done,) = world.run("b")
    usage, load = done.usage, world.core.load()
    assert usage.input_tokens - 2 <= usage.cached_tokens < usage.input_tokens
    assert load.kv.hit_rate == pytest.approx(usage.cached_tokens / usage.input_tokens / 2)
    assert (load.kv.idle, load.kv.draft, load.kv.preemptions) == (load.prefix_pages, 0, 0)
    assert load.kv.free + load.kv.idle + load.pages_used == load.pages_total


# ---------------------------------------------------------------- ends


def test_deadline_while_preparing(gated):
    """A pending request fails at its deadline."""
    world, frontend = gated
    world.submit("r", CaptionSpec(), world.encoded(png()), deadline=time.monotonic() + 0.01)
    frontend.entered.wait(10)
    assert world.core.next_deadline() < time.monotonic() + 1
    while not world.of("r", Failed):
        world.core.step()
    assert type(world.error("r")).__name__ == "DeadlineExceeded"
    frontend.gate.set()
    assert world.core.load().waiting == 0


@pytest.mark.parametrize("has_image", [True, False])
def test_abort_while_preparing(gated, has_image):
    """A request that is aborted while its image or its long text is prepared never starts."""
    world, frontend = gated
    if has_image:
        world.submit("r", CaptionSpec(), world.encoded(png()))
    else:
        world.submit("r", QuerySpec(question=LONG))
    frontend.entered.wait(10)
    world.core.abort(RequestKey("r"))
    assert world.core.load().waiting == 0
    frontend.gate.set()
    world.woken.wait(10)
    world.core.step()
    assert world.of("r") == []


def test_stop_while_preparing(gated):
    """A pending request that is stopped sends `PrefillStarted` and an empty result."""
    world, frontend = gated
    world.submit("r", DetectSpec(object="cat"), world.encoded(png()))
    frontend.entered.wait(10)
    world.core.stop(RequestKey("r"))
    world.core.stop(RequestKey("r"))
    begun, done = world.of("r")
    assert isinstance(begun, PrefillStarted)
    assert isinstance(done, Done)
    assert (done.result, done.finish_reason) == (DetectOutput(), FinishReason.CANCELLED)
    assert world.core.load().waiting == 0
    frontend.gate.set()
    world.woken.wait(10)
    world.core.step()
    assert len(world.of("r")) == 2


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_stop_after_any_step(assembly, num_steps, depth):
    """A request stopped after any step ends with the text it had sent, and frees everything."""
    world = World(assembly, pipeline_depth=depth)
    world.submit("other", QuerySpec(question="hello"))
    world.submit("r", QuerySpec(question="hello"))
    for _ in range(num_steps):
        world.core.step()
    world.core.stop(RequestKey("r"))
    world.core.stop(RequestKey("r"))
    outputs = [output for output in world.of("r") if not isinstance(output, QueuePosition)]
    begun, *deltas, done = outputs
    assert isinstance(begun, PrefillStarted)
    assert isinstance(done, Done)
    assert done.finish_reason is FinishReason.CANCELLED
    said = "".join(event.text for output in deltas for event in output.events)
    assert isinstance(done.result, QueryOutput)
    assert done.result.answer.startswith(said)
    assert 0 <= done.timings.first_token <= done.timings.total
    world.run("other")
    assert world.of("r")[-1] is done
    world.close()


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_after_any_step(assembly, num_steps, depth):
    """An abort after any step ends the outputs and frees everything; other requests go on."""
    world = World(assembly, pipeline_depth=depth)
    world.submit("other", QuerySpec(question="hello"))
    world.submit("r", QuerySpec(question="hello"))
    for _ in range(num_steps):
        world.core.step()
    world.core.abort(RequestKey("r"))
    world.core.abort(RequestKey("r"))
    seen = len(world.of("r"))
    world.run("other")
    assert len(world.of("r")) == seen
    world.close()


def test_abort_of_unknown_and_ended(world):
    """Aborting an unknown or finished request does nothing."""
    world.core.abort(RequestKey("never"))
    world.submit("r", QuerySpec(question="hello"))
    world.run("r")
    world.core.abort(RequestKey("r"))
    assert isinstance(world.of("r")[-1], Done)


# ---------------------------------------------------------------- garbage

TASKS = (
    DetectSpec(object="x"),
    CaptionSpec(),
    QuerySpec(question="what?"),
    SegmentSpec(object="y"),
)


@contextlib.contextmanager
def unreachable() -> Iterator[list[str]]:
    """The types of the engine's objects that references alone do not free."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        types = [type(each) for each in gc.garbage]
        found += [each.__qualname__ for each in types if each.__module__.startswith("legato_")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def served(world: World, batch: int) -> None:
    """Requests of every kind, one of which is aborted."""
    names = [f"r{batch}-{number}" for number in range(6)]
    for number, name in enumerate(names):
        task = TASKS[number % len(TASKS)]
        image = None if isinstance(task, QuerySpec) else world.encoded(png(number % 2))
        world.submit(name, task, image)
    world.core.step()
    world.core.abort(RequestKey(names.pop()))
    world.run(*names)


@pytest.mark.parametrize("path", ["graph", "loop"])
def test_requests_leave_no_cycles(assembly: Assembly, path: str) -> None:
    world = World(with_settings(assembly, decode_path=path))
    served(world, 0)
    with unreachable() as found:
        for batch in range(1, 5):
            served(world, batch)
    assert found == []
    world.close()
