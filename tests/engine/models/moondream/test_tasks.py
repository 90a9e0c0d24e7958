"""Each skill's state machine, its constraints and its paths."""

from __future__ import annotations

from datetime import date

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.models.confidence import Calibration, CalibrationFile
from legato_engine.models.moondream.config import Suppression
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.presets import moondream2_config, tiny_random_config
from legato_engine.models.moondream.tasks import Allow, SvgPath, constraint_table
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.sequence import Constraint, SampledToken, tokens_of
from legato_engine.types import (
    AnswerFormat,
    BlobRef,
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    EncodedImage,
    FinishReason,
    GroundedText,
    ImageBox,
    ImagePoint,
    MaskOutline,
    ObjectEvent,
    ObjectOrder,
    OutlineEvent,
    PointEvent,
    PointSpec,
    QuerySpec,
    ReasoningEvent,
    Request,
    RequestKey,
    SamplingParams,
    SegmentSpec,
    TextEvent,
    TokenInfo,
    TokensEvent,
)

from tests.fakes import successor

# ---------------------------------------------------------------- state machines

IMAGE = EncodedImage(blob=BlobRef(name="b", size=1), mime_type="image/png")
EOS, ANSWER, COORD, SIZE, GROUND_START, GROUND_END = 0, 3, 5, 6, 7, 9


def text(words):
    """Plain tokens of a text."""
    return [SampledToken(i, (0.0, 0.0)) for i in StandInTokenizer().encode(words)]


def plain(*ids):
    """Tokens without a value."""
    return [SampledToken(i, (0.0, 0.0)) for i in ids]


def coord(value):
    """A coord token."""
    return SampledToken(COORD, (value, 0.0))


def size(width, height):
    """A size token."""
    return SampledToken(SIZE, (width, height))


@pytest.fixture
def make(frontend):
    """A task of a spec, with sampling and request options."""

    def make(task, image=IMAGE, return_tokens=False, logprobs=False, top_logprobs=0, **sampling):
        return frontend.make_task(
            Request(
                request_id=RequestKey("r"),
                task=task,
                image=image,
                sampling=SamplingParams(**sampling),
                return_tokens=return_tokens,
                logprobs=logprobs,
                top_logprobs=top_logprobs,
            )
        )

    return make


def run(task, tokens):
    """Every event of the tokens, and the result; the task must need all tokens."""
    events = []
    for token in tokens:
        assert task.finish_reason is None
        events += task.consume(token)
    return events, task.result(task.finish_reason or FinishReason.CANCELLED)


def test_detect_follows_its_cycle(make):
    """Coord or EOS, coord, size; a box is an event at once, clamped, and EOS ends it."""
    task = make(DetectSpec(object=" cup "))
    seen = []
    tokens = [coord(0.5), coord(0.25), size(0.5, 0.25), coord(0.9), coord(0.05), size(0.4, 0.2)]
    events = []
    for token in [*tokens, *plain(EOS)]:
        seen.append(task.constraint())
        events.append(task.consume(token))
    assert seen == [Allow.DETECT_X, Allow.DETECT_Y, Allow.DETECT_SIZE] * 2 + [Allow.DETECT_X]
    first = ObjectEvent(box=ImageBox(x_min=0.25, y_min=0.125, x_max=0.75, y_max=0.375), label="cup")
    assert [len(e) for e in events] == [0, 0, 1, 0, 0, 1, 0]
    assert events[2] == [first]
    second = events[5][0].box
    assert (second.x_max, second.y_min) == (1.0, 0.0)
    assert second.x_min == pytest.approx(0.7)
    assert task.finish_reason is FinishReason.STOP
    assert task.result(FinishReason.STOP).objects == (first, events[5][0])


def test_detect_may_find_nothing(make):
    """EOS at once is an empty result."""
    events, result = run(make(DetectSpec(object="cup")), plain(EOS))
    assert events == []
    assert result.objects == ()


