"""Tasks by name."""

from __future__ import annotations

import pytest
from legato_client import CaptionTask, DetectTask, PointTask, QueryTask, Sampling, SegmentTask
from legato_client.batch.tasks import parse, parse_all

COLD = Sampling(temperature=0)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("detect:red cup", DetectTask("red cup", 3, COLD, min_confidence=0.5)),
        ("point: nose", PointTask("nose", 3, sampling=COLD, min_confidence=0.5)),
        ("segment:a:b", SegmentTask("a:b", sampling=COLD)),
        ("caption", CaptionTask("normal", COLD)),
        ("caption:long", CaptionTask("long", COLD)),
        ("query:What?", QueryTask("What?", sampling=COLD)),
    ],
)
def test_names(name, task):
    """The skill, a colon, and its text; what the text may hold is not restricted."""
    assert parse(name, COLD, 3, 0.5) == task


@pytest.mark.parametrize("name", ["detect", "detect:", "query: ", "caption:huge", "find:cup", ""])
def test_mistakes(name):
    """A skill that does not exist, or whose text is missing or wrong."""
    with pytest.raises(ValueError, match=r"task|text|caption"):
        parse(name, COLD, None)


def test_lists():
    """Each task once, in their order, and no more than a request may have."""
    assert list(parse_all(["caption", "detect:b", "detect:a"], COLD, None)) == [
        "caption", "detect:b", "detect:a",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="same"):
        parse_all(["caption", "caption"], COLD, None)
    with pytest.raises(ValueError, match="at most 32"):
        parse_all([f"detect:{n}" for n in range(33)], COLD, None)
