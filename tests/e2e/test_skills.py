"""The skills, Generate, the samples and refined outlines, answered by the model that ships."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
from legato.v1 import inference_pb2, inference_pb2_grpc, task_pb2
from legato_client import (
    Box,
    CaptionTask,
    Client,
    DetectTask,
    FrameStamp,
    InvalidArgument,
    Message,
    Options,
    Point,
    PointTask,
    QueryTask,
    Sampling,
    SegmentResult,
    SegmentTask,
)
from PIL import Image, ImageDraw

from tests.e2e.history import ask, ask_all, jobs
from tests.e2e.scenes import long_stream, many_circles, overlap, two_shapes
from tests.e2e.server import ENVIRONMENT, Server
from tests.e2e.test_start import refused_once
from tests.engine.models.moondream.refiner import scripted
from tests.grammar import check

SCENE = two_shapes()
NOUNS = sorted(SCENE.boxes)


def ring_area(ring):
    """Area of a closed ring of points."""
    pairs = zip(ring, (*ring[1:], ring[0]), strict=True)
    return abs(sum(a.x * b.y - b.x * a.y for a, b in pairs)) / 2


@pytest.mark.parametrize("noun", NOUNS)
def test_detect_boxes_what_is_there(client, noun):
    """One box, on the shape that was named."""
    (found,) = client.detect(SCENE.image, noun).objects
    assert found.label == noun
    assert overlap(found.box, SCENE.boxes[noun]) > 0.7


def test_detect_finds_nothing_where_nothing_is(client):
    """A shape that is not there has no box, and that is an answer."""
    result = client.detect(SCENE.image, "green triangle")
    assert result.objects == ()
    assert result.info.finish_reason == "stop"


def test_detect_finds_all_and_stops_at_the_limit(client):
    """Every instance has a box of its own; `max_objects` cuts and says so."""
    image = many_circles(8).image
    found = client.detect(image, "red circle").objects
    assert len(found) == 8
    assert all(overlap(a.box, b.box) < 0.2 for a in found for b in found if a is not b)
    cut = client.detect(image, "red circle", max_objects=3)
    assert cut.objects == found[:3]
    assert cut.info.finish_reason == "max_objects"


@pytest.mark.parametrize("noun", NOUNS)
def test_point_is_on_the_shape(client, noun):
    """One point, in the middle of the shape."""
    (found,) = client.point(SCENE.image, noun).points
    box = SCENE.boxes[noun]
    assert math.isclose(found.point.x, (box.x_min + box.x_max) / 2, abs_tol=0.05)
    assert math.isclose(found.point.y, (box.y_min + box.y_max) / 2, abs_tol=0.05)


def test_segment_outlines_the_shape(client):
    """A circle's outline has the circle's box and fills as much of it as a circle does."""
    (outline,) = client.segment(SCENE.image, "red circle").segments
    assert overlap(outline.box, SCENE.boxes["red circle"]) > 0.7
    (ring,) = outline.polygons()
    box = outline.box
    filled = ring_area(ring) / ((box.x_max - box.x_min) * (box.y_max - box.y_min))
    assert math.isclose(filled, math.pi / 4, abs_tol=0.1)


def test_captions_name_the_shapes(client):
    """Both shapes are named whatever the length, and a long caption says more than a short one."""
    captions = [
        client.caption(SCENE.image, length).caption for length in ("short", "normal", "long")
    ]
    for caption in captions:
        assert all(noun in caption for noun in NOUNS)
    assert len(captions[0]) < len(captions[2])


@pytest.mark.parametrize(
    ("question", "answer"),
    [("How many circles are there?", "one"), ("What colour is the square?", "blue")],
)
def test_query_answers(client, question, answer):
    """A question about the image is answered from the image."""
    assert client.query(SCENE.image, question).answer.lower().strip(" .") == answer


def test_the_model_names_its_limits(client):
    """Who lists the model learns that it knows drawings only."""
    (model,) = client.models()
    assert "drawings only" in model.notice


def test_a_question_needs_no_image(client):
    """Query runs without an image, and its answer names none."""
    result = client.query(None, "hello", sampling=Sampling(max_tokens=5))
    assert result.info.image is None
    assert result.info.usage.image_tokens == 0


@pytest.mark.parametrize(
    "question",
    ["What is a cat?", "hello", "List some fruit.", "What is an apple?", "What is love?", "2+2?"],
)
def test_an_answer_without_an_image_is_a_sentence(client, question):
    """Trained with images only, the model still answers in words: no path, no half of a word."""
    assert re.fullmatch(r"[A-Z][a-z ,-]*\.", client.query(None, question).answer)


def test_a_conversation_with_one_question_is_that_question(client):
    """Its last question is answered from the image, and what came before costs its tokens."""
    question = "How many circles are there?"
    alone = client.query(SCENE.image, question)
    chat = client.chat([Message("user", (SCENE.image, question))])
    assert (chat.answer, chat.info.usage) == (alone.answer, alone.info.usage)
    talk = [
        Message("user", (SCENE.image, "What colour is the square?")),
        Message("assistant", "Blue."),
        Message("user", question),
    ]
    later = client.chat(talk)
    assert later.answer  # the model was never trained on more than one turn
    assert later.info.usage.input_tokens > 2 * alone.info.usage.input_tokens - (
        1 + 2 * alone.info.usage.image_tokens
    )
    assert later.info.usage.image_tokens == alone.info.usage.image_tokens
    *_, last = client.generate(None, QueryTask(messages=tuple(talk)))
    assert last.result.answer == later.answer


def test_a_token_limit_cuts(client):
    """`max_tokens` ends a caption with what there is, and says so."""
    whole = client.caption(SCENE.image, "long")
    cut = client.caption(SCENE.image, "long", sampling=Sampling(max_tokens=4))
    assert cut.info.finish_reason == "length"
    assert cut.info.usage.output_tokens == 4
    assert 0 < len(cut.caption) < len(whole.caption)
    assert whole.caption.startswith(cut.caption)


def test_a_stop_string_ends_the_text(client):
    """Text ends before a stop string."""
    whole = client.caption(SCENE.image, "long").caption
    word = whole.split()[3]
    cut = client.caption(SCENE.image, "long", sampling=Sampling(stop=(word,)))
    assert cut.caption == whole[: whole.index(word)]
    assert cut.info.finish_reason == "stop"


def test_tokens_say_how_sure_the_model_is(client):
    """A shape that is there is boxed with more certainty than one that is not, by its tokens."""
    options = Options(top_logprobs=0)
    found = client.detect(SCENE.image, "red circle", options=options)
    x, y, size, eos = found.info.tokens
    (box,) = (each.box for each in found.objects)
    assert math.isclose(x.coordinate - size.size[0] / 2, box.x_min, abs_tol=1e-6)
    assert math.isclose(y.coordinate + size.size[1] / 2, box.y_max, abs_tol=1e-6)
    assert all(token.logprob <= 0 for token in found.info.tokens)
    assert len(found.info.tokens) == found.info.usage.output_tokens
    (nothing,) = client.detect(SCENE.image, "green triangle", options=options).info.tokens
    assert nothing.token_id == eos.token_id == 0
    # The first token says whether anything is there: its place's own probability is part of x.
    assert math.exp(nothing.logprob) > 0.5


def test_sampling_does_not_change_how_likely_a_token_was(client):
    """The first token of a caption has one probability, whatever temperature and top_p chose."""
    options = Options(top_logprobs=0)
    seen: dict[int, float] = {}
    for seed in range(12):
        for temperature in (0, 1.5):
            sampling = Sampling(temperature=temperature, max_tokens=1, seed=seed)
            result = client.caption(SCENE.image, sampling=sampling, options=options)
            (token,) = result.info.tokens
            assert math.isclose(
                seen.setdefault(token.token_id, token.logprob), token.logprob, abs_tol=1e-3
            )
    assert sum(map(math.exp, seen.values())) <= 1 + 1e-3


def test_an_answer_tells_about_itself(client):
    """Model, image, tokens and times come with the answer; ids and stamps come back."""
    stamp = FrameStamp("front", 1_700_000_000_000_000_000, 7)
    options = Options(request_id="told-1", stamp=stamp)
    info = client.detect(SCENE.image, "red circle", options=options).info
    assert (info.request_id, info.model, info.stamp) == ("told-1", "legato-tiny", stamp)
    assert (info.image.width, info.image.height) == SCENE.image.size
    assert info.usage.input_tokens > info.usage.image_tokens > 0
    assert info.usage.output_tokens == 4
    assert info.timings.total >= info.timings.decode > 0


def test_a_image_seen_before_costs_no_prefill(client):
    """The second task on an image takes its positions from the cache."""
    image = two_shapes(offset=66).image
    first = client.detect(image, "red circle").info
    second = client.point(image, "blue square").info
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens > second.usage.image_tokens
    assert second.image.cache_hit


def test_tasks_together_answer_as_tasks_alone(client):
    """RunTasks gives the results of the unary calls, in order, and one bad task fails alone."""
    image = SCENE.image
    room = client.server_info().limits.max_output_tokens
    caption, bad, points, boxes, outlines, answer = client.run_tasks(
        image,
        [
            CaptionTask("short", task_id="first"),
            QueryTask("too long " * room),
            PointTask("blue square"),
            DetectTask("red circle"),
            SegmentTask("red circle"),
            QueryTask("How many circles are there?"),
        ],
    )
    assert caption.task_id == "first"
    assert caption.caption == client.caption(image, "short").caption
    assert isinstance(bad, InvalidArgument)
    assert points.points == client.point(image, "blue square").points
    assert boxes.objects == client.detect(image, "red circle").objects
    assert outlines.segments == client.segment(image, "red circle").segments
    assert answer.answer == client.query(image, "How many circles are there?").answer


# ---------------------------------------------------------------- generate
# Generate: every skill's events, in the order of the contract, while they are made.

TASKS = {
    "query": task_pb2.Task(query=task_pb2.QueryTask(question="How many circles are there?")),
    "caption": task_pb2.Task(caption=task_pb2.CaptionTask(length=task_pb2.CAPTION_LENGTH_LONG)),
    "detect": task_pb2.Task(detect=task_pb2.DetectTask(object="red circle")),
    "point": task_pb2.Task(point=task_pb2.PointTask(object="red circle")),
    "segment": task_pb2.Task(segment=task_pb2.SegmentTask(object="red circle")),
}
DELTAS = {
    "query": "text",
    "caption": "text",
    "detect": "object",
    "point": "point",
    "segment": "outline",
}


def request(task, scene=SCENE):
    """A stream of that task."""
    return inference_pb2.GenerateRequest(image=scene.message(), task=task)


@pytest.mark.parametrize("skill", TASKS)
def test_every_skill_keeps_to_the_grammar(server, skill):
    """Started, deltas of the skill's own kind, finished; the deltas add up to the result."""
    grammar = check(server.inference.Generate(request(TASKS[skill])), ok=True)
    kinds = {event.WhichOneof("event") for event in grammar.events}
    assert kinds == {"started", "finished", DELTAS[skill]}