def test_detect_ends_at_max_objects(make):
    """The last object allowed ends the task with a finish reason of its own."""
    task = make(DetectSpec(object="cup", max_objects=2))
    assert task.max_tokens == 7
    _, result = run(task, [coord(0.5), coord(0.5), size(0.1, 0.1)] * 2)
    assert task.finish_reason is FinishReason.MAX_OBJECTS
    assert len(result.objects) == 2


def boxed(x, *certainties):
    """The tokens of a box at x that the model is so sure of."""
    tokens = [coord(x), coord(0.5), size(0.1, 0.1)]
    return [token._replace(certainty=each) for token, each in zip(tokens, certainties, strict=True)]


SURE, UNSURE = ((0.9, 1.0), (1.0, 0.8), (1.0, 0.5)), ((0.5, 1.0), (1.0, 0.5), (1.0, 0.4))


def test_confidence_is_the_product_of_certainties(make):
    """Of an object's own tokens; objects whose tokens are of unknown certainty have none."""
    task = make(DetectSpec(object="cup"))
    _, result = run(task, [*boxed(0.2, *SURE), *boxed(0.4, *UNSURE), *boxed(0.6, *[None] * 3)])
    first, second, third = (each.confidence for each in result.objects)
    assert (first, second, third) == (pytest.approx(0.36), pytest.approx(0.1), None)
    points = [token for token in boxed(0.2, *SURE) if token.token_id == COORD]
    _, result = run(make(PointSpec(object="cup")), [*points, *plain(EOS)])
    assert result.points[0].confidence == pytest.approx(0.72)


def test_objects_below_the_least_confidence_are_left_out(make):
    """Of events and result, and they do not count for `max_objects`; unknown ones stay."""
    task = make(DetectSpec(object="cup", max_objects=2, min_confidence=0.2))
    assert task.max_tokens == 151
    tokens = [*boxed(0.2, *UNSURE), *boxed(0.4, *SURE), *boxed(0.6, *[None] * 3)]
    events, result = run(task, tokens)
    assert task.finish_reason is FinishReason.MAX_OBJECTS
    assert [round(each.box.x_min + 0.05, 3) for each in result.objects] == [0.4, 0.6]
    assert tuple(events) == result.objects


def test_objects_by_confidence(make):
    """The greatest first and unknown ones last; events come as they are found."""
    task = make(DetectSpec(object="cup", order=ObjectOrder.CONFIDENCE))
    tokens = [*boxed(0.1, *[None] * 3), *boxed(0.2, *UNSURE), *boxed(0.4, *SURE)]
    events, result = run(task, [*tokens, *plain(EOS)])
    assert result.objects == tuple(reversed(events))


def test_an_outline_is_as_sure_as_its_box(make):
    """Path tokens do not change it."""
    tokens = [*boxed(0.2, *SURE), *text("M 0"), *plain(EOS)]
    _, result = run(make(SegmentSpec(object="cup")), tokens)
    assert result.segments[0].confidence == pytest.approx(0.36)


def test_only_the_models_own_weights_are_calibrated(frontend):
    """A calibration changes the confidences of its skill; those of a fine-tune stay as they are."""
    fitted = CalibrationFile("scenes", date(2026, 11, 25), {"detect": Calibration(1.0, 1.0)})
    calibrated = MoondreamFrontend(frontend._config, StandInTokenizer(), calibrations=fitted)
    for adapter, skill, expected in [("", DetectSpec, 0.6046), ("x", DetectSpec, 0.36)]:
        request = Request(
            request_id=RequestKey("r"), task=skill(object="cup"), image=IMAGE, adapter=adapter
        )
        _, result = run(calibrated.make_task(request), [*boxed(0.2, *SURE), *plain(EOS)])
        assert result.objects[0].confidence == pytest.approx(expected, abs=1e-3)
    info = calibrated.resizing_on_device().confidence
    assert info is not None
    assert info.calibrated == ("detect",)


