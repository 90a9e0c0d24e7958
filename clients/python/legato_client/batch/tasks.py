"""Tasks by name: "detect:cup", "caption", "query:What is this?"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from legato_client._proto import skills
from legato_client._types.tasks import Sampling, Task

MAX_TASKS = 32
"""Limit of RunTasks."""


def parse(
    name: str, sampling: Sampling, max_objects: int | None, min_confidence: float | None = None
) -> Task:
    """Parse a task. Raises ValueError for an unknown skill, or an argument that it lacks."""
    word, _, text = name.partition(":")
    if word not in skills.BY_NAME:
        raise ValueError(f"a task is one of {', '.join(skills.BY_NAME)}, not {word!r}")
    limits: dict[str, Any] = {"max_objects": max_objects, "min_confidence": min_confidence}
    task: Task = skills.BY_NAME[word].make(text, sampling, **limits)
    return task


def parse_all(
    names: Sequence[str],
    sampling: Sampling,
    max_objects: int | None,
    min_confidence: float | None = None,
) -> dict[str, Task]:
    """Parse tasks in order. Raises ValueError for duplicates, or too many tasks."""
    tasks = {name: parse(name, sampling, max_objects, min_confidence) for name in names}
    if len(tasks) < len(names):
        raise ValueError("two tasks are the same")
    if len(tasks) > MAX_TASKS:
        raise ValueError(f"at most {MAX_TASKS} tasks, not {len(tasks)}")
    return tasks


def object_of(task: Task) -> str | None:
    """Return the noun of a task that gives boxes."""
    skill = skills.of(task)
    return getattr(task, skill.subject) if skill.places == "boxes" else None


def have_places(tasks: Iterable[Task]) -> bool:
    """Return whether all results have a place in the image."""
    return all(skills.of(task).places for task in tasks)


def usage(*, places: bool = False) -> str:
    """List the short forms of tasks; with `places` only those with places in the image."""
    return listed([skill.usage for skill in skills.SKILLS if skill.places or not places])


def names(*, boxes: bool = False) -> str:
    """Return the skills whose results lie in the image, or only those that give boxes."""
    kinds = ("boxes",) if boxes else ("boxes", "points")
    return listed([skill.name for skill in skills.SKILLS if skill.places in kinds])


def listed(words: Sequence[str]) -> str:
    """Join words with commas, and "or" before the last."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
