"""Prompts position by position."""

from __future__ import annotations

import math

import pytest
from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models.moondream.frontend import Prompts
from legato_engine.models.moondream.presets import (
    moondream2_config,
    moondream3_config,
    tiny_random_config,
)
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.types import Box, CaptionLength, Point, PromptToken, Turn

TOKENIZER = StandInTokenizer()
CUP = TOKENIZER.encode("cup")
SPACE_CUP = TOKENIZER.encode(" cup")


@pytest.fixture(scope="module")
def moondream2():
    """Moondream 2's templates over bytes as tokens."""
    return Prompts(moondream2_config(), TOKENIZER)


def ids(prompt):
    """Token ids of a prompt."""
    return tuple(token.token_id for token in prompt)


@pytest.mark.parametrize(("length", "word"), [("short", 12492), ("normal", 6382), ("long", 4059)])
def test_caption_of_moondream2(moondream2, length, word):
    """A caption's prompt is its template."""
    assert ids(moondream2.caption(CaptionLength(length))) == (1, 32708, 2, word, 3)


def test_prompts_of_moondream2(moondream2):
    """The doubled answer token, the space before an object, and stripped text."""
    assert ids(moondream2.query(" cup\n", (), reasoning=False)) == (1, 15381, 2, *CUP, 3, 3)
    assert ids(moondream2.query("cup", (), reasoning=True)) == (1, 15381, 2, *CUP, 3, 4)
    assert ids(moondream2.detect("cup ")) == (1, 7235, 476, 2, *SPACE_CUP, 3)
    assert ids(moondream2.point("cup", ())) == (1, 2581, 2, *SPACE_CUP, 3)


def test_lengths_of_moondream3():
    """Prefix and prompt have the published lengths; a point adds two positions, a box three."""
    prompts, prefix = Prompts(moondream3_config(), TOKENIZER), moondream3_config().prefix_length
    n, spaced = len(CUP), len(SPACE_CUP)
    refs = (Point(x=0.1, y=0.7), Box(x_min=0.25, y_min=0.5, x_max=0.75, y_max=0.625))
    assert prefix + len(prompts.caption(CaptionLength.SHORT)) == 735
    assert prefix + len(prompts.query("cup", (), reasoning=False)) == 734 + n
    assert prefix + len(prompts.query("cup", (), reasoning=True)) == 734 + n
    assert prefix + len(prompts.detect("cup")) == 735 + spaced
    assert prefix + len(prompts.point("cup", refs)) == 734 + spaced + 5
    assert prefix + len(prompts.segment("cup", refs)) == 734 + n + 5


def test_a_conversation_of_moondream2(moondream2):
    """Each turn is a whole query and its answer, without EOS; the last one is open."""
    history = (Turn(question=" cup", answer=" a\n"), Turn(question="cup", answer="b"))
    a, b = TOKENIZER.encode("a"), TOKENIZER.encode("b")
    query = (1, 15381, 2, *CUP)
    earlier = (*query, 3, 3, *a, *query, 3, 3, *b)
    chat = moondream2.query("cup", (), reasoning=False, history=history)
    assert ids(chat) == (*earlier, *query, 3, 3)
    thinking = moondream2.query("cup", (), reasoning=True, history=history)
    assert ids(thinking) == (*earlier, *query, 3, 4)


def test_the_system_speaks_in_the_first_question(moondream2):
    """Its text precedes the first question, with a blank line between."""
    short = TOKENIZER.encode("Be short.\n\ncup")
    alone = moondream2.query("cup", (), reasoning=False, system=" Be short.\n")
    assert ids(alone) == (1, 15381, 2, *short, 3, 3)
    turn = Turn(question="cup", answer="cup")
    later = moondream2.query("cup", (), reasoning=False, system="Be short.", history=(turn,))
    assert ids(later) == (1, 15381, 2, *short, 3, 3, *CUP, 1, 15381, 2, *CUP, 3, 3)


def test_references_belong_to_the_last_question(moondream2):
    """References in a conversation follow the prefix of its last question."""
    turn = Turn(question="cup", answer="cup")
    prompt = moondream2.query("cup", (Point(x=0.5, y=0.5),), reasoning=False, history=(turn,))
    assert ids(prompt)[-(4 + len(CUP)) - 3 :] == (1, 15381, 2, 5, 5, *CUP, 3, 3)
    assert ids(prompt).count(5) == 2


