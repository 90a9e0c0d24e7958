"""A request that goes on in another engine ends as if nothing had happened."""

import time

import msgspec
import pytest
from legato_engine.client.request_stream import RequestStream, merge_events
from legato_engine.core.assembly import assemble
from legato_engine.ipc.messages import Done, OutputDelta, PrefillStarted
from legato_engine.types import (
    CaptionSpec,
    DetectSpec,
    PointSpec,
    QuerySpec,
    Request,
    RequestKey,
    Resumed,
    SamplingParams,
    SegmentSpec,
)

from tests.engine.core.world import CONFIG, World, png

WILD = SamplingParams(temperature=2.0, top_p=1.0, max_tokens=14, seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
KEY = RequestKey("r")


def case(task, sampling=GREEDY, image=True, **fields):
    """A request without its image, and whether it has one."""
    return Request(request_id=KEY, task=task, sampling=sampling, **fields), image


CASES = {
    "query": case(QuerySpec(question="hello"), image=False),
    "query of an image": case(QuerySpec(question="hello"), WILD),
    "reasoning": case(QuerySpec(question="hello", reasoning=True), WILD),
    "caption": case(CaptionSpec(), WILD, return_tokens=True),
    "logprobs": case(QuerySpec(question="hello"), WILD, return_tokens=True, logprobs=True),
    "detect": case(DetectSpec(object="cat"), return_tokens=True, logprobs=True),
    "detect, sampled": case(DetectSpec(object="cat"), WILD),
    "point": case(PointSpec(object="cat")),
    "segment": case(SegmentSpec(object="cat"), WILD),
}


@pytest.fixture(
    scope="module",
    params=["random-tiny", pytest.param("random-tiny3", marks=pytest.mark.slow), "fixed:3"],
)
def assembly(request):
    """Models with and without experts, and one that speculates."""
    changes = {"model": request.param}
    if request.param.startswith("fixed"):
        changes = {"speculation": request.param, "draft": "lookup"}
    made = assemble(msgspec.structs.replace(CONFIG, **changes))
    yield made
    made.device.close()


def run(world, request, has_image):
    """Return the outputs of a request that runs to its end."""
    _run(world, request, has_image)
    return world.of("r")


def _run(world, request, has_image):
    if has_image:
        request = msgspec.structs.replace(request, image=world.encoded(png()))
    world.outputs.clear()
    world.core.submit(request)
    world.run("r")


def resumed_after(request, outputs):
    """The request after these outputs, by the stream that a service process has of it."""
    stream = RequestStream(request, lambda _: None, lambda _: None)
    for output in outputs:
        stream.feed(output)
    return stream.resumed(())


def said(outputs):
    """What outputs say, without what it cost."""
    events = [event for each in outputs if isinstance(each, OutputDelta) for event in each.events]
    done = outputs[-1]
    assert isinstance(done, Done)
    usage = msgspec.structs.replace(done.usage, cached_tokens=0)
    return merge_events(events), done.result, done.finish_reason, usage, done.tokens


@pytest.mark.parametrize("name", CASES)
def test_every_moment(assembly, name):
    """After any of its deltas, the rest and the result are those of the first engine."""
    request, has_image = CASES[name]
    request = msgspec.structs.replace(request, cache_image=False)  # nothing is shared
    world = World(assembly)
    whole = run(world, request, has_image)
    deltas = [each for each in whole if isinstance(each, OutputDelta)]
    started = PrefillStarted(
        request_id=KEY, model="", input_tokens=0, cached_tokens=0, queue_time=0.0
    )
    for count in range(len(deltas) + 1):
        told = [started, *deltas[:count]]
        rest = run(world, resumed_after(request, told), has_image)
        assert said(told + rest) == said(whole), f"after {count} of {len(deltas)} deltas"
    world.close()


@pytest.mark.parametrize("name", ["detect, sampled", "query of an image"])
def test_another_engine(assembly, name):
    """An engine that knows neither the image nor the prompt goes on with the same tokens."""
    request, has_image = CASES[name]
    first = World(assembly)
    whole = run(first, request, has_image)
    half = whole[: len(whole) // 2]
    first.close()
    second = World(assembly)
    rest = run(second, resumed_after(request, half), has_image)
    assert said(half + rest) == said(whole)
    second.close()


def test_tokens_without_text_are_told_with_the_next_delta(assembly):
    """Deltas hold every committed token once, in order, but those after the last text."""
    world = World(assembly)
    request, _ = CASES["logprobs"]
    request = msgspec.structs.replace(request, return_tokens=False, logprobs=False)
    outputs = run(world, request, has_image=False)
    told = [each for out in outputs if isinstance(out, OutputDelta) for each in out.token_ids]
    request = msgspec.structs.replace(request, return_tokens=True)
    sampled = [each.token_id for each in run(world, request, has_image=False)[-1].tokens]
    assert told == sampled[: len(told)]
    assert 0 < len(told) <= len(sampled)
    world.close()


def test_a_full_queue_takes_a_resumed_request(assembly):
    """It was admitted before; others are refused, and it goes before them."""
    world = World(assembly, max_waiting=1)
    world.submit("waiting", QuerySpec(question="hello"))
    world.submit("refused", QuerySpec(question="hello"))
    assert type(world.error("refused")).__name__ == "QueueFull"
    arrival = time.monotonic() - 10
    world.submit("again", QuerySpec(question="hello"), resumed=Resumed(arrival=arrival))
    world.run("waiting", "again")
    order = [
        each.request_id.caller_id for each in world.outputs if isinstance(each, PrefillStarted)
    ]
    assert order == ["again", "waiting"]
    (done,) = world.of("again", Done)
    assert done.timings.total > 10
    world.close()


# ---------------------------------------------------------------- a caller's checkpoint


def checkpoint(request, outputs, **changes):
    """What a client gives back after these outputs."""
    resumed = resumed_after(request, outputs).resumed
    return msgspec.structs.replace(
        request, resumed=msgspec.structs.replace(resumed, admitted=False, **changes)
    )


def refusal_of(world, request, has_image):
    """The error of a request that the engine refuses."""
    _run(world, request, has_image)
    return world.error("r")


@pytest.mark.parametrize("name", ["query of an image", "detect", "reasoning"])
def test_a_checkpoint_goes_on_as_an_engine_does(assembly, name):
    """Tokens at a caller's word are followed by those that follow the engine's own."""
    request, has_image = CASES[name]
    world = World(assembly)
    whole = run(world, request, has_image)
    for count in (2, len(whole) - 1):
        rest = run(world, checkpoint(request, whole[:count]), has_image)
        assert said(whole[:count] + rest) == said(whole)
        assert isinstance(rest[0], PrefillStarted), "its client may know of no `started`"
    world.close()


def test_tokens_that_the_task_cannot_have_are_refused(assembly):
    """By the vocabulary, the constraint of their place, their values and the answer's end."""
    world = World(assembly)
    request, has_image = CASES["detect"]
    told = run(world, request, has_image)
    resumed = checkpoint(request, told[:-1]).resumed
    ids, values = resumed.token_ids, resumed.payloads
    assert len(ids) > 2
    wrong = {
        "resume_from.token_ids[0]": {"token_ids": (1 << 31, *ids[1:])},
        "resume_from.token_ids[1]": {"token_ids": (ids[0], ids[2], *ids[2:])},
        "resume_from.values": {"payloads": ()},
        f"resume_from.token_ids[{len(ids)}]": {
            "token_ids": (*ids, *ids),
            "payloads": (*values, *values),
            "logprobs": (),
            "certainties": (),
        },
    }
    ended = msgspec.structs.replace(request, sampling=SamplingParams(max_tokens=len(ids)))
    for field, changes in wrong.items():
        of = ended if field.endswith(f"[{len(ids)}]") else request
        error = refusal_of(world, checkpoint(of, told[:-1], **changes), has_image)
        assert error.metadata["field"] == field
    for name, short in (
        ("values", {"payloads": ((0.5, 0.5),)}),
        ("logprobs", {"logprobs": (-0.5,)}),
        ("certainties", {"certainties": ((0.5, 0.5),)}),
    ):
        error = refusal_of(world, checkpoint(request, told[:-1], **short), has_image)
        assert error.metadata["field"] == f"resume_from.{name}", "told of one token only"
    query, _ = CASES["query"]
    text = run(world, query, False)[:-1]
    ids = checkpoint(query, text).resumed.token_ids
    given = checkpoint(query, text, token_ids=(1 << 20, *ids[1:]))
    assert refusal_of(world, given, False).metadata["field"] == "resume_from.token_ids[0]"
    assert run(world, request, has_image)[-1].result == told[-1].result, "the engine serves on"
    world.close()


def test_a_full_queue_refuses_a_checkpoint(assembly):
    """A caller's word gives no place in it."""
    world = World(assembly, max_waiting=1)
    world.submit("waiting", QuerySpec(question="hello"))
    resumed = Resumed(arrival=time.monotonic(), admitted=False)
    world.submit("again", QuerySpec(question="hello"), resumed=resumed)
    assert type(world.error("again")).__name__ == "QueueFull"
    world.close()
