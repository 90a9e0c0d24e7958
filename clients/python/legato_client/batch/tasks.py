"""Tasks by name: "detect:cup", "caption", "query:What is this?"."""

from __future__ import annotations

from collections.abc import Sequence
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

_SKILLS = ("detect", "point", "segment", "caption", "query")
_LENGTHS: tuple[CaptionLength, ...] = get_args(CaptionLength)


def parse(
    name: str, sampling: Sampling, max_objects: int | None, min_confidence: float | None = None
) -> Task:
    """Raises ValueError for a skill that does not exist, and for a text that it cannot have."""
    skill, _, text = name.partition(":")
    text = text.strip()
    if skill in _SKILLS and skill != "caption" and not text:
        raise ValueError(f"{skill} needs a text: {skill}:TEXT")
    match skill:
        case "detect":
            return DetectTask(text, max_objects, sampling, min_confidence=min_confidence)
        case "point":
            return PointTask(text, max_objects, sampling=sampling, min_confidence=min_confidence)
        case "segment":
            return SegmentTask(text, sampling=sampling)
        case "query":
            return QueryTask(text, sampling=sampling)
        case "caption":
            return CaptionTask(_length(text), sampling)
        case _:
            raise ValueError(f"a task is one of {', '.join(_SKILLS)}, not {skill!r}")


def parse_all(
    names: Sequence[str],
    sampling: Sampling,
    max_objects: int | None,
    min_confidence: float | None = None,
) -> dict[str, Task]:
    """The tasks in their order; ValueError where two are the same, or there are too many."""
    tasks = {name: parse(name, sampling, max_objects, min_confidence) for name in names}
    if len(tasks) < len(names):
        raise ValueError("two tasks are the same")
    if len(tasks) > MAX_TASKS:
        raise ValueError(f"at most {MAX_TASKS} tasks, not {len(tasks)}")
    return tasks


def object_of(task: Task) -> str | None:
    """What a task that gives boxes looks for."""
    return task.object if isinstance(task, DetectTask | SegmentTask) else None


def _length(text: str) -> CaptionLength:
    length = next((each for each in _LENGTHS if each == (text or "normal")), None)
    if length is None:
        raise ValueError(f"a caption is one of {', '.join(_LENGTHS)}, not {text!r}")
    return length
