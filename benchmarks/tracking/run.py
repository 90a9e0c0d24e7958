"""`python -m benchmarks tracking`: needs motmetrics; `trackers` for the libraries' trackers."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from legato_service.tracking import Tracker, TrackIds

from benchmarks import record
from benchmarks.tracking import scoring
from benchmarks.tracking.clips import LOADS, MOTIONS, Frame, Load, Motion, clip
from benchmarks.tracking.contenders import contender, follower, installed

FPS = 30
MISSED, EXTRA = 0.1, 0.02
SWINGS = MOTIONS[0]
AHEAD = (0.1, 10 / 30, 20 / 30)  # seconds; whole frames
COSTS = (1, 5, 20, 50, 150)  # objects


def main(argv: Sequence[str]) -> int:
    """Compare the trackers that are installed on all clips, and record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tracking", description=__doc__)
    parser.add_argument("--clips", type=int, default=4, help="of each kind; default %(default)d")
    parser.add_argument("--seconds", type=float, default=20, help="of a clip; default %(default)g")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("motmetrics") is None:
        parser.error('needs motmetrics: pip install -e ".[trackers]"')
    clips = {
        motion: [
            clip(motion, seed, arguments.seconds, FPS, MISSED, EXTRA)
            for seed in range(arguments.clips)
        ]
        for motion in MOTIONS
    }
    names = installed()
    who = [
        {"motion": motion.name, "load": load.name, **_identities(clips[motion], load, names)}
        for motion in MOTIONS
        for load in LOADS
    ]
    where = _places(clips[SWINGS])
    costs = {count: _cost_us(count) for count in COSTS}
    figures = {"identities": who, "places": where, "cost_us": costs}
    record.write("tracking", "Tracks of generated clips", figures, _tables(figures, names, clips))
    return 0


def _identities(clips: list[list[Frame]], load: Load, names: list[str]) -> dict[str, Any]:
    answered = [load.answered(frames, seed) for seed, frames in enumerate(clips)]
    fps = FPS * sum(map(len, answered)) / sum(map(len, clips))
    scores = {}
    for name in names:
        with contender(name):
            followed = []
            for frames in answered:
                following = follower(name, fps)
                followed.append([(frame, following.observe(frame)) for frame in frames])
        scores[name] = scoring.identities(followed)
    return {"answered_a_second": fps, "scores": scores}


def _places(clips: list[list[Frame]]) -> list[dict[str, Any]]:
    """Frames every `ahead` seconds, answered so late."""
    rows = []
    for ahead in AHEAD:
        for name in ("ours", "ours, velocity"):
            with contender(name):
                every = round(ahead * FPS)
                each = [scoring.extrapolated(c[::every], c, every / FPS) for c in clips]
            means = {key: float(np.mean([one[key] for one in each])) for key in each[0]}
            rows.append({"ahead_s": ahead, "filter": name, **means})
    return rows


def _cost_us(count: int) -> float:
    """CPU time of a frame with so many objects that move, in microseconds; the median of 60."""
    rng = np.random.default_rng(0)
    boxes_DA = rng.uniform([0, 0, 0.03, 0.03], [1, 1, 0.1, 0.1], (count, 4))
    speed_DA = rng.normal(size=(count, 4)) * [0.2, 0.2, 0, 0]
    tracker, times = Tracker(TrackIds(512), 2.0), []
    for k in range(60):
        began = time.process_time_ns()
        tracker.observe(k, k / FPS, boxes_DA + speed_DA * k / FPS)
        times.append((time.process_time_ns() - began) / 1000)
    return float(np.median(times))


def _tables(
    figures: dict[str, Any], names: list[str], clips: dict[Motion, list[list[Frame]]]
) -> list[str]:
    shown = [name for name in names if name != "ours, scipy"]  # in the JSON file
    who = [
        [row["motion"], row["load"], *(_score(row["scores"][name]) for name in shown)]
        for row in figures["identities"]
    ]
    where = [
        [
            f"{1000 * row['ahead_s']:.0f} ms",
            row["filter"],
            f"{row['as_found']:.3f}",
            f"{row['extrapolated']:.3f}",
            f"{row['deviation']:.1%}",
        ]
        for row in figures["places"]
    ]
    costs = [[count, f"{us:.0f}"] for count, us in figures["cost_us"].items()]
    num_frames = sum(len(frames) for each in clips.values() for frames in each)
    note = (
        f"{num_frames} frames at {FPS} a second. Of the objects that can be seen, {MISSED:.0%} are "
        f"not found in a frame, and {EXTRA} boxes a frame are of nothing. "
        "Cells: MOTA / IDF1 / switches."
    )
    heads = ("filter", "IoU as found", "IoU extrapolated", "centres within two deviations")
    return [
        note,
        "",
        record.table(("clips", "frames", *shown), who),
        "",
        f"Frames of {SWINGS.name}, answered when the next one is taken:",
        "",
        record.table(("after", *heads), where),
        "",
        record.table(("objects", "CPU of a frame, us"), costs),
    ]


def _score(score: dict[str, float]) -> str:
    return f"{score['mota']:.3f} / {score['idf1']:.3f} / {score['num_switches']:.0f}"
