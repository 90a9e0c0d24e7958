"""A task of each skill, with texts that need quotes."""

from __future__ import annotations

from legato_client import (
    Box,
    CaptionTask,
    DetectTask,
    Message,
    Point,
    PointTask,
    QueryTask,
    Sampling,
    SegmentTask,
    Task,
)

QUOTES = "a \"quoted\" 'text' with \\n, $HOME, `date`, $(date), %d\nand 日本語 in {two} lines"
TASKS: list[Task] = [
    DetectTask("dog"),
    DetectTask(QUOTES, max_objects=2, sampling=Sampling(temperature=0.7, seed=3)),
    DetectTask("cup", min_confidence=0.35, order="confidence"),
    PointTask("cup", min_confidence=0.9, order="confidence"),
    PointTask("gaze", spatial_refs=(Point(0.25, 0.125),)),
    SegmentTask("tree", spatial_refs=(Box(0.1, 0.2, 0.3, 0.4), Point(0.5, 0.6))),
    CaptionTask("short", Sampling(max_tokens=5, top_p=0.9, top_k=4, stop=("dog", "$HOME `x` \\n"))),
    QueryTask("What is this?", reasoning=True, task_id="what"),
    QueryTask(
        messages=(
            Message("system", "Be brief."),
            Message("user", QUOTES),
            Message("assistant", "Two."),
            Message("user", "Why?"),
        )
    ),
]
