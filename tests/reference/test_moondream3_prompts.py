"""The reference's prompts."""

import pytest

from tests.reference.cases import CONFIG, NAME
from tests.reference.moondream3 import full, prompts
from tests.reference.moondream3.prompts import Coord, Size

IDS = CONFIG.ids


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