def test_alternatives_have_the_text_that_they_would_complete(make):
    """After a first byte they are ends of its character; no more are told than were asked for."""
    task = make(CaptionSpec(), return_tokens=True, logprobs=True, top_logprobs=2)
    first, second = text("é")
    others = tuple((token.token_id, -1.0) for token in (*text("è")[1:], second, first))
    told: list[TokenInfo] = []
    for token in (first, second._replace(logprob=-0.5, alternatives=others)):
        told += tokens_of(task.consume(token))
    assert [(each.text, each.piece) for each in told] == [("", b"\xc3"), ("é", b"\xa9")]
    assert [(each.text, each.piece) for each in told[1].alternatives] == [
        ("è", b"\xa8"),
        ("é", b"\xa9"),
    ]


def test_detect_drops_an_unfinished_box(make):
    """A budget that ends inside a box leaves the box out."""
    task = make(DetectSpec(object="cup"), max_tokens=5)
    _, result = run(task, [coord(0.5), coord(0.5), size(0.1, 0.1), coord(0.5), coord(0.5)])
    assert task.finish_reason is FinishReason.LENGTH
    assert len(result.objects) == 1


def test_point_follows_its_cycle(make):
    """Coord or EOS, coord; a point is an event at once."""
    task = make(PointSpec(object="cup", max_objects=2))
    assert task.max_tokens == 5
    assert task.constraint() == Allow.POINT_X
    assert task.consume(coord(0.25)) == []
    assert task.constraint() == Allow.POINT_Y
    event = PointEvent(point=ImagePoint(x=0.25, y=0.75), label="cup")
    assert task.consume(coord(0.75)) == [event]
    assert task.constraint() == Allow.POINT_X
    run(task, [coord(0.1), coord(0.2)])
    assert task.finish_reason is FinishReason.MAX_OBJECTS
    assert task.result(FinishReason.MAX_OBJECTS).points[0] == event


def test_caption_streams_text(make):
    """Deltas add up to the caption, which does not hold EOS."""
    task = make(CaptionSpec())
    assert task.constraint() == Allow.TEXT
    assert not task.constrained
    events, result = run(task, [*text(" A cup."), *plain(EOS)])
    assert events[0] == TextEvent(text="A")
    assert "".join(event.text for event in events) == result.caption == "A cup."
    assert task.finish_reason is FinishReason.STOP


def test_the_budget_ends_a_caption(make):
    """The last token allowed ends the task and emits the text held back."""
    task = make(CaptionSpec(), max_tokens=3, stop=("pq",))
    events, result = run(task, text("cup"))
    assert task.finish_reason is FinishReason.LENGTH
    assert "".join(event.text for event in events) == result.caption == "cup"


def test_a_stop_string_ends_an_answer(make):
    """Text is cut before the stop string, in deltas and in the result."""
    task = make(QuerySpec(question="?"), stop=("END", "zz"))
    events, result = run(task, text("a cup EN EEND"))
    assert task.finish_reason is FinishReason.STOP
    assert "".join(event.text for event in events) == result.answer == "a cup EN E"


def test_a_cancelled_answer_holds_all_text(make):
    """The result of an aborted task has the text that was held back."""
    task = make(QuerySpec(question="?"), stop=("END",))
    events, result = run(task, text("a EN"))
    assert "".join(event.text for event in events) == "a "
    assert result.answer == "a EN"


def test_tokens_come_along_when_asked_for(make):
    """Every token is reported once with its own text, empty within a character, next to deltas."""
    task = make(QuerySpec(question="?"), return_tokens=True)
    events, _ = run(task, [*text("é!"), *plain(EOS)])
    half, rest, mark = (
        TokenInfo(token_id=i, text=t, piece=p)
        for i, t, p in zip(
            StandInTokenizer().encode("é!"), ["", "é", "!"], [b"\xc3", b"\xa9", b"!"], strict=True
        )
    )
    assert events == [
        TokensEvent(tokens=(half,)),
        TextEvent(text="é", tokens=(rest,)),
        TextEvent(text="!", tokens=(mark,)),
        TokensEvent(tokens=(TokenInfo(token_id=EOS),)),
    ]


