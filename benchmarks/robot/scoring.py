"""Cameras' answers and tracks against the clip's truth: overlap, identity, place in 3D, age.

A thing counts while at least `scene.VISIBLE` of it can be seen. A box is held against the things
of its noun; a counted thing without a box has an overlap of 0 and no place.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from legato_client import Box, Detection, TrackNow
from legato_client.depth import lift
from legato_service.tracking import assign

from benchmarks import tracking
from benchmarks.lift import INTRINSICS, Array
from benchmarks.robot.drive import Answer, Outage, ShownCamera
from benchmarks.robot.scene import FPS, NOUNS, THINGS, Clip
from benchmarks.tracking import FOUND, identities, overlaps

OF_NOUN = {noun: [i for i, each in enumerate(THINGS) if each.noun == noun] for noun in NOUNS}
NEAR = 0.1  # metres
MEASURES = ("captured", "arrival", "arrival_expected", "any_moment", "any_moment_expected")


@dataclasses.dataclass
class Scores:
    """Overlaps by measure, errors in metres, and how many counted things had no place."""

    overlaps: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in MEASURES}
    )
    errors: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {"answer": [], "now": []}
    )
    without: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def figures(clip: Clip, cameras: Sequence[ShownCamera]) -> dict[str, Any]:
    """Compute the figures of a run; times are in seconds, lengths in metres."""
    scores = Scores()
    for camera in cameras:
        for answer in camera.answers:
            _add_answer(scores, clip, answer)
        _add_looks(scores, clip, camera)
    totals = [camera.counters.totals() for camera in cameras]
    dropped: collections.Counter[str] = collections.Counter()
    for each in totals:
        dropped.update(each.dropped)
    ages = [each.arrived - each.captured for camera in cameras for each in camera.answers]
    seconds = sum(len(camera.looks) for camera in cameras) / len(cameras) / FPS
    return {
        "cameras": len(cameras),
        "seconds": seconds,
        "offered": sum(each.taken for each in totals),
        "answered": sum(each.answered for each in totals),
        "replaced": sum(each.replaced + each.refused for each in totals),
        "dropped": dict(dropped),
        "lost": sum(each.lost for each in totals),
        "failed_tasks": sum(each.failed_tasks for each in totals),
        "age_s": _quantiles(ages),
        "iou": {name: _mean(values) for name, values in scores.overlaps.items()},
        "found": {
            name: _mean([v >= FOUND for v in each]) for name, each in scores.overlaps.items()
        },
        "error_m": {name: _quantiles(values) for name, values in scores.errors.items()},
        "placed": {
            name: _placed(values, scores.without[name]) for name, values in scores.errors.items()
        },
        "identities": _identities(clip, cameras),
    }


# ---------------------------------------------------------------- overlaps and places


def axes(box: Box) -> Array:
    """Return centre x, centre y, width and height."""
    low, high = np.array([box.x_min, box.y_min]), np.array([box.x_max, box.y_max])
    return np.concatenate([(low + high) / 2, high - low])


def _matched(
    things: Sequence[int], truth: dict[int, Array], found: Sequence[Detection | TrackNow]
) -> dict[int, tuple[int, float]]:
    """Return the index of each thing's box, and their overlap, so that the sum is great."""
    if not things or not found:
        return {}
    overlap = overlaps([truth[each] for each in things], np.array([axes(f.box) for f in found]))
    return {things[i]: (j, float(overlap[i, j])) for i, j in assign(overlap)}


Found = Mapping[str, Sequence[Detection | TrackNow]]
"""Boxes by noun."""


def _fit(
    counted: Iterable[int], truth: dict[int, Array], found: Found
) -> Iterator[tuple[int, Detection | TrackNow | None, float]]:
    """Yield each counted thing with its box, if any, and the overlap."""
    counted = set(counted)
    for noun, things in OF_NOUN.items():
        # Hidden ones take part, so that a box of one is not taken for that of a counted one.
        pairs = _matched(things, truth, found.get(noun, ()))
        for thing in counted.intersection(things):
            index, overlap = pairs.get(thing, (None, 0.0))
            yield thing, None if index is None else found[noun][index], overlap


def _by_noun(tracks: Iterable[TrackNow]) -> Found:
    found: dict[str, list[TrackNow]] = {}
    for each in tracks:
        found.setdefault(each.task_id, []).append(each)
    return found


def _add_answer(scores: Scores, clip: Clip, answer: Answer) -> None:
    then, arrived = clip.shot(answer.number), clip.shot(math.floor(answer.arrived * FPS))
    found = answer.found
    fits = list(_fit(then.counted(), clip.boxes(answer.captured), found))
    scores.overlaps["captured"] += [overlap for _, _, overlap in fits]
    _add_places(scores, "answer", fits, then)
    still = [each for each in then.counted() if each in arrived.counted()]
    now = clip.boxes(answer.arrived)
    for name, boxes in (("arrival", found), ("arrival_expected", _by_noun(answer.tracks))):
        scores.overlaps[name] += [overlap for _, _, overlap in _fit(still, now, boxes)]