def test_an_empty_question_is_refused(moondream2):
    """The error names the messages."""
    empty = Turn(question=" ", answer="a")
    for history, shows_image in [
        ((empty,), False),
        ((Turn(question="cup", answer="a"), empty), True),
    ]:
        with pytest.raises(InvalidField) as caught:
            moondream2.query("cup", (), reasoning=False, history=history, shows_image=shows_image)
        assert caught.value.metadata["field"] == "messages"


def test_an_answer_may_be_empty(moondream2):
    """It takes no positions in the prompt."""
    prompt = moondream2.query(
        "cup", (), reasoning=False, history=(Turn(question="cup", answer=" "),)
    )
    assert ids(prompt) == (1, 15381, 2, *CUP, 3, 3) * 2


def test_an_image_without_text_asks_for_a_caption(moondream2):
    """It takes the prompt of a caption, first in the conversation; text of the system is text."""
    caption = ids(moondream2.caption(CaptionLength.NORMAL))
    alone = moondream2.query(" ", (), reasoning=False, shows_image=True)
    assert ids(alone) == caption
    turn = Turn(question="", answer="cup")
    later = moondream2.query("cup", (), reasoning=True, history=(turn,), shows_image=True)
    assert ids(later) == (*caption, *CUP, 1, 15381, 2, *CUP, 3, 4)
    told = moondream2.query("", (), reasoning=False, system="cup", shows_image=True)
    assert ids(told) == (1, 15381, 2, *CUP, 3, 3)
    for more in ({"reasoning": True}, {"reasoning": False, "refs": (Point(x=0.5, y=0.5),)}):
        with pytest.raises(InvalidField, match="need a question"):
            moondream2.query("", **{"refs": (), "shows_image": True, **more})


def test_a_gaze_is_a_point_with_an_eye(moondream2):
    """A gaze is a point at "gaze" with the eye as reference."""
    prompt = moondream2.point("gaze", (Point(x=0.25, y=0.125),))
    gaze = [PromptToken(token_id) for token_id in TOKENIZER.encode(" gaze")]
    assert prompt[3:] == (
        PromptToken(5, (0.25, 0.0)),
        PromptToken(5, (0.125, 0.0)),
        *gaze,
        PromptToken(3),
    )


def test_moondream2_cannot_segment(moondream2):
    """A skill without template is unsupported, by name."""
    with pytest.raises(TaskUnsupported, match="segment"):
        moondream2.segment("cup", ())


def test_references_stand_before_the_text():
    """A point is two coords, a box centre and size, exact, right after the prefix."""
    prompts = Prompts(tiny_random_config(), TOKENIZER)
    refs = (Point(x=0.1, y=0.7), Box(x_min=0.25, y_min=0.5, x_max=0.75, y_max=0.625))
    prompt = prompts.segment("cup", refs)
    assert prompt[3:8] == (
        PromptToken(5, (0.1, 0.0)),
        PromptToken(5, (0.7, 0.0)),
        PromptToken(5, (0.5, 0.0)),
        PromptToken(5, (0.5625, 0.0)),
        PromptToken(6, (0.5, 0.125)),
    )
    assert ids(prompt)[8:] == (*CUP, 3)


@pytest.mark.parametrize(
    "ref",
    [
        Point(x=-0.1, y=0.5),
        Point(x=0.5, y=1.5),
        Point(x=math.nan, y=0.5),
        Point(x=math.inf, y=0.5),
        Box(x_min=0.5, y_min=0.1, x_max=0.4, y_max=0.2),
        Box(x_min=0.1, y_min=0.3, x_max=0.4, y_max=0.2),
        Box(x_min=0.1, y_min=0.1, x_max=1.4, y_max=0.2),
    ],
)
def test_references_outside_the_image_are_refused(moondream2, ref):
    """Values are finite, within 0..1, and ordered."""
    with pytest.raises(InvalidField) as caught:
        moondream2.query("cup", (ref,), reasoning=False)
    assert caught.value.metadata["field"] == "spatial_refs"


@pytest.mark.parametrize("empty", ["", "  \n"])
def test_empty_text_is_refused(moondream2, empty):
    """Whitespace as question or object is an error."""
    with pytest.raises(InvalidField) as caught:
        moondream2.query(empty, (), reasoning=False)
    assert caught.value.metadata["field"] == "question"
    with pytest.raises(InvalidField) as caught:
        moondream2.detect(empty)
    assert caught.value.metadata["field"] == "object"