def test_a_character_that_the_budget_cuts_is_told_in_bytes(make):
    """The text leaves the cut character out; its tokens are reported, and have their bytes."""
    task = make(QuerySpec(question="?"), return_tokens=True, max_tokens=3)
    events, result = run(task, text("a😀")[:3])
    assert result.answer == "a"
    assert [(each.text, each.piece) for each in tokens_of(events)] == [
        ("a", b"a"),
        ("", b"\xf0"),
        ("", b"\x9f"),
    ]


def test_tokens_of_positions_carry_their_values(make):
    """Coordinates and sizes are typed, and precede the object that they complete."""
    task = make(DetectSpec(object="cup"), return_tokens=True)
    events, _ = run(task, [coord(0.5), coord(0.25), size(0.5, 0.125), *plain(EOS)])
    told = [
        TokenInfo(token_id=COORD, coordinate=0.5),
        TokenInfo(token_id=COORD, coordinate=0.25),
        TokenInfo(token_id=SIZE, size=(0.5, 0.125)),
        TokenInfo(token_id=EOS),
    ]
    assert list(tokens_of(events)) == told
    assert [type(event) for event in events] == [*[TokensEvent] * 3, ObjectEvent, TokensEvent]


def test_tokens_of_reasoning_come_beside_it(make):
    """Reasoning tokens are reported like an answer's; marks, points and answer ids alone."""
    task = make(QuerySpec(question="?", reasoning=True), return_tokens=True)
    tokens = [*plain(GROUND_START), *text("a"), coord(0.5), coord(0.5), *plain(GROUND_END)]
    tokens += [*plain(ANSWER, ANSWER), *text("b"), *plain(EOS)]
    events, _ = run(task, tokens)
    assert [token.token_id for token in tokens_of(events)] == [t.token_id for t in tokens]
    grounded = [e for e in events if isinstance(e, ReasoningEvent) and e.grounding]
    assert [token.token_id for token in grounded[0].tokens] == [GROUND_END]


def test_a_held_token_is_told_at_once(make):
    """Tokens are reported even while their text may begin a stop string."""
    task = make(QuerySpec(question="?"), return_tokens=True, stop=("END",))
    events, result = run(task, text("aEND"))
    assert [token.text for token in tokens_of(events)] == list("aEND")
    assert result.answer == "a"


def test_logprobs_are_told_to_those_who_ask(make):
    """A request that does not want log-probabilities gets none, even if its launch has them."""
    token = SampledToken(StandInTokenizer().encode("a")[0], (0.0, 0.0), -0.5)
    seen = {}
    for asks in (True, False):
        task = make(CaptionSpec(), return_tokens=True, logprobs=asks)
        (seen[asks],) = tokens_of(task.consume(token))
    assert (seen[True].logprob, seen[False].logprob) == (-0.5, None)


def test_reasoning_comes_before_the_answer(make):
    """Reasoning until the answer token, a second one forced, then the answer."""
    task = make(QuerySpec(question="?", reasoning=True))
    assert task.constraint() == Allow.REASONING
    events, _ = run(task, text("so"))
    assert events == [ReasoningEvent(text="s"), ReasoningEvent(text="o")]
    run(task, plain(ANSWER))
    assert task.constraint() == Allow.ANSWER
    run(task, plain(ANSWER))
    assert task.constraint() == Allow.TEXT
    events, result = run(task, [*text("yes"), *plain(EOS)])
    assert all(isinstance(event, TextEvent) for event in events)
    assert (result.reasoning, result.answer) == ("so", "yes")
    assert task.reasoning_tokens == 4


def test_reasoning_is_grounded(make):
    """A grounded span carries its points and its offsets into the text; a lone coord is dropped."""
    task = make(QuerySpec(question="?", reasoning=True))
    tokens = [
        *text(" the "),
        *plain(GROUND_START),
        *text("cup"),
        coord(0.1),
        coord(0.2),
        coord(0.3),
    ]
    events, result = run(task, [*tokens, *plain(GROUND_END), *text("!")])
    grounding = GroundedText(start_index=4, end_index=7, points=(ImagePoint(x=0.1, y=0.2),))
    assert ReasoningEvent(text="", grounding=(grounding,)) in events
    assert result.grounding == (grounding,)
    assert result.reasoning == "the cup!"
    assert result.reasoning[4:7] == "cup"
    assert result.answer == ""