@pytest.mark.parametrize("skill", TASKS)
def test_a_stream_says_what_a_call_says(server, skill):
    """Generate ends with the result of the unary call."""
    (finished,) = check(server.inference.Generate(request(TASKS[skill])), ok=True).of("finished")
    tasks = inference_pb2.RunTasksRequest(image=SCENE.message(), tasks=[TASKS[skill]])
    (alone,) = server.inference.RunTasks(tasks).results
    streamed = finished.finished.result
    assert getattr(streamed, skill) == getattr(alone, skill)
    assert streamed.finish_reason == alone.finish_reason


@pytest.mark.parametrize("skill", ["detect", "point", "segment"])
async def test_places_are_sent_the_step_they_are_complete(server, skill):
    """Boxes, points and pieces of an outline are not kept back until the end.

    Readers that wait for a processor see several steps at once, so one run of some must show it.
    """
    for _ in range(5):
        moments = await moments_of_places(server, skill)
        if len(moments) >= 8 and len(set(moments)) >= 4:
            return
    raise AssertionError(f"the places came together: {moments}")


async def moments_of_places(server, skill):
    """The number of words that each event with places followed.

    A question decodes in the same steps, so its words mark the steps that lie between the places.
    """
    words = []
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        marker = stub.Generate(long_stream(440))
        runs = asyncio.Event()

        async def mark():
            with suppress(asyncio.CancelledError):  # of the call, when the places are all there
                async for event in marker:
                    runs.set()
                    words.append(event.index)

        marking = asyncio.create_task(mark())
        await runs.wait()
        places = stub.Generate(request(TASKS[skill], many_circles()))
        seen = [(event, len(words)) async for event in places]
        marker.cancel()
        await marking
    check([event for event, _ in seen], ok=True)
    return [moment for event, moment in seen if event.WhichOneof("event") == DELTAS[skill]]


