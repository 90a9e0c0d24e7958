"""A model with images between the tokens of its prompts, served: several, clips, boxes as text."""

from __future__ import annotations

import functools

import pytest
from legato.v1 import inference_pb2, media_pb2, task_pb2
from legato_client import (
    Client,
    ClipFrame,
    Detection,
    DetectTask,
    FailedPrecondition,
    InvalidArgument,
    Message,
    PointedObject,
    PointTask,
    Sampling,
)

from tests.e2e.server import Server, until
from tests.grammar import Grammar
from tests.hostile_images import file, smooth

GREEDY = Sampling(temperature=0.0, max_tokens=8)
LONG = task_pb2.Sampling(temperature=1.0, seed=3, max_tokens=600)
ENDLESS = task_pb2.ResponseFormat(regex="[a-z]{600}")
FIRST, SECOND = file(smooth(70, 90), "PNG"), file(smooth(90, 70), "PNG")
LARGE = file(smooth(400, 400), "PNG")
"""It takes as many tokens as an image may."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of a tiny random Qwen3-VL, whose engine may be killed."""
    with Server(tmp_path_factory.mktemp("visual"), "--model", "random-tiny-vl") as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def client(server):
    """The client of this package."""
    with Client(server.address) as connected:
        yield connected


def image(data):
    """An image file as a request carries it."""
    return media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))


def endless(*images, request_id=""):
    """A stream of 600 characters about images, whatever the model wants to say."""
    shown = [task_pb2.QueryImage(image=each) for each in images]
    query = task_pb2.QueryTask(question="What?", images=shown, response_format=ENDLESS)
    return inference_pb2.GenerateRequest(
        task=task_pb2.Task(query=query, sampling=LONG),
        options=inference_pb2.RequestOptions(request_id=request_id),
    )


def test_several_images_are_those_of_messages(client):
    """All are told in order and cost what they cost alone; where they stand counts."""
    alone = [client.query(each, "Which?", sampling=GREEDY).info for each in (FIRST, SECOND)]
    both = client.query([FIRST, SECOND], "Which?", sampling=GREEDY).info
    assert [each.image_id for each in both.images] == [each.image.image_id for each in alone]
    assert both.usage.image_tokens == sum(each.usage.image_tokens for each in alone) > 0
    said = (Message("user", (FIRST, SECOND, "Which?")),)
    same = client.chat(said, sampling=GREEDY).info.usage
    assert same.input_tokens == both.usage.input_tokens
    assert same.cached_tokens > both.usage.image_tokens
    apart = client.chat([Message("user", (FIRST, "Which?", SECOND))], sampling=GREEDY).info.usage
    assert apart.image_tokens == both.usage.image_tokens
    assert apart.cached_tokens < same.cached_tokens


def test_an_image_is_cached_within_a_tenant(server):
    """A second question about it computes its own words only, that of another tenant all."""
    shown = file(smooth(110, 50), "PNG")

    def cached(tenant, question):
        request = inference_pb2.QueryRequest(image=image(shown), question=question)
        metadata = (("legato-tenant", tenant),)
        usage = server.inference.Query(request, metadata=metadata).info.usage
        return usage.cached_tokens, usage.image_tokens

    assert cached("one", "What?")[0] == 0
    hit, tokens = cached("one", "Why?")
    assert hit > tokens > 0
    assert cached("two", "Why?")[0] == 0


def test_a_clip_has_times(client):
    """Pairs of frames share tokens; a frame that is not later is refused by its field."""
    frames = [ClipFrame(FIRST, 0.0), ClipFrame(FIRST, 0.5)]
    clip = client.query(frames, "What moves?", sampling=GREEDY).info.usage
    images = client.query([FIRST, FIRST], "What moves?", sampling=GREEDY).info.usage
    assert 0 < clip.image_tokens == images.image_tokens // 2
    later = [ClipFrame(FIRST, 4.0), ClipFrame(FIRST, 5.5)]
    assert client.query(later, "What moves?", sampling=GREEDY).info.usage.cached_tokens < (
        client.query(frames, "What moves?", sampling=GREEDY).info.usage.cached_tokens
    )
    with pytest.raises(InvalidArgument) as caught:
        client.query(frames[::-1], "What moves?")
    assert caught.value.field_violations[0].field == "images[1].time"