def test_a_span_without_points_grounds_nothing(make):
    """A span around text alone reports nothing."""
    task = make(QuerySpec(question="?", reasoning=True))
    tokens = [*plain(GROUND_START), *text("cup"), *plain(GROUND_END, GROUND_END)]
    _, result = run(task, tokens)
    assert result.grounding == ()


def test_groundings_come_one_by_one_in_order(make):
    """Each span is reported once, when it closes, and the result has all in order."""
    task = make(QuerySpec(question="?", reasoning=True))
    spans = []
    for word, x in (("a ", 0.25), ("é", 0.5)):
        spans += [*plain(GROUND_START), *text(word), coord(x), coord(0.75), *plain(GROUND_END)]
    events, result = run(task, [*text("So "), *spans, *plain(ANSWER, ANSWER), *text("A")])
    told = [each for e in events if isinstance(e, ReasoningEvent) for each in e.grounding]
    assert told == list(result.grounding)
    assert [result.reasoning[g.start_index : g.end_index] for g in told] == ["a ", "é"]
    assert [g.points for g in told] == [(ImagePoint(x=0.25, y=0.75),), (ImagePoint(x=0.5, y=0.75),)]
    assert (result.reasoning, result.answer) == ("So a é", "A")


def test_an_open_span_grounds_nothing(make):
    """A span that stays open, or begins again, is dropped."""
    task = make(QuerySpec(question="?", reasoning=True))
    tokens = [*plain(GROUND_START), *text("a"), coord(0.1), coord(0.1)]
    tokens += [*plain(GROUND_START), *text("b"), coord(0.2), coord(0.2), *plain(GROUND_END)]
    tokens += [*plain(GROUND_START), *text("c"), coord(0.3), coord(0.3), *plain(ANSWER)]
    _, result = run(task, tokens)
    (grounding,) = result.grounding
    assert (grounding.start_index, grounding.end_index) == (1, 2)
    assert grounding.points == (ImagePoint(x=0.2, y=0.2),)


def test_eos_ends_reasoning_without_an_answer(make):
    """A model whose reasoning may end early answers nothing, which is no failure."""
    task = make(QuerySpec(question="?", reasoning=True))
    _, result = run(task, [*text("so"), *plain(EOS)])
    assert task.finish_reason is FinishReason.STOP
    assert (result.reasoning, result.answer) == ("so", "")


def test_values_in_an_answer_carry_no_text(tiny_config):
    """If answers may hold values, their rows read them and the text continues."""
    config = msgspec.structs.replace(tiny_config, suppression=Suppression())
    frontend = MoondreamFrontend(config, StandInTokenizer())
    task = frontend.make_task(Request(request_id=RequestKey("r"), task=CaptionSpec(), image=IMAGE))
    assert task.has_payload
    _, result = run(task, [*text("a"), coord(0.5), size(0.5, 0.5), *text("b"), *plain(EOS)])
    assert result.caption == "ab"
    formatted = QuerySpec(question="?", response_format=AnswerFormat(choices=("yes", "no")))
    task = frontend.make_task(Request(request_id=RequestKey("f"), task=formatted))
    assert not task.has_payload, "a format has no values"


def test_a_query_without_reasoning_has_none(make):
    """Absent reasoning is None, not empty."""
    _, result = run(make(QuerySpec(question="?")), plain(EOS))
    assert result.reasoning is None


