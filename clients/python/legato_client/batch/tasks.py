"""Tasks by name: "detect:cup", "caption", "query:What is this?"."""

from __future__ import annotations

import functools
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

_LENGTHS: tuple[CaptionLength, ...] = get_args(CaptionLength)


def parse(name: str, sampling: Sampling, max_objects: int | None) -> Task:
    """Raises ValueError for a skill that does not exist, and for a text that it cannot have."""
    skill, _, text = name.partition(":")
    make = _SKILLS.get(skill)
    if make is None:
        raise ValueError(f"a task is one of {', '.join(_SKILLS)}, not {skill!r}")
    return make(text.strip(), sampling, max_objects)


def parse_all(names: Sequence[str], sampling: Sampling, max_objects: int | None) -> dict[str, Task]:
    """The tasks in their order; ValueError where two are the same, or there are too many."""
    tasks = {name: parse(name, sampling, max_objects) for name in names}
    if len(tasks) < len(names):
        raise ValueError("two tasks are the same")
    if len(tasks) > MAX_TASKS:
        raise ValueError(f"at most {MAX_TASKS} tasks, not {len(tasks)}")
    return tasks


def object_of(task: Task) -> str | None:
    """What a task that gives boxes looks for."""
    return task.object if isinstance(task, DetectTask | SegmentTask) else None


def _caption(text: str, sampling: Sampling, max_objects: int | None) -> Task:
    length = next((each for each in _LENGTHS if each == (text or "normal")), None)
    if length is None:
        raise ValueError(f"a caption is one of {', '.join(_LENGTHS)}, not {text!r}")
    return CaptionTask(length, sampling)


def _with_text(
    skill: str, make: Callable[[str, Sampling, int | None], Task]
) -> Callable[[str, Sampling, int | None], Task]:
    @functools.wraps(make)
    def checked(text: str, sampling: Sampling, max_objects: int | None) -> Task:
        if not text:
            raise ValueError(f"{skill} needs a text: {skill}:TEXT")
        return make(text, sampling, max_objects)

    return checked


_SKILLS: dict[str, Callable[[str, Sampling, int | None], Task]] = {
    "detect": _with_text("detect", lambda text, sampling, most: DetectTask(text, most, sampling)),
    "point": _with_text(
        "point", lambda text, sampling, most: PointTask(text, most, sampling=sampling)
    ),
    "segment": _with_text(
        "segment", lambda text, sampling, _: SegmentTask(text, sampling=sampling)
    ),
    "caption": _caption,
    "query": _with_text("query", lambda text, sampling, _: QueryTask(text, sampling=sampling)),
}
