"""The reference's decoding loops."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from tests.reference.cases import CONFIG, NAME, image, leaning, weights
from tests.reference.moondream3 import decoding, prompts, region, results, skills, text
from tests.reference.moondream3.numerics import Weights
from tests.reference.moondream3.prompts import Coord, Size, Text

IDS = CONFIG.ids
EOS, ANSWER, COORD, SIZE = IDS.eos, IDS.answer, IDS.coord, IDS.size
START, END = IDS.ground_start, IDS.ground_end
RARE = 60  # a token of text


def scripted(monkeypatch, script):
    """Decoders whose token logits follow the script's ids; everything else is real.

    Returns the list of decoders that were made.
    """
    made = []

    class Scripted(decoding.Decoder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.prompt_length = len(self.embeddings_TD)
            made.append(self)

        def logits(self):
            wanted = np.zeros(CONFIG.text.vocab)
            wanted[script[len(self.embeddings_TD) - self.prompt_length]] = 1.0
            return wanted

    monkeypatch.setattr(skills, "Decoder", Scripted)
    return made


REFS = [(0.2, 0.3), (0.1, 0.2, 0.7, 0.4)]
LIMITS = {"max_tokens": 14}
# With these seeds and biases a run has several kinds of tokens and does not repeat itself at once.
SPEAKING = weights(10)
ENDING = leaning(weights(0), {COORD: 6.0, SIZE: 5.0, EOS: 4.0})
THINKING = leaning(weights(7), {COORD: 6.0, SIZE: 4.0, ANSWER: 2.5})


@dataclass(frozen=True)
class Case:
    """A run and its arguments."""

    prompt: list[prompts.Token]
    weights: Weights
    picture: np.ndarray
    run: results.Run


@cache
def cases(cached=True):
    """A run of every skill."""
    said, ended, thought = image(10), image(0), image(7)
    options = LIMITS | {"cached": cached}
    found = skills.detect(said, NAME, CONFIG, SPEAKING, **options)
    points = skills.point(said, NAME, CONFIG, SPEAKING, REFS, **options)
    caption = skills.caption(said, CONFIG, SPEAKING, "long", **options)
    answer = skills.query(NAME, CONFIG, THINKING, thought, REFS, reasoning=True, **options)
    segment = skills.segment(ended, NAME, CONFIG, ENDING, **options)
    return {
        "detect": Case(prompts.detect_prompt(IDS, NAME), SPEAKING, said, found),
        "point": Case(prompts.point_prompt(IDS, NAME, REFS), SPEAKING, said, points),
        "caption": Case(prompts.caption_prompt(IDS, "long"), SPEAKING, said, caption),
        "query": Case(prompts.query_prompt(IDS, NAME, REFS, True), THINKING, thought, answer),
        "segment": Case(prompts.segment_prompt(IDS, NAME), ENDING, ended, segment),
    }


def coords(run):
    """The coordinates among a run's tokens."""
    return [token.value for token in run.tokens if isinstance(token, Coord)]


def sizes(run):
    """The sizes among a run's tokens."""
    return [token for token in run.tokens if isinstance(token, Size)]


def fed(token, w):
    """The embedding of a token, by its kind."""
    if isinstance(token, Coord):
        return region.encode_coord(token.value, CONFIG, w)
    if isinstance(token, Size):
        return region.encode_size(token.width, token.height, CONFIG, w)
    return w["text.wte"][token.id]


@pytest.mark.parametrize("skill", ["detect", "point", "caption", "query", "segment"])
def test_a_run_is_replayed_in_one_pass(skill):
    """One pass over all tokens has the state of every step.

    A value is fed as its embedding and read from the state that chose its token.
    """
    case = cases()[skill]
    w, run = case.weights, case.run
    bos_D, *rest = [fed(token, w) for token in [Text(IDS.bos), *case.prompt, *run.tokens[:-1]]]
    x_TD = np.stack([bos_D, *case.picture, *rest])
    states = text.recompute(x_TD, CONFIG.image_prefix, CONFIG, w)
    first = CONFIG.image_prefix + len(case.prompt) - 1
    for state, step in zip(states[first:], run.steps, strict=True):
        np.testing.assert_allclose(step.hidden_D, state, atol=1e-9)
        np.testing.assert_allclose(step.logits_V, text.logits(state, w), atol=1e-9)
        if isinstance(step.token, Coord):
            index = region.coord_logits(state, CONFIG, w).argmax()
            assert step.token.value == index / CONFIG.region.coord_bins
        if isinstance(step.token, Size):
            bins = region.size_logits(state, CONFIG, w).argmax(-1)
            values = [2.0 ** (b / (CONFIG.region.size_bins - 1) * 10 - 10) for b in bins]
            assert [step.token.width, step.token.height] == values


