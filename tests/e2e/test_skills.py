"""The five skills and RunTasks, answered by the model that ships."""

import math
import re

import pytest
from legato_client import (
    CaptionTask,
    DetectTask,
    FrameStamp,
    InvalidArgument,
    Message,
    Options,
    PointTask,
    QueryTask,
    Sampling,
    SegmentTask,
)

from tests.e2e.scenes import many_circles, overlap, two_shapes

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
