"""The cases of both sides: every skill of Moondream 2, on images of many sizes and on none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from legato_engine.types import (
    CaptionLength,
    CaptionSpec,
    DetectSpec,
    ImageBox,
    ImagePoint,
    PointSpec,
    QuerySpec,
    SpatialRef,
    TaskSpec,
)

Size = tuple[int, int]  # width, height

# Every possible tiling, images with a side below a crop, and very thin ones.
SIZES: tuple[Size, ...] = (
    (378, 378),
    (640, 480),
    (480, 640),
    (1024, 768),
    (850, 600),
    (100, 50),
    (379, 379),
    (512, 512),
    (720, 1280),
    (3000, 1000),
    (1024, 1024),
    (800, 600),
    (1280, 720),
    (1500, 2000),
    (5000, 400),
    (380, 2000),
    (33, 777),
    (637, 641),
    (1920, 1080),
    (401, 999),
    (17, 19),
    (1333, 500),
)
LENGTHS = tuple(CaptionLength)
QUESTIONS = (
    "What is in this picture?",
    "How many people are there, and what do they wear?",
    "Is it day or night?",
    "Which of the two bicycles stands closer to the blue door on the left?",
    "Why?",
)
OBJECTS = ("bicycle", "door handle", "person with a hat")
REFS: tuple[tuple[SpatialRef, ...], ...] = (
    (ImagePoint(x=0.3, y=0.725),),
    (ImageBox(x_min=0.1, y_min=0.2, x_max=0.55, y_max=0.9),),
    (
        ImagePoint(x=0.015, y=0.99),
        ImageBox(x_min=0.0, y_min=0.0, x_max=1.0, y_max=1.0),
        ImagePoint(x=0.5, y=0.5),
    ),
)
MAX_OBJECTS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One case; `size` None: no image."""

    skill: str
    task: TaskSpec
    size: Size | None


def cases(family: str, sizes: Sequence[Size]) -> list[Case]:
    """Return the cases of a family, ordered by image."""
    kinds = {"text": _text, "spatial": _spatial}
    ask = kinds.get(family, _reasoning)
    about = [case for at, size in enumerate(sizes) for case in ask(at, size)]
    if family == "spatial":
        return about
    reasoning = family != "text"
    skill = "reasoning without an image" if reasoning else "query without an image"
    alone = [
        Case(skill, QuerySpec(question=f"{question} Say {number}.", reasoning=reasoning), None)
        for number in range(max(1, len(sizes) // 3))
        for question in QUESTIONS
    ]
    return about + alone


def _text(at: int, size: Size) -> list[Case]:
    questions = [QUESTIONS[(at + shift) % len(QUESTIONS)] for shift in range(2)]
    refs = QuerySpec(question=QUESTIONS[at % len(QUESTIONS)], spatial_refs=REFS[at % len(REFS)])
    return [
        *(Case(f"caption {length.value}", CaptionSpec(length=length), size) for length in LENGTHS),
        *(Case("query", QuerySpec(question=question), size) for question in questions),
        Case("query with references", refs, size),
    ]


def _reasoning(at: int, size: Size) -> list[Case]:
    question = QUESTIONS[at % len(QUESTIONS)]
    refs = REFS[at % len(REFS)]
    return [
        Case("reasoning", QuerySpec(question=question, reasoning=True), size),
        Case(
            "reasoning with references",
            QuerySpec(question=question, reasoning=True, spatial_refs=refs),
            size,
        ),
    ]


def _spatial(at: int, size: Size) -> list[Case]:
    names = [OBJECTS[(at + shift) % len(OBJECTS)] for shift in range(2)]
    return [
        *(Case("detect", DetectSpec(object=name, max_objects=MAX_OBJECTS), size) for name in names),
        *(Case("point", PointSpec(object=name, max_objects=MAX_OBJECTS), size) for name in names),
    ]