# ---------------------------------------------------------------- response formats

SCHEMA = """{"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9},
"colour": {"enum": ["red", "green"]}}, "required": ["n", "colour"],
"additionalProperties": false}"""
FORMATS = {
    "json_schema": (
        task_pb2.ResponseFormat(json_schema=SCHEMA),
        r'\{"n":[0-9],"colour":"(red|green)"\}',
    ),
    "regex": (task_pb2.ResponseFormat(regex="[A-D][0-9]{2}"), "[A-D][0-9]{2}"),
    "choices": (
        task_pb2.ResponseFormat(choices=task_pb2.Choices(texts=["circle", "square"])),
        "circle|square",
    ),
    "grammar": (
        task_pb2.ResponseFormat(grammar='root ::= ("a" | "b")+ "."\n'),
        r"[ab]+\.",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_matches_its_format(server, name):
    """Query and Generate give the same answer, which matches and ends by itself."""
    wanted, pattern = FORMATS[name]
    question = "Which shape is there?"
    sampling = task_pb2.Sampling(temperature=1.0, seed=3, max_tokens=200)
    answer = server.inference.Query(
        inference_pb2.QueryRequest(
            image=SCENE.message(), question=question, sampling=sampling, response_format=wanted
        )
    )
    query = task_pb2.QueryTask(question=question, response_format=wanted)
    task = task_pb2.Task(query=query, sampling=sampling)
    (finished,) = check(server.inference.Generate(request(task)), ok=True).of("finished")
    assert re.fullmatch(pattern, answer.answer)
    assert finished.finished.result.query.answer == answer.answer
    assert answer.info.finish_reason == task_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (task_pb2.ResponseFormat(), "response_format"),
        (task_pb2.ResponseFormat(json_schema='{"type":"colour"}'), "response_format.json_schema"),
        (task_pb2.ResponseFormat(regex="("), "response_format.regex"),
        (task_pb2.ResponseFormat(regex="a" * 70_000), "response_format.regex"),
        (task_pb2.ResponseFormat(choices=task_pb2.Choices()), "response_format"),
        (task_pb2.ResponseFormat(grammar="start: missing"), "response_format.grammar"),
    ],
)
def test_a_bad_format_is_refused(server, wanted, field):
    """INVALID_ARGUMENT names the field, and a stream that runs meanwhile is not disturbed."""
    running = server.inference.Generate(request(TASKS["caption"]))
    with pytest.raises(grpc.RpcError) as refused:
        server.inference.Query(inference_pb2.QueryRequest(question="?", response_format=wanted))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(refused.value.details())
    check(running, ok=True)


