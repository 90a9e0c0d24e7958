"""The clip of the robot's benchmark, and how cameras are scored against it."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from legato_client import Box, BoxAxes, Detection, TrackNow
from legato_client.depth import lift
from legato_client.stream.frames import FrameCounters

from benchmarks.lift import HEIGHT, INTRINSICS, WIDTH
from benchmarks.robot import scoring
from benchmarks.robot.drive import Answer, Look, Outage
from benchmarks.robot.scene import FPS, NOUNS, PERIOD, THINGS, Clip, World

STAR, TRIANGLE = 2, 3
AGE = 3  # frames from capture to arrival


@pytest.fixture(scope="module")
def clip() -> Clip:
    """A few frames: the near ball and the star are free, the others partly behind the pillar."""
    return Clip(6 / FPS)


def box_of(axes: np.ndarray) -> Box:
    low, high = axes[:2] - axes[2:] / 2, axes[:2] + axes[2:] / 2
    return Box(*map(float, (*low, *high)))


# ---------------------------------------------------------------- the clip


def test_boxes_are_around_the_pixels(clip: Clip) -> None:
    """The truth of a thing that nothing hides is the box of its colour in the image."""
    for number in range(len(clip)):
        shot = clip.shot(number)
        pixels = shot.pixels.astype(int)
        yellow = (pixels[..., 0] > 150) & (pixels[..., 1] > 130) & (pixels[..., 2] < 60)
        rows, columns = (np.flatnonzero(yellow.any(axis=axis)) for axis in (1, 0))
        expected = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        box = box_of(clip.boxes(number / FPS)[STAR])
        edges = np.array([box.x_min, box.y_min, box.x_max, box.y_max]) * ([WIDTH, HEIGHT] * 2)
        assert shot.visible[STAR] > 0.97
        assert edges == pytest.approx(expected, abs=1.5)


def test_a_pillar_hides_things_in_part(clip: Clip) -> None:
    """Less of what is behind it can be seen, and the box is still that of the whole thing."""
    shot, boxes = clip.shot(0), clip.boxes(0.0)
    assert shot.visible[0] == pytest.approx(1, abs=0.02)
    assert 0.5 < shot.visible[1] < 0.8
    assert 0.5 < shot.visible[TRIANGLE] < 0.9
    ball = boxes[1][2:] * (WIDTH, HEIGHT)
    assert ball[0] == pytest.approx(ball[1], rel=0.05)


def test_places_are_those_of_the_measured_depth(clip: Clip) -> None:
    """A free thing's true box, lifted with noisy depth, lies on its true surface."""
    shot, boxes = clip.shot(0), clip.boxes(0.0)
    free = [0, STAR]
    marks = [Detection(box_of(boxes[number]), "") for number in free]
    for number, each in zip(free, lift(marks, shot.depth, INTRINSICS), strict=True):
        assert math.dist(each.center or (), shot.surfaces[number]) < 0.03


def test_the_clip_repeats() -> None:
    """Things and camera are where they were after a period, so that a loop has no cut."""
    world = World()
    moments = []
    for t in (0.3, 0.3 + PERIOD, 0.8):
        world.set_time(t)
        moments.append(np.array([world.edges(number) for number in range(len(THINGS))]))
    assert moments[0] == pytest.approx(moments[1], abs=1e-6)
    assert np.abs(moments[0] - moments[2]).max() > 5


# ---------------------------------------------------------------- scores


def detections(clip: Clip, number: int, names: Sequence[str]) -> dict[str, list[Detection]]:
    """Find all things exactly, and call them so."""
    boxes = clip.boxes(number / FPS)
    return {
        noun: [
            Detection(box_of(boxes[thing]), noun, track_id=names[thing])
            for thing in scoring.OF_NOUN[noun]
        ]
        for noun in NOUNS
    }


def tracks(found: dict[str, list[Detection]]) -> list[TrackNow]:
    still = BoxAxes(0.0, 0.0, 0.0, 0.0)
    return [
        TrackNow(BoxAxes(*scoring.axes(each.box)), still, 0.0, each, 1, noun)
        for noun, objects in found.items()
        for each in objects
    ]


def camera(clip: Clip, names: Callable[[int], Sequence[str]], late: int = AGE) -> Any:
    """Make a camera that answered each frame rightly, and predicted `late` frames too late."""
    counters = FrameCounters()
    answers, looks = [], []
    for number in range(len(clip)):
        counters.count("taken")
        counters.count_answered(AGE / FPS, 0)
        found = detections(clip, number, names(number))
        arrived = number + AGE
        expected = tracks(detections(clip, arrived - late, names(number)))
        answers.append(Answer(number, number / FPS, arrived / FPS, found, expected))
        looks.append(Look(number, tracks(found) if number >= AGE else []))
    offered = list(range(len(clip)))
    return types.SimpleNamespace(answers=answers, looks=looks, offered=offered, counters=counters)


def test_a_perfect_camera_has_perfect_scores(clip: Clip) -> None:
    """Exact boxes overlap wholly when taken; later as answered less than as predicted."""
    figures = scoring.figures(clip, [camera(clip, lambda _: "abcd", late=0)])
    assert figures["iou"]["captured"] == pytest.approx(1)
    assert figures["iou"]["arrival_expected"] == pytest.approx(1)
    assert figures["iou"]["arrival"] < 0.95
    assert figures["iou"]["any_moment"] < figures["iou"]["any_moment_expected"]
    assert figures["age_s"]["p50"] == pytest.approx(AGE / FPS)
    assert figures["answered"] == figures["offered"] == len(clip)
    assert figures["error_m"]["answer"]["p50"] < 0.03
    assert figures["placed"]["now"] == figures["placed"]["answer"] == 1


@pytest.mark.skipif(
    importlib.util.find_spec("motmetrics") is None, reason='needs the extra "trackers"'
)
def test_exchanged_names_are_switches(clip: Clip) -> None:
    """Names that stay are right, and two things that exchange theirs are noticed."""
    right = scoring.figures(clip, [camera(clip, lambda _: "abcd")])["identities"]
    assert (right["idf1"], right["num_switches"]) == (1, 0)
    exchanged = camera(clip, lambda number: "abcd" if number < 3 else "bacd")
    wrong = scoring.figures(clip, [exchanged])["identities"]
    assert wrong["num_switches"] == 2
    assert wrong["idf1"] < 1


def test_an_outage_is_told_by_what_the_camera_saw(clip: Clip) -> None:
    """Frames without answer, time without predictions, and who kept its track."""
    seen = camera(clip, lambda number: "abcd" if number < 3 else "abxd")
    del seen.answers[3]
    seen.looks = [dataclasses.replace(each, tracks=[]) for each in seen.looks]
    told = scoring.outage(clip, seen, Outage(2.5 / FPS, 3 / FPS, 4.5 / FPS))
    assert told["followed"] == told["kept"] + 1 >= 2
    assert told["unanswered"] == 1
    assert told["without_tracks_s"] == pytest.approx(2 / FPS)
    assert told["answering_s"] == pytest.approx(2 / FPS)