def _add_looks(scores: Scores, clip: Clip, camera: ShownCamera) -> None:
    """Ask at each frame, from the first answer to the camera's end, where all things are."""
    answers = sorted(camera.answers, key=lambda each: each.arrived)
    newest, index = None, 0
    for look in camera.looks:
        while index < len(answers) and answers[index].arrived <= look.number / FPS:
            if newest is None or answers[index].number > newest.number:
                newest = answers[index]
            index += 1
        if newest is None:
            continue
        shot, truth = clip.shot(look.number), clip.boxes(look.number / FPS)
        fits = list(_fit(shot.counted(), truth, _by_noun(look.tracks)))
        scores.overlaps["any_moment_expected"] += [overlap for _, _, overlap in fits]
        held = _fit(shot.counted(), truth, newest.found)
        scores.overlaps["any_moment"] += [overlap for _, _, overlap in held]
        _add_places(scores, "now", fits, shot)


def _add_places(
    scores: Scores, name: str, fits: list[tuple[int, Detection | TrackNow | None, float]], shot: Any
) -> None:
    marks = [(thing, mark) for thing, mark, _ in fits if mark is not None]
    scores.without[name] += len(fits) - len(marks)
    lifted = lift([mark for _, mark in marks], shot.depth, INTRINSICS)
    for (thing, _), each in zip(marks, lifted, strict=True):
        if each.center is None:
            scores.without[name] += 1
        else:
            scores.errors[name].append(math.dist(each.center, shot.surfaces[thing]))


# ---------------------------------------------------------------- identities


def _identities(clip: Clip, cameras: Sequence[ShownCamera]) -> dict[str, float] | None:
    """Return MOTA, IDF1 and switches over the answered frames; None without motmetrics."""
    if importlib.util.find_spec("motmetrics") is None:
        return None
    return identities(
        [
            [_observed(clip, answer, noun) for answer in camera.answers]
            for camera in cameras
            for noun in NOUNS
        ]
    )


def _observed(clip: Clip, answer: Answer, noun: str) -> tuple[tracking.Frame, list[str]]:
    """Return the counted things and the boxes; those of things that do not count are left out."""
    truth, found = clip.boxes(answer.captured), answer.found.get(noun, ())
    counted = [each for each in clip.shot(answer.number).counted() if each in OF_NOUN[noun]]
    pairs = _matched(OF_NOUN[noun], truth, found)
    hidden = {
        index for thing, (index, fit) in pairs.items() if thing not in counted and fit >= FOUND
    }
    kept = [each for index, each in enumerate(found) if index not in hidden]
    boxes = np.array([axes(each.box) for each in kept]).reshape(-1, 4)
    shown = {thing: truth[thing] for thing in counted}
    frame = tracking.Frame(answer.number, answer.captured, shown, boxes)
    return frame, [each.track_id for each in kept]


def outage(clip: Clip, camera: ShownCamera, each: Outage) -> dict[str, Any]:
    """Tell what a camera saw of a killed server; `kept` of `followed` things kept their track."""
    before = _names(clip, camera, -math.inf, each.killed)
    later = _names(clip, camera, each.killed, math.inf, first=True)
    after = {number: name for number, name in later.items() if number in before}
    blind = [
        look
        for look in camera.looks
        if each.killed <= look.number / FPS < each.answering and not look.tracks
    ]
    answered = {answer.number for answer in camera.answers}
    unanswered = [
        number
        for number in camera.offered
        if each.killed <= number / FPS <= each.answering and number not in answered
    ]
    return {
        "serving_s": each.serving - each.killed,
        "answering_s": each.answering - each.killed,
        "unanswered": len(unanswered),
        "without_tracks_s": len(blind) / FPS,
        "followed": len(after),
        "kept": sum(before[number] == name for number, name in after.items()),
    }


def _names(
    clip: Clip, camera: ShownCamera, begin: float, end: float, *, first: bool = False
) -> dict[int, str]:
    """Return each thing's last (or first) track among the answers about frames of a time."""
    names: dict[int, str] = {}
    for answer in camera.answers:
        if not begin < answer.captured <= end:
            continue
        counted = clip.shot(answer.number).counted()
        for thing, mark, overlap in _fit(counted, clip.boxes(answer.captured), answer.found):
            if overlap >= FOUND and isinstance(mark, Detection) and mark.track_id:
                if first:
                    names.setdefault(thing, mark.track_id)
                else:
                    names[thing] = mark.track_id
    return names


def _placed(errors: Sequence[float], without: int) -> float | None:
    """Return the fraction of the counted things that are placed within `NEAR`."""
    count = len(errors) + without
    return sum(each <= NEAR for each in errors) / count if count else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {name: float(np.percentile(values, at)) for name, at in (("p50", 50), ("p95", 95))}