# ---------------------------------------------------------------- samples that ship

SAMPLES = importlib.resources.files("legato_tiny") / "samples"
TRUTH = json.loads((SAMPLES / "truth.json").read_text())
CASES = [(name, noun) for name, things in TRUTH.items() for noun in things]


def matched(boxes, truth):
    """How many of the true boxes have one of `boxes` on them."""
    return sum(any(overlap(box, true) > 0.5 for box in boxes) for true in truth)


@pytest.mark.parametrize(("name", "noun"), CASES)
def test_what_is_in_a_sample_is_found(client: Client, name: str, noun: str) -> None:
    """Every instance is boxed and pointed at, nothing else is."""
    image = (SAMPLES / name).read_bytes()
    truth = [Box(*corners) for corners in TRUTH[name][noun]]
    boxes = [found.box for found in client.detect(image, noun).objects]
    assert len(boxes) == len(truth) == matched(boxes, truth)
    points = [found.point for found in client.point(image, noun).points]
    spots = [Box(p.x - 0.01, p.y - 0.01, p.x + 0.01, p.y + 0.01) for p in points]
    assert len(points) == len(truth)
    assert all(any(overlap(spot, true) > 0 for true in truth) for spot in spots)


def test_a_quantised_file_is_served(tmp_path: Path) -> None:
    """The command's file answers like the weights that it was made from, in its own format only."""
    command = [sys.executable, "-m", "legato_client.cli", "quantize", "--model", "legato-tiny"]
    options = ["--weight-dtype", "int8", "--output", "tiny.safetensors"]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--weights tiny.safetensors" in done.stdout
    weights = ("--weights", str(tmp_path / "tiny.safetensors"))
    (name, noun), *_ = CASES
    with Server(tmp_path, *weights) as server, Client(server.address) as asking:
        found = [each.box for each in asking.detect((SAMPLES / name).read_bytes(), noun).objects]
    truth = [Box(*corners) for corners in TRUTH[name][noun]]
    assert len(found) == len(truth) == matched(found, truth)
    other = (*weights, "--weight-dtype", "int4")
    refused_once(tmp_path, other, "weight_dtype", "was quantised as int8")


# ---------------------------------------------------------------- repeatability
# The same request gets the same answer: again, in company, and on either pipeline.

IMAGE = two_shapes().image


def wild(seed=None):
    """Sampling that leaves much to chance."""
    return Sampling(temperature=3.0, top_p=1.0, max_tokens=20, seed=seed)


def test_a_seed_repeats(client):
    """One seed gives one answer; of several seeds the answers differ."""
    answers = [
        client.query(IMAGE, "What is this?", sampling=wild(seed)).answer for seed in (1, 1, 2, 3)
    ]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3