def test_the_runs_have_something_to_say():
    """The replayed runs have text, coordinates, sizes, ends and cuts."""
    runs = [case.run for case in cases().values()]
    assert {type(token) for run in runs for token in run.tokens} == {Text, Coord, Size}
    assert {run.finish_reason for run in runs} == {"stop", "length"}
    assert all(len(set(run.tokens)) > 3 for run in runs)


def test_runs_are_the_same_without_a_cache():
    """No choice depends on whether keys and values are cached or recomputed."""
    for skill, recomputed in cases(cached=False).items():
        assert cases()[skill].run.tokens == recomputed.run.tokens


def test_detect_reads_x_y_size_and_then_decides(monkeypatch):
    """The first x comes from the prompt's last state; the state after a size decides the end."""
    script = [COORD, RARE, RARE, COORD, EOS, SIZE, EOS]
    made = scripted(monkeypatch, script)
    boxes = skills.detect(image(), NAME, CONFIG, weights())
    assert boxes.token_ids == [COORD, COORD, SIZE] * 2 + [EOS]
    assert boxes.finish_reason == "stop"
    assert len(boxes.boxes) == 2
    assert len(made[0].embeddings_TD) == made[0].prompt_length + 6
    _, _, x, y = coords(boxes)
    assert boxes.boxes[1] == results.box_of((x, y), sizes(boxes)[1], CONFIG)


def test_point_reads_x_and_y(monkeypatch):
    """After y the same state decides on the next x or the end."""
    scripted(monkeypatch, [COORD, EOS, COORD, COORD, EOS])
    points = skills.point(image(), NAME, CONFIG, weights())
    assert points.token_ids == [COORD] * 4 + [EOS]
    x0, y0, x1, y1 = coords(points)
    assert points.points == [(x0, y0), (x1, y1)]


def test_nothing_is_found(monkeypatch):
    """An end instead of the first x gives no object."""
    scripted(monkeypatch, [EOS])
    assert skills.detect(image(), NAME, CONFIG, weights()).boxes == []


@pytest.mark.parametrize(("boundary", "ends"), [("restricted", True), ("eos_only", False)])
def test_a_stray_token_at_the_boundary(boundary, ends):
    """Restricted, the end beats coord though a text token beats both; else the text continues."""
    w = leaning(weights(), {EOS: 50.0, COORD: 0.0, RARE: 100.0})
    config = CONFIG.switched(boundary=boundary)
    found = skills.point(image(), NAME, config, w, max_objects=2)
    assert (found.token_ids == [EOS]) == ends
    assert (len(found.points) == 2) != ends


@pytest.mark.parametrize(
    ("limits", "num_tokens", "num_boxes"),
    [({"max_objects": 2}, 6, 2), ({"max_tokens": 7}, 7, 2), ({"max_tokens": 6}, 6, 2)],
)
def test_objects_are_limited(monkeypatch, limits, num_tokens, num_boxes):
    """Objects and tokens have a limit each; an object that is cut is dropped."""
    scripted(monkeypatch, [COORD] * 20)
    boxes = skills.detect(image(), NAME, CONFIG, weights(), **limits)
    assert (len(boxes.token_ids), len(boxes.boxes)) == (num_tokens, num_boxes)
    assert boxes.finish_reason == "length"


def test_a_box_spans_its_size_around_its_centre():
    """Edges are half a size from the centre, and clamped to the image unless switched off."""
    size = Size(0.5, 0.25)
    assert results.box_of((0.5, 0.5), size, CONFIG) == results.Box(0.25, 0.375, 0.75, 0.625)
    assert results.box_of((0.125, 1.0), size, CONFIG) == results.Box(0.0, 0.875, 0.375, 1.0)
    unclamped = CONFIG.switched(clamp_boxes=False)
    assert results.box_of((0.125, 1.0), size, unclamped) == results.Box(-0.125, 0.875, 0.375, 1.125)


def test_an_answer_ends_without_its_end(monkeypatch):
    """EOS belongs to the run and not to the answer."""
    made = scripted(monkeypatch, [RARE, COORD, RARE, EOS])
    answer = skills.query(NAME, CONFIG, weights(), image())
    assert answer.token_ids == [RARE, COORD, RARE, EOS]
    assert [type(token) for token in answer.answer] == [Text, Coord, Text]
    assert (answer.reasoning, answer.finish_reason) == (None, "stop")
    assert len(made[0].embeddings_TD) == made[0].prompt_length + 3


