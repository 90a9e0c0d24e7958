"""The reference's prompts, coordinates and decoding loops."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from tests.reference.cases import CONFIG, NAME, embeddings, image, leaning, weights
from tests.reference.moondream3 import (
    check_weights,
    full,
    prompts,
    random_weights,
    skills,
    text,
    weight_shapes,
)
from tests.reference.moondream3.numerics import Weights, round_bfloat16
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

    class Scripted(skills.Decoder):
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
    run: skills.Run


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
        return prompts.encode_coord(token.value, CONFIG, w)
    if isinstance(token, Size):
        return prompts.encode_size(token.width, token.height, CONFIG, w)
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
            index = prompts.coord_logits(state, CONFIG, w).argmax()
            assert step.token.value == index / CONFIG.region.coord_bins
        if isinstance(step.token, Size):
            bins = prompts.size_logits(state, CONFIG, w).argmax(-1)
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
    assert boxes.boxes[1] == skills.box_of((x, y), sizes(boxes)[1], CONFIG)


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
    assert skills.box_of((0.5, 0.5), size, CONFIG) == skills.Box(0.25, 0.375, 0.75, 0.625)
    assert skills.box_of((0.125, 1.0), size, CONFIG) == skills.Box(0.0, 0.875, 0.375, 1.0)
    unclamped = CONFIG.switched(clamp_boxes=False)
    assert skills.box_of((0.125, 1.0), size, unclamped) == skills.Box(-0.125, 0.875, 0.375, 1.125)


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
    assert answer.grounding == [skills.Grounding(1, 2, [(x, y)])]
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
    found = skills.grounding([*first, *second, *unfinished], CONFIG)
    assert found == [
        skills.Grounding(1, 3, [(0.25, 0.5)]),
        skills.Grounding(4, 5, [(0.5, 0.75)]),
    ]


def test_segment_reads_its_box_first(monkeypatch):
    """The first two coordinates and size are the box, and ids above 20 are the path."""
    scripted(monkeypatch, [COORD, COORD, SIZE, 61, 20, 62, EOS])
    found = skills.segment(image(), NAME, CONFIG, weights())
    x, y = coords(found)
    assert found.box == skills.box_of((x, y), sizes(found)[0], CONFIG)
    assert found.path_ids == [61, 62]
    scripted(monkeypatch, [COORD, 61, EOS])
    assert skills.segment(image(), NAME, CONFIG, weights()).box is None


# ---------------------------------------------------------------- moondream3 prompts


def lengths(prompt):
    """Positions of a prompt after BOS and an image's 729 embeddings."""
    return 1 + full().vision.tokens + len(prompt)


def test_prompts_have_the_published_lengths():
    """Caption 735, detect 735 + n, the others 734 + n, with n tokens of text; 2 or 3 for a hint."""
    ids, n = full().ids, len(NAME)
    assert lengths(prompts.caption_prompt(ids, "long")) == 735
    assert lengths(prompts.query_prompt(ids, NAME)) == 734 + n
    assert lengths(prompts.detect_prompt(ids, NAME)) == 735 + n
    assert lengths(prompts.point_prompt(ids, NAME)) == 734 + n
    assert lengths(prompts.segment_prompt(ids, NAME, [(0.1, 0.2)])) == 736 + n
    assert lengths(prompts.query_prompt(ids, NAME, [(0.1, 0.2, 0.3, 0.4)])) == 737 + n


def test_prompts_are_the_published_ids():
    """Each skill's template ids are between 1 and 2, then comes 3, or 4 to reason first."""
    ids = full().ids

    def spelled(prompt):
        return [token.id for token in prompt]

    assert spelled(prompts.caption_prompt(ids, "short")) == [1, 32708, 2, 12492, 3]
    assert spelled(prompts.caption_prompt(ids, "normal")) == [1, 32708, 2, 6382, 3]
    assert spelled(prompts.caption_prompt(ids, "long")) == [1, 32708, 2, 4059, 3]
    assert spelled(prompts.query_prompt(ids, [77])) == [1, 15381, 2, 77, 3]
    assert spelled(prompts.query_prompt(ids, [77], reasoning=True)) == [1, 15381, 2, 77, 4]
    assert spelled(prompts.detect_prompt(ids, [77])) == [1, 7235, 476, 2, 77, 3]
    assert spelled(prompts.point_prompt(ids, [77])) == [1, 2581, 2, 77, 3]
    assert spelled(prompts.segment_prompt(ids, [77])) == [1, 17374, 2, 77, 3]