def test_segment_sends_its_box_first(make):
    """The box is emitted as soon as it is complete, then pieces that add up to the path."""
    task = make(SegmentSpec(object="cup"))
    assert task.constraint() == Allow.FREE
    events, _ = run(task, [coord(0.5), coord(0.5), size(0.5, 0.25)])
    box = ImageBox(x_min=0.25, y_min=0.375, x_max=0.75, y_max=0.625)
    assert events == [OutlineEvent(index=0, box=box)]
    events, result = run(task, [*text("M00L11z"), *plain(EOS)])
    assert all(event.box is None and event.path_delta for event in events)
    path = "M 0,0 L 0.001,0.001 z"
    assert "".join(event.path_delta for event in events) == path
    assert result.segments == (MaskOutline(path=path, box=box, label="cup", coarse=True),)


def test_segment_keeps_the_box_of_a_broken_path(make):
    """Text that is no path gives an empty path, not an error."""
    task = make(SegmentSpec(object="cup"))
    tokens = [coord(0.5), coord(0.5), size(0.5, 0.25), *text("M00?"), *plain(EOS)]
    _, result = run(task, tokens)
    assert result.segments[0].path == ""
    assert task.finish_reason is FinishReason.STOP


def test_segment_without_a_box_outlines_nothing(make):
    """Path text alone is no outline."""
    events, result = run(make(SegmentSpec(object="cup")), [*text("M00L11z"), *plain(EOS)])
    assert events == []
    assert result.segments == ()


def test_segment_shows_early_path_text_after_the_box(make):
    """Path text before the box is emitted with the box."""
    task = make(SegmentSpec(object="cup"))
    events, result = run(task, [*text("M00"), coord(0.5), coord(0.5), size(0.5, 0.5), coord(0.9)])
    assert [event.path_delta for event in events] == ["M 0,0"]
    assert events[0].box == result.segments[0].box


# ---------------------------------------------------------------- SVG paths


def read(pieces):
    """The path after all pieces, and the texts it returned."""
    path = SvgPath()
    return path, "".join(map(path.push, pieces))


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ("M 0 960 L 480 240 z", "M 0,1 L 0.5,0.25 z"),
        ("M 96 96 192 192 Z", "M 0.1,0.1 0.2,0.2 Z"),
        ("m 1 2 l - 480 - 0 z", "m 0.001,0.002 l -0.5,0 z"),
        ("M 0 0 C 96 96 192 192 288 288", "M 0,0 C 0.1,0.1 0.2,0.2 0.3,0.3"),
        ("M 0 0 H 480 V 96", "M 0,0 H 0.5 V 0.1"),
        ("M 0 0 A 96 96 30 0 1 480 480", "M 0,0 A 0.1,0.1 30,0 1,0.5 0.5"),
        ("M 320 1", "M 0.333,0.001"),
        ("", ""),
    ],
)
def test_numbers_become_the_unit_square(pieces, text):
    """Numbers are 960ths of the box with three decimals at most, in pairs."""
    path, shown = read(pieces.split())
    assert path.text == shown == text


@pytest.mark.parametrize("pieces", ["M 0 0 L 5", "M 0 0 L", "M 0 0 C 1 2 3 4 5"])
def test_unfinished_groups_are_left_out(pieces):
    """A path that is cut off ends after its last complete stroke."""
    path, shown = read(pieces.split())
    assert path.text == shown == "M 0,0"


@pytest.mark.parametrize(
    "pieces",
    [
        "5 M 0 0",
        "M 0 0 x",
        "M 0 0 1.5 2",
        "M 0 0 - L 1 1",
        "M 0 0 - - 1 1",
        "L 0 0",
        "M 0 0 z 1",
        "M ١ ٢",
    ],
)
def test_what_is_no_path_gives_an_empty_one(pieces):
    """An invalid piece empties the path, and raises nothing."""
    path, _ = read(pieces.split())
    assert path.text == ""
    assert path.push("M") == path.push("1") == path.push("2") == ""


def test_blank_tokens_mean_nothing():
    """Whitespace around and between pieces is ignored."""
    path, _ = read([" M", " ", "0", "\n", " 480 "])
    assert path.text == "M 0,0.5"


# ---------------------------------------------------------------- constraints
# The tokens that each state of a skill may sample.