@pytest.mark.parametrize(("skill", "kind"), [(DetectTask, Detection), (PointTask, PointedObject)])
def test_places_are_streamed(client, skill, kind):
    """Each as soon as its brackets close: the result repeats them, and a call says the same."""
    sampling = Sampling(temperature=1.0, seed=5)
    *events, finished = client.generate(FIRST, skill("cup", 3, sampling=sampling))
    found = [each for each in events if isinstance(each, kind)]
    result = finished.result
    assert found == list(result.objects if kind is Detection else result.points) != []
    assert {(each.label, each.confidence) for each in found} == {("cup", None)}
    (again,) = client.run_tasks(FIRST, [skill("cup", 3, sampling=sampling)])
    assert found == list(again.objects if kind is Detection else again.points)


def test_there_are_no_outlines(client):
    """The model says so before it is asked, and when it is."""
    (model,) = client.models()
    assert "segment" not in model.tasks
    assert model.max_images > 1
    with pytest.raises(FailedPrecondition) as caught:
        client.segment(FIRST, "cup")
    assert caught.value.reason == "TASK_UNSUPPORTED"


def test_too_many_tokens_are_refused_before_anything_is_decoded(client):
    """A broken image among the images does not hide it; with fewer it is the complaint."""
    broken = LARGE[:-400]
    with pytest.raises(InvalidArgument) as caught:
        client.query([LARGE, broken, *[LARGE] * 14], "Which?")
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert int(caught.value.metadata["limit"]) == client.models()[0].max_context_tokens
    with pytest.raises(InvalidArgument) as caught:
        client.query([FIRST, broken], "Which?")
    assert caught.value.reason == "IMAGE_UNDECODABLE"
    assert caught.value.field_violations[0].field == "images"


def is_aborted(client, request_id):
    """Abort a request; False while the server does not know it."""
    return client.abort(request_id=request_id).aborted > 0


@pytest.mark.parametrize("ends", ["cancelled", "aborted"])
def test_nothing_is_left_of_images_that_are_not_prepared(server, client, ends):
    """Requests that end while their images are decoded; one that was stopped has an end."""
    others = [file(smooth(1500, 1500 + number), "PNG") for number in range(3)]
    for number in range(6):
        name = f"{ends}-{number}"
        stream = server.inference.Generate(endless(*map(image, others), request_id=name))
        if ends == "cancelled":
            stream.cancel()
            continue
        until(functools.partial(is_aborted, client, name))
        grammar = Grammar()
        for event in stream:
            grammar.feed(event)
        grammar.end(ok=True)
    server.settle()
    assert client.query([FIRST, SECOND], "Which?", sampling=GREEDY).info.images


@pytest.mark.parametrize("by", ["bytes", "id"])
def test_an_answer_about_two_images_outlives_its_engine(server, client, by):
    """It goes on with the next engine, and its text is what an engine that lives says."""
    shown = [image(FIRST), image(SECOND)]
    if by == "id":
        held = [client.put_image(each).image_id for each in (FIRST, SECOND)]
        shown = [media_pb2.Image(image_id=each) for each in held]
    whole = list(server.inference.Generate(endless(*shown)))[-1].finished.result.query.answer
    stream, grammar = server.inference.Generate(endless(*shown)), Grammar()
    for _ in range(4):
        grammar.feed(next(stream))
    server.kill_engine()
    for event in stream:
        grammar.feed(event)
    grammar.end(ok=True)
    finished = grammar.events[-1].finished
    assert finished.info.resumptions == 1
    assert len(finished.info.images) == 2
    assert finished.result.query.answer == whole
    assert len(whole) == 600