def test_values_in_answers_are_a_switch(monkeypatch):
    """With the switch off a coord id in an answer is fed as the id that it is."""
    scripted(monkeypatch, [COORD, SIZE, EOS])
    config = CONFIG.switched(spatial_answers=False)
    answer = skills.caption(image(), config, weights())
    assert answer.answer == [Text(COORD), Text(SIZE)]


def test_a_question_without_a_picture_starts_at_bos(monkeypatch):
    """Text alone has no prefix, and hints need an image."""
    made = scripted(monkeypatch, [EOS])
    skills.query(NAME, CONFIG, weights())
    assert made[0].prefix == 0
    assert made[0].prompt_length == 1 + len(prompts.query_prompt(IDS, NAME))
    np.testing.assert_array_equal(made[0].embeddings_TD[0], weights()["text.wte"][IDS.bos])
    with pytest.raises(ValueError, match="picture"):
        skills.query(NAME, CONFIG, weights(), refs=[(0.5, 0.5)])


def test_a_reasoning_ends_and_is_answered(monkeypatch):
    """The emitted 3 is fed once, and the answer follows; points are between 7 and 9."""
    script = [RARE, START, 61, COORD, COORD, COORD, END, 62, ANSWER, 63, EOS]
    made = scripted(monkeypatch, script)
    answer = skills.query(NAME, CONFIG, weights(), image(), reasoning=True)
    assert answer.token_ids == script
    assert answer.answer == [Text(63)]
    assert answer.reasoning == answer.tokens[:8]
    x, y, _ = coords(answer)
    assert answer.grounding == [results.Grounding(1, 2, [(x, y)])]
    assert len(made[0].embeddings_TD) == made[0].prompt_length + len(script) - 1


def test_a_reasoning_that_ends_the_run(monkeypatch):
    """EOS within a reasoning leaves no answer."""
    scripted(monkeypatch, [RARE, EOS])
    answer = skills.query(NAME, CONFIG, weights(), image(), reasoning=True)
    assert (answer.reasoning, answer.answer) == ([Text(RARE)], [])
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(("budget", "num_answer"), [("shared", 1), ("each", 4)])
def test_budgets_of_a_reasoning(monkeypatch, budget, num_answer):
    """Shared, the answer has what the reasoning and its end left; else as much again."""
    scripted(monkeypatch, [RARE, RARE, ANSWER] + [RARE] * 9)
    config = CONFIG.switched(reasoning_budget=budget)
    answer = skills.query(NAME, config, weights(), image(), reasoning=True, max_tokens=4)
    assert answer.reasoning == [Text(RARE)] * 2
    assert len(answer.answer) == num_answer
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(("budget", "num_answer"), [("shared", 0), ("each", 1)])
def test_a_reasoning_without_end(monkeypatch, budget, num_answer):
    """Shared, a reasoning that takes all of the budget leaves no answer; else one is opened."""
    scripted(monkeypatch, [RARE, RARE, RARE, 61, EOS])
    config = CONFIG.switched(reasoning_budget=budget)
    answer = skills.query(NAME, config, weights(), image(), reasoning=True, max_tokens=2)
    assert answer.reasoning == [Text(RARE)] * 2
    assert len(answer.answer) == num_answer


def test_grounding_drops_what_has_no_partner():
    """A coordinate alone or outside of a stretch, and a stretch without end, are no grounding."""
    one, two, three = Coord(0.25), Coord(0.5), Coord(0.75)
    first = [*prompts.texts([60, START, 61, 62]), one, two, one, *prompts.texts([END, 63])]
    second = [three, *prompts.texts([START, 64]), two, three, *prompts.texts([END])]
    unfinished = [*prompts.texts([START]), one, two]
    found = results.grounding([*first, *second, *unfinished], CONFIG)
    assert found == [
        results.Grounding(1, 3, [(0.25, 0.5)]),
        results.Grounding(4, 5, [(0.5, 0.75)]),
    ]


def test_segment_reads_its_box_first(monkeypatch):
    """The first two coordinates and size are the box, and ids above 20 are the path."""
    scripted(monkeypatch, [COORD, COORD, SIZE, 61, 20, 62, EOS])
    found = skills.segment(image(), NAME, CONFIG, weights())
    x, y = coords(found)
    assert found.box == results.box_of((x, y), sizes(found)[0], CONFIG)
    assert found.path_ids == [61, 62]
    scripted(monkeypatch, [COORD, 61, EOS])
    assert skills.segment(image(), NAME, CONFIG, weights()).box is None