def test_hints_stand_before_the_text():
    """A point is two coordinates, a box centre and size, right after the template ids."""
    refs = [(0.25, 0.5), (0.0, 0.5, 0.5, 0.75)]
    hints = [Coord(0.25), Coord(0.5), Coord(0.25), Coord(0.625), Size(0.5, 0.25)]
    for build, words in (
        (prompts.point_prompt, IDS.point),
        (prompts.query_prompt, IDS.query),
        (prompts.segment_prompt, IDS.segment),
    ):
        before, behind = prompts.texts([1, *words, 2]), prompts.texts([*NAME, 3])
        assert build(IDS, NAME, refs) == [*before, *hints, *behind]


@pytest.mark.parametrize(
    "ref", [(0.1,), (0.1, 1.1), (float("nan"), 0.0), (0.5, 0.0, 0.4, 1.0), (0.0, 0.0, 0.0)]
)
def test_a_hint_that_is_none_is_refused(ref):
    """A hint has two or four finite values of 0..1; a box starts at its smaller corner."""
    with pytest.raises(ValueError, match=r"values of 0\.\.1|ends before"):
        prompts.hints([ref])


def test_names_are_spelled_as_trained():
    """Detect and point put a space before the name, segment and query do not."""
    for skill, spelled in {"detect": " cat", "point": " cat", "segment": "cat"}.items():
        assert prompts.object_text(skill, " cat ") == spelled


# ---------------------------------------------------------------- moondream3 region
# The reference's coordinates, sizes and weights' names.

WEIGHTS = weights()


def test_cosines_come_before_sines():
    """The phase of a coordinate is 2 pi x F; all cosines come before all sines."""
    features = np.array([[1.0, 0.25, -0.5]])
    ours = prompts.fourier(np.array([0.5]), features, CONFIG)
    np.testing.assert_allclose(ours, [-1, math.sqrt(0.5), 0, 0, math.sqrt(0.5), -1], atol=1e-15)


def test_a_size_mixes_width_and_height():
    """The phase of a size is 2 pi (w F0 + h F1), and the encoder is a biased product."""
    w, h = 0.3, 0.7
    features = WEIGHTS["region.size_features"]
    phases = [2 * math.pi * (w * f0 + h * f1) for f0, f1 in features.T]
    row = np.array([math.cos(p) for p in phases] + [math.sin(p) for p in phases])
    matrix, bias = (WEIGHTS[f"region.size_encoder.{part}"] for part in ("weight", "bias"))
    ours = prompts.encode_size(w, h, CONFIG, WEIGHTS)
    np.testing.assert_allclose(ours, matrix @ row + bias, atol=1e-12)
    assert np.abs(ours - prompts.encode_size(h, w, CONFIG, WEIGHTS)).max() > 1e-2


def test_phases_in_bfloat16_are_torchs():
    """With the switch value, turns, phase, cosine and sine are each rounded as torch rounds."""
    features = round_bfloat16(np.random.default_rng(11).standard_normal((1, 256)) * 3)
    switched = CONFIG.switched(fourier="bfloat16")
    for value in np.linspace(0, 1, 99):
        turns = 2 * math.pi * torch.tensor(value, dtype=torch.bfloat16)
        phases = turns * torch.from_numpy(features[0]).to(torch.bfloat16)
        exact = phases.double()  # torch's cosine in bfloat16 differs from machine to machine
        expected = torch.cat([exact.cos(), exact.sin()]).to(torch.bfloat16).double().numpy()
        ours = prompts.fourier(np.array([value]), features, switched)
        np.testing.assert_array_equal(ours, expected)


def test_bins_have_their_values():
    """A coordinate's bin is n / 1024, or n / 1023 by the switch; sizes go from 2^-10 to 1."""
    config = full()
    assert [prompts.coord_value(n, config) for n in (0, 512, 1023)] == [0, 0.5, 1023 / 1024]
    other = config.switched(coord_divisor="bins_minus_one")
    assert [prompts.coord_value(n, other) for n in (0, 512, 1023)] == [0, 512 / 1023, 1]
    assert [prompts.size_value(n, config) for n in (0, 1023)] == [1 / 1024, 1]
    assert prompts.size_value(341, config) == pytest.approx(2 ** (341 / 1023 * 10 - 10))
    rounded = config.switched(round_values=True)
    assert prompts.coord_value(1021, rounded) == float(torch.tensor(1021 / 1024).bfloat16())
    assert prompts.size_value(1000, rounded) == float(
        torch.tensor(prompts.size_value(1000, config)).bfloat16()
    )


def test_a_size_lies_at_its_bin():
    """The inverse returns every bin's value to it, and values below 2^-10 to bin 0."""
    config = full()
    for index in range(config.region.size_bins):
        assert prompts.size_position(prompts.size_value(index, config), config) == pytest.approx(
            index
        )
    assert prompts.size_position(0.0, config) == 0