@pytest.fixture
def table():
    """Moondream 2's table, or one with other suppression rules."""

    def make(suppression=None):
        config = msgspec.structs.replace(moondream2_config(), suppression=suppression)
        return constraint_table(config)

    return make


def test_every_state_has_its_row(table):
    """Moondream 2's table has one constraint for each name, and the first allows everything."""
    assert len(table()) == len(Allow)
    assert table()[Allow.FREE] == Constraint()


def test_values_come_in_their_order(table):
    """Between objects only a coord or EOS is allowed, within them only the next value."""
    made = table()
    assert made[Allow.DETECT_Y].allowed == made[Allow.POINT_Y].allowed == (COORD,)
    assert made[Allow.DETECT_SIZE].allowed == (SIZE,)
    assert set(made[Allow.DETECT_X].allowed) == {COORD, EOS} == set(made[Allow.POINT_X].allowed)
    assert made[Allow.ANSWER].allowed == (ANSWER,)


def test_moondream2_suppresses(table):
    """An answer has no answer id and no values, reasoning no EOS and no size."""
    made = table()
    assert set(made[Allow.TEXT].suppressed) == {ANSWER, COORD, SIZE}
    assert made[Allow.FORMATTED] == made[Allow.TEXT]
    assert set(made[Allow.REASONING].suppressed) == {EOS, SIZE}


def test_a_model_may_suppress_nothing(table):
    """A config without ids leaves text and reasoning free."""
    made = table(Suppression())
    assert made[Allow.TEXT] == Constraint()
    assert made[Allow.REASONING].suppressed == ()


@pytest.mark.parametrize(
    ("answer", "has_values"),
    [((), True), ((ANSWER,), True), ((ANSWER, COORD), True), ((COORD, SIZE), False)],
)
def test_text_rows_read_values_only_where_there_may_be_some(answer, has_values):
    """Text needs no payload if its constraint excludes coords and sizes."""
    suppression = Suppression(answer=answer)
    config = msgspec.structs.replace(moondream2_config(), suppression=suppression)
    assert config.has_values_in_text == has_values
    assert not moondream2_config().has_values_in_text


def frontend_with(num_answer_tokens):
    """Of a tiny model whose answers are opened by so many tokens."""
    config = tiny_random_config()
    assert config.templates.query is not None
    suffix = (ANSWER,) * num_answer_tokens
    query = msgspec.structs.replace(config.templates.query, suffix=suffix)
    templates = msgspec.structs.replace(config.templates, query=query)
    made = msgspec.structs.replace(config, templates=templates)
    return MoondreamFrontend(made, StandInTokenizer())


FRONTENDS = {count: frontend_with(count) for count in (1, 2, 3)}


@given(
    spec=st.sampled_from(
        [
            DetectSpec(object="cup", max_objects=4),
            PointSpec(object="cup", max_objects=4),
            QuerySpec(question="why?", reasoning=True),
            QuerySpec(question="why?"),
            CaptionSpec(),
            SegmentSpec(object="cup"),
        ]
    ),
    num_answer_tokens=st.sampled_from(list(FRONTENDS)),
    draw=st.randoms(use_true_random=False),
)
def test_the_table_leads_where_the_tasks_go(spec, num_answer_tokens, draw):
    """After every token that a task's constraint allows, its next one is the table's successor."""
    frontend = FRONTENDS[num_answer_tokens]
    table = frontend.constraints
    request = Request(
        request_id=RequestKey("r"),
        task=spec,
        image=CachedImageRef(image_id="i"),
        sampling=SamplingParams(max_tokens=30),
    )
    task = frontend.make_task(request)
    assert task.uses_transition_table
    constraint = task.constraint()
    while task.finish_reason is None:
        assert task.constraint() == constraint
        allowed, suppressed = table[constraint][:2]
        likely = [EOS, ANSWER, ANSWER, COORD, SIZE, *range(20, 24)]
        token = draw.choice([t for t in allowed or likely if t not in suppressed])
        task.consume(SampledToken(token, (draw.random(), 0.5)))
        constraint = successor(table, constraint, token)