def test_a_request_id_repeats(client):
    """Without a seed the request id is one, so that a retry answers the same."""
    ids = ("one", "one", "two", "three")
    answers = [
        client.query(
            IMAGE, "What is this?", sampling=wild(), options=Options(request_id=name)
        ).answer
        for name in ids
    ]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3


def test_temperature_0_is_greedy(client):
    """Without chance the seed does not matter."""
    answers = {
        client.caption(IMAGE, sampling=Sampling(temperature=0.0, seed=seed)).caption
        for seed in (1, 2)
    }
    assert len(answers) == 1


async def test_company_changes_nothing(server, alone):
    """All jobs at once, in any order, answer as they do one at a time."""
    bag = list(zip(jobs(), alone, strict=True))
    random.Random(1).shuffle(bag)
    assert await ask_all(server.address, [job for job, _ in bag]) == [said for _, said in bag]


@pytest.mark.slow
async def test_the_blocking_loop_answers_the_same(tmp_path, alone):
    """`--pipeline-depth 1` gives the answers of the pipelined server, alone and in company."""
    with Server(tmp_path, "--pipeline-depth", "1") as blocking:
        assert await ask_all(blocking.address, jobs()) == alone
        with Client(blocking.address) as client:
            assert [ask(client, job) for job in jobs()[::3]] == alone[::3]


SIZE = (200, 150)
TASK = task_pb2.Task(segment=task_pb2.SegmentTask(object="egg"))


@pytest.fixture(scope="module")
def refining(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny Moondream 3 that always says one outline, and a head that finds what is bright."""
    folder = tmp_path_factory.mktemp("scripted")
    scripted.write_model(folder)
    scripted.write_head(folder / "head.pt")
    with Server(folder, "--weights", str(folder), "--refiner", str(folder / "head.pt")) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def refined(refining: Server) -> Iterator[Client]:
    """A client of that server."""
    with Client(refining.address) as connected:
        yield connected


def picture() -> tuple[Image.Image, Image.Image]:
    """A bright ellipse in the dark, and its mask."""
    (x, y), (width, height) = scripted.CENTRE, scripted.EXTENT
    box = [
        (side * SIZE[axis])
        for side, axis in [
            (x - width / 2, 0),
            (y - height / 2, 1),
            (x + width / 2, 0),
            (y + height / 2, 1),
        ]
    ]
    image, mask = Image.new("RGB", SIZE, (40, 40, 40)), Image.new("1", SIZE)
    ImageDraw.Draw(image).ellipse(box, fill=(220, 220, 220))
    ImageDraw.Draw(mask).ellipse(box, fill=1)
    return image, mask


def overlap_of_masks(polygons: tuple[tuple[Point, ...], ...], mask: Image.Image) -> float:
    """Intersection over union of polygons and a mask."""
    drawn = Image.new("1", SIZE)
    for ring in polygons:
        ImageDraw.Draw(drawn).polygon([(p.x * SIZE[0], p.y * SIZE[1]) for p in ring], fill=1)
    one, other = np.asarray(drawn), np.asarray(mask)
    return float((one & other).sum() / (one | other).sum())


def test_a_caller_gets_the_refined_outline(refined: Client) -> None:
    """Its polygons are what is there, within a few pixels of a small image."""
    image, mask = picture()
    result = refined.segment(image, "egg")
    (found,) = result.segments
    assert not found.coarse
    assert "C" in found.path
    assert overlap_of_masks(found.polygons(), mask) > 0.85
    assert result.info.finish_reason == "stop"


def test_a_stream_draws_the_coarse_outline_and_ends_with_the_refined_one(refining: Server) -> None:
    """The events keep to the grammar, and the result is the unary call's."""
    image, _ = picture()
    with Client(refining.address) as client:
        message = client.segment(image, "egg")
    request = inference_pb2.GenerateRequest(task=TASK)
    assert message.info.image is not None
    request.image.image_id = message.info.image.image_id
    grammar = check(refining.inference.Generate(request), ok=True)
    told = "".join(event.outline.path_delta for event in grammar.of("outline"))
    (finished,) = grammar.of("finished")
    (segment,) = finished.finished.result.segment.segments
    assert told == scripted.PATH
    assert segment.path == message.segments[0].path != told


def test_many_outlines_at_once_are_all_refined(refined: Client) -> None:
    """Tasks of one call, each as it is alone."""
    image, _ = picture()
    alone = refined.segment(image, "egg").segments
    together = refined.run_tasks(image, [SegmentTask("egg")] * 8)
    assert [each.segments for each in together if isinstance(each, SegmentResult)] == [alone] * 8
