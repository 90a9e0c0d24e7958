"""MOTA and IDF1 by motmetrics, and how well extrapolated boxes fit."""

from __future__ import annotations

from typing import Any

import numpy as np
from legato_service.tracking import Tracker, TrackIds

from benchmarks.tracking.clips import Array, Frame

FOUND = 0.5  # the least IoU of a box with the object that it is taken for


def identities(clips: list[list[tuple[Frame, list[str]]]]) -> dict[str, float]:
    """Over the answered frames of all clips; objects that cannot be seen do not count."""
    import motmetrics

    accumulators = []
    for clip in clips:
        accumulator = motmetrics.MOTAccumulator(auto_id=True)
        numbers: dict[str, int] = {}  # it takes no other names
        for frame, names in sorted(clip, key=lambda each: each[0].sequence):
            kept = [index for index, name in enumerate(names) if name]
            distance = _distance(list(frame.truth.values()), frame.found_DA[kept])
            shown = [numbers.setdefault(names[index], len(numbers)) for index in kept]
            accumulator.update(list(frame.truth), shown, distance)
        accumulators.append(accumulator)
    wanted = ["mota", "idf1", "num_switches"]
    host: Any = motmetrics.metrics.create()
    sums = host.compute_many(accumulators, metrics=wanted, generate_overall=True).loc["OVERALL"]
    return {name: float(sums[name]) for name in wanted}


def extrapolated(frames: list[Frame], clip: list[Frame], ahead: float) -> dict[str, float]:
    """Mean IoU of boxes with where their objects are `ahead` seconds after, by the own filter.

    `deviation` is the share of centres within two standard deviations. The first three frames do
    not count.
    """
    tracker = Tracker(TrackIds(512), 2.0)
    by_time = {round(frame.time, 4): frame for frame in clip}
    as_found, expected, inside = [], [], []
    for number, frame in enumerate(frames):
        found = tracker.observe(frame.sequence, frame.time, frame.found_DA)
        later = by_time.get(round(frame.time + ahead, 4))
        if later is None or number < 3:
            continue
        for thing, box_A in frame.truth.items():
            index = _nearest(box_A, frame.found_DA)
            tracked = None if index is None else found[index]
            if index is None or tracked is None or thing not in later.truth:
                continue
            steps = np.array([1, ahead, ahead**2 / 2])
            expected_A = tracked.state.mean_AK @ steps
            deviation_A = np.sqrt((tracked.state.deviations() ** 2) @ steps**2)
            truth_A = later.truth[thing]
            as_found.append(float(overlaps([truth_A], frame.found_DA[[index]])[0, 0]))
            expected.append(float(overlaps([truth_A], expected_A[None])[0, 0]))
            inside += (np.abs(expected_A - truth_A) <= 2 * deviation_A)[:2].tolist()
    return {
        "as_found": float(np.mean(as_found)),
        "extrapolated": float(np.mean(expected)),
        "deviation": float(np.mean(inside)),
    }


def overlaps(one: list[Array], other_DA: Array) -> Array:
    """Compute the IoU of each with each."""
    one_TA = np.array(one).reshape(-1, 4)
    reach = (one_TA[:, None, 2:] + other_DA[None, :, 2:]) / 2
    apart = np.abs(one_TA[:, None, :2] - other_DA[None, :, :2])
    inner = np.minimum(np.minimum(one_TA[:, None, 2:], other_DA[None, :, 2:]), reach - apart)
    shared = np.prod(np.maximum(inner, 0), axis=-1)
    area_T, area_D = np.prod(one_TA[:, 2:], axis=-1), np.prod(other_DA[:, 2:], axis=-1)
    overlap: Array = shared / (area_T[:, None] + area_D[None] - shared)
    return overlap


def _nearest(box_A: Array, found_DA: Array) -> int | None:
    overlap_D = overlaps([box_A], found_DA)[0]
    return int(np.argmax(overlap_D)) if overlap_D.max(initial=0) >= FOUND else None


def _distance(truth: list[Array], found_DA: Array) -> Array:
    """1 - IoU; not a number where a box is none of the object."""
    overlap = overlaps(truth, found_DA)
    distance: Array = np.where(overlap >= FOUND, 1 - overlap, np.nan)
    return distance