def test_bins_are_read_before_the_last_norm():
    """post_ln affects only token logits; region.ln affects the bins."""
    hidden = embeddings(1)[0]
    post_ln = {"text.post_ln.weight": WEIGHTS["text.post_ln.weight"] + 1}
    own = {"region.ln.weight": WEIGHTS["region.ln.weight"] + 1}

    def decoded(weights):
        return (
            text.logits(hidden, weights),
            prompts.coord_logits(hidden, CONFIG, weights),
            prompts.size_logits(hidden, CONFIG, weights),
        )

    def same(changes):
        pairs = zip(decoded(WEIGHTS), decoded(WEIGHTS | changes), strict=True)
        return [np.array_equal(before, after) for before, after in pairs]

    assert same(post_ln) == [False, True, True]
    assert same(own) == [True, False, False]


def test_bins_are_a_norm_and_a_product():
    """Coordinates have one row of bins, sizes two, of which the width's is the first."""
    hidden = torch.from_numpy(embeddings(1)[0])
    w = {key: torch.from_numpy(WEIGHTS[key]) for key in WEIGHTS if key.startswith("region.")}
    normed = torch.nn.functional.layer_norm(
        hidden, hidden.shape, w["region.ln.weight"], w["region.ln.bias"]
    )
    for kind, shape in (("coord", (CONFIG.region.coord_bins,)), ("size", (2, 32))):
        decoder = f"region.{kind}_decoder"
        expected = w[f"{decoder}.weight"] @ normed + w[f"{decoder}.bias"]
        decode = prompts.coord_logits if kind == "coord" else prompts.size_logits
        ours = decode(hidden.numpy(), CONFIG, WEIGHTS)
        np.testing.assert_allclose(ours, expected.reshape(shape).numpy(), atol=1e-12)


def test_the_region_switches_are_different():
    """Without its norm, or after post_ln, a coordinate is read from another state."""
    hidden = embeddings(1)[0]
    default = prompts.coord_logits(hidden, CONFIG, WEIGHTS)
    for switches in ({"region_norm": False}, {"region_hidden": "post_ln"}):
        other = prompts.coord_logits(hidden, CONFIG.switched(**switches), WEIGHTS)
        assert np.abs(other - default).max() > 1e-2


def test_the_published_names():
    """The full sizes have the preview's 662 tensors, and about 9.27 thousand million weights."""
    shapes = weight_shapes(full())
    assert len(shapes) == 662
    count = {part: sum(name.startswith(part) for name in shapes) for part in ("region", "vision")}
    assert count == {"region": 12, "vision": 329 + 4}
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(9.27e9, rel=2e-3)
    some = {
        "vision.patch_emb.weight": (1152, 588),
        "vision.proj_mlp.fc1.weight": (8192, 2304),
        "text.wte": (51200, 2048),
        "text.blocks.3.mlp.fc1.weight": (8192, 2048),
        "text.blocks.4.mlp.fc1.weight": (64, 2048, 2048),
        "text.blocks.23.mlp.fc2.weight": (64, 2048, 1024),
        "text.blocks.0.attn.tau.wq": (32, 6144),
        "region.size_features": (2, 256),
        "region.size_decoder.weight": (2048, 2048),
    }
    assert some.items() <= shapes.items()


def test_weights_are_checked_both_ways():
    """Missing, extra and mis-shaped weights are named; region.ln follows its switch."""
    check_weights(CONFIG, WEIGHTS)
    fewer = {key: value for key, value in WEIGHTS.items() if not key.startswith("region.ln.")}
    with pytest.raises(ValueError, match=r"region\.ln\.bias"):
        check_weights(CONFIG, fewer)
    check_weights(CONFIG.switched(region_norm=False), fewer)
    with pytest.raises(ValueError, match="surplus"):
        check_weights(CONFIG, WEIGHTS | {"surplus": np.zeros(1)})
    with pytest.raises(ValueError, match=r"text\.wte"):
        check_weights(CONFIG, WEIGHTS | {"text.wte": WEIGHTS["text.wte"].T})


def test_random_weights_are_held_exactly():
    """A seed gives the same weights, exact in the given precision."""
    again = random_weights(CONFIG, 0, "float64")
    assert all(np.array_equal(again[key], WEIGHTS[key]) for key in WEIGHTS)
    assert not np.array_equal(random_weights(CONFIG, 1, "float64")["text.wte"], WEIGHTS["text.wte"])
    for value in random_weights(CONFIG, 0, "bfloat16").values():
        tensor = torch.from_numpy(value)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16().float(), tensor)
