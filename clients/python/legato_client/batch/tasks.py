"""Tasks by name: "detect:cup", "caption", "query:What is this?"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import get_args

from legato_client._values.tasks import (
    CaptionLength,
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    Sampling,
    SegmentTask,
    Task,
)

MAX_TASKS = 32
"""As many as RunTasks takes."""

_DEFAULTS = Sampling()
_LENGTHS: tuple[CaptionLength, ...] = get_args(CaptionLength)


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What holds for all tasks of a run, as far as their skills have it."""

    sampling: Sampling = _DEFAULTS
    max_objects: int | None = None
    min_confidence: float | None = None


def parse(name: str, wanted: Wanted) -> Task:
    """Raises ValueError for a skill that does not exist, and for a text that it cannot have."""
    skill, _, text = name.partition(":")
    make = _SKILLS.get(skill)
    if make is None:
        raise ValueError(f"a task is one of {', '.join(_SKILLS)}, not {skill!r}")
    return make(text.strip(), wanted)


def parse_all(names: Sequence[str], wanted: Wanted) -> dict[str, Task]:
    """The tasks in their order; ValueError where two are the same, or there are too many."""
    tasks = {name: parse(name, wanted) for name in names}
    if len(tasks) < len(names):
        raise ValueError("two tasks are the same")
    if len(tasks) > MAX_TASKS:
        raise ValueError(f"at most {MAX_TASKS} tasks, not {len(tasks)}")
    return tasks


def object_of(task: Task) -> str | None:
    """What a task that gives boxes looks for."""
    return task.object if isinstance(task, DetectTask | SegmentTask) else None


def _caption(text: str, wanted: Wanted) -> Task:
    length = next((each for each in _LENGTHS if each == (text or "normal")), None)
    if length is None:
        raise ValueError(f"a caption is one of {', '.join(_LENGTHS)}, not {text!r}")
    return CaptionTask(length, wanted.sampling)


def _detect(text: str, wanted: Wanted) -> Task:
    most, least = wanted.max_objects, wanted.min_confidence
    return DetectTask(text, most, wanted.sampling, min_confidence=least)


def _point(text: str, wanted: Wanted) -> Task:
    most, least = wanted.max_objects, wanted.min_confidence
    return PointTask(text, most, sampling=wanted.sampling, min_confidence=least)


def _with_text(skill: str, make: Callable[[str, Wanted], Task]) -> Callable[[str, Wanted], Task]:
    def checked(text: str, wanted: Wanted) -> Task:
        if not text:
            raise ValueError(f"{skill} needs a text: {skill}:TEXT")
        return make(text, wanted)

    return checked


_SKILLS: dict[str, Callable[[str, Wanted], Task]] = {
    "detect": _with_text("detect", _detect),
    "point": _with_text("point", _point),
    "segment": _with_text(
        "segment", lambda text, wanted: SegmentTask(text, sampling=wanted.sampling)
    ),
    "caption": _caption,
    "query": _with_text("query", lambda text, wanted: QueryTask(text, sampling=wanted.sampling)),
}
