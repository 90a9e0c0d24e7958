"""Trackers on clips with known truth: which object is which, and where it is after a while.

`python -m benchmarks tracking` needs motmetrics; `trackers` for the libraries' trackers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from unittest import mock

import numpy as np
import numpy.typing as npt
from legato_service import tracking
from legato_service.tracking import Tracker, TrackIds

from benchmarks import record

# ---------------------------------------------------------------- clips
# Clips of things that move, cross, hide and are missed, as a model's boxes with known truth.
#
# No pictures: what a detector sees is drawn at random, so thousands of frames take no time.
# Boxes are arrays of centre x, centre y, width and height, in shares of the picture.


Array = npt.NDArray[np.float64]
Path = Callable[[float], Array]

HIDDEN = 0.5  # share of a thing behind another one from which it is not found
NOISE = 0.015  # deviation of a found edge's place, in sizes of the thing
ASPECT = 4 / 3


@dataclasses.dataclass(frozen=True)
class Frame:
    """What is in a picture, by the thing's number, and what the detector found."""

    sequence: int
    time: float
    truth: dict[int, Array]
    found_DA: Array


@dataclasses.dataclass(frozen=True)
class Motion:
    """A kind of clip: `things` gives the paths of one clip, in the order from far to near."""

    name: str
    things: Callable[[np.random.Generator], list[Path]]


def clip(
    motion: Motion, seed: int, seconds: float, fps: float, missed: float, extra: float
) -> list[Frame]:
    """Make a clip in which a fraction `missed` of visible things is not found.

    `extra` boxes a frame are of nothing.
    """
    rng = np.random.default_rng(seed)
    paths = motion.things(rng)
    frames = []
    for k in range(round(seconds * fps)):
        boxes = [path(k / fps) for path in paths]
        visible = {
            i: box
            for i, box in enumerate(boxes)
            if _inside(box) and _hidden(box, boxes[i + 1 :]) < HIDDEN
        }
        frames.append(Frame(k + 1, k / fps, visible, _found(visible, rng, missed, extra)))
    return frames


def _found(
    visible: dict[int, Array], rng: np.random.Generator, missed: float, extra: float
) -> Array:
    found = [
        box + rng.normal(size=4) * NOISE * np.tile(box[2:], 2)
        for box in visible.values()
        if rng.random() >= missed
    ]
    found += [rng.uniform([0, 0, 0.03, 0.03], [1, 1, 0.2, 0.2]) for _ in range(rng.poisson(extra))]
    rng.shuffle(found)
    return np.clip(np.array(found).reshape(-1, 4), 0, 1)


def _inside(box: Array) -> bool:
    return bool(np.all((box[:2] > 0) & (box[:2] < 1)))


def _hidden(box: Array, nearer: list[Array]) -> float:
    """Return the greatest fraction of the box behind one nearer box."""
    return max((_shared(box, each) / (box[2] * box[3]) for each in nearer), default=0.0)


def _shared(one: Array, other: Array) -> float:
    reach = (one[2:] + other[2:]) / 2 - np.abs(one[:2] - other[:2])
    inner = np.minimum(np.minimum(one[2:], other[2:]), reach)
    return float(np.prod(np.maximum(inner, 0)))


# ---------------------------------------------------------------- motions


def _swing(
    rng: np.random.Generator, middle: float, reach: float, period: tuple[float, float]
) -> Callable[[float], float]:
    length, phase = rng.uniform(*period), rng.uniform(0, 2 * math.pi)
    return lambda t: middle + reach * math.sin(2 * math.pi * t / length + phase)


def _lanes(rng: np.random.Generator) -> list[Path]:
    """Move the things of the robot's example, each in a lane of its own."""
    count = 4
    return [
        _path(
            _swing(rng, 0.5, 0.4, (5, 8)),
            _swing(rng, (lane + 0.5) / count, 0.01, (2, 4)),
            _swing(rng, 0.14, 0.014, (3, 6)),
        )
        for lane in range(count)
    ]


def _crossings(rng: np.random.Generator) -> list[Path]:
    """Things that swing across each other's ways, and hide each other."""
    return [
        _path(
            _swing(rng, 0.5, 0.4, (5, 8)),
            _swing(rng, rng.uniform(0.35, 0.65), 0.1, (4, 8)),
            _swing(rng, 0.15, 0.015, (3, 6)),
        )
        for _ in range(4)
    ]


def _crowd(rng: np.random.Generator) -> list[Path]:
    """Things that walk straight through the picture, come and leave, many alike."""
    return [_walk(rng) for _ in range(14)]


def _walk(rng: np.random.Generator) -> Path:
    start, speed = rng.uniform(-0.5, 1.5, 2), rng.normal(size=2) * [0.12, 0.04]
    width = rng.uniform(0.05, 0.08)
    size = np.array([width, width * ASPECT * 1.5])
    bend = _swing(rng, 0, 0.02, (2, 4))

    def at(t: float) -> Array:
        place = (start + speed * t + [0, bend(t)] + 0.5) % 2 - 0.5
        return np.concatenate([place, size])

    return at


def _dash(rng: np.random.Generator) -> list[Path]:
    """Small things that start and stop suddenly, as hands and tools do."""
    return [_dashing(rng) for _ in range(3)]


def _dashing(rng: np.random.Generator) -> Path:
    knots, now = [], 0.0
    place = rng.uniform(0.1, 0.9, 2)
    while now < 60:
        rest, way = rng.uniform(0.2, 1.0), rng.uniform(0.3, 0.7)
        goal = rng.uniform(0.1, 0.9, 2)
        knots += [(now, place), (now + rest, place)]
        now, place = now + rest + way, goal
    times = np.array([time for time, _ in knots])
    places = np.array([each for _, each in knots])
    size = rng.uniform(0.1, 0.16) * np.array([1, ASPECT])
    return lambda t: np.array([*(np.interp(t, times, places[:, i]) for i in (0, 1)), *size])


def _path(
    x: Callable[[float], float], y: Callable[[float], float], side: Callable[[float], float]
) -> Path:
    return lambda t: np.array([x(t), y(t), side(t), side(t) * ASPECT])


MOTIONS = (
    Motion("lanes", _lanes),
    Motion("crossings", _crossings),
    Motion("crowd", _crowd),
    Motion("dashes", _dash),
)


# ---------------------------------------------------------------- answered frames

# Which frames of a clip are answered, and in which order, by how busy the server is.


@dataclasses.dataclass(frozen=True)
class Load:
    """A server that takes `seconds` for a frame; the newest frame waits, the others are dropped.

    With several `in_flight` a frame takes `seconds` to twice that, at random, and they overtake.
    """

    name: str
    seconds: float
    in_flight: int = 1

    def answered(self, frames: list[Frame], seed: int) -> list[Frame]:
        """Return the frames that get results, in their order."""
        rng = np.random.default_rng(seed)
        free = [0.0] * self.in_flight  # when each place is free again
        waiting, ends = list(frames), []
        while waiting:
            place = int(np.argmin(free))
            now = max(free[place], waiting[0].time)
            newest = [frame for frame in waiting if frame.time <= now][-1]
            waiting = [frame for frame in waiting if frame.time > newest.time]
            factor = 1 if self.in_flight == 1 else rng.uniform(1, 2)
            free[place] = now + self.seconds * factor
            ends.append((free[place], newest))
        return [frame for _, frame in sorted(ends, key=lambda each: each[0])]


LOADS = (
    Load("30 a second", 0.001),
    Load("30 a second, out of order", 0.06, in_flight=8),
    Load("3 times too many", 0.1),
    Load("3 times too many, out of order", 0.2, in_flight=3),
    Load("10 times too many", 0.333),
    Load("20 times too many", 0.667),
)


# ---------------------------------------------------------------- contenders
# Trackers in the same words: a frame in, a name for each of its boxes out.


MAX_UNSEEN = 2.0  # seconds, for all
_PIXELS = 1000  # a side of the picture, for trackers that count in pixels
_FADING = 0.05  # seconds: an acceleration that fades at once is noise of the velocity


class Follower(Protocol):
    """Follows the objects of one clip."""

    def observe(self, frame: Frame) -> list[str]:
        """Names of the boxes; "" for none."""


class Ours:
    """The service's own."""

    def __init__(self) -> None:
        self._tracker = Tracker(TrackIds(512), MAX_UNSEEN)

    def observe(self, frame: Frame) -> list[str]:
        found = self._tracker.observe(frame.sequence, frame.time, frame.found_DA)
        return [each.track_id if each else "" for each in found]


class Library:
    """A tracker of `trackers`; it is told the mean rate of frames, and takes them as they come."""

    def __init__(self, kind: str, fps: float, **options: Any) -> None:
        import supervision
        import trackers

        self._detections = supervision.Detections
        self._tracker = getattr(trackers, kind)(
            frame_rate=fps,
            lost_track_buffer=round(30 * MAX_UNSEEN),
            minimum_consecutive_frames=1,
            **options,
        )

    def observe(self, frame: Frame) -> list[str]:
        boxes = frame.found_DA * _PIXELS
        corners = np.concatenate(
            [boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1
        )
        found = self._detections(
            xyxy=corners.astype(np.float32),
            confidence=np.full(len(corners), 0.9, np.float32),
            class_id=np.arange(len(corners)),  # it keeps no order, and only passes these on
        )
        tracked = self._tracker.update(found)
        names = [""] * len(corners)
        for index, number in zip(tracked.class_id, tracked.tracker_id, strict=True):
            if number >= 0:
                names[index] = str(number)
        return names


@contextlib.contextmanager
def contender(name: str) -> Iterator[None]:
    """Ours with one part exchanged, for the length of the block."""
    with contextlib.ExitStack() as stack:
        if name == "ours, scipy":
            stack.enter_context(mock.patch.object(tracking, "assign", _by_scipy))
        if name == "ours, velocity":
            # The same noise of the velocity in a second, without a memory of the acceleration.
            factor = np.sqrt(tracking.FADING / _FADING)
            noise_A = tracking.ACCELERATION_A * factor
            stack.enter_context(mock.patch.object(tracking, "ACCELERATION_A", noise_A))
            stack.enter_context(mock.patch.object(tracking, "FADING", _FADING))
        tracking.forget_transitions()
        yield
    tracking.forget_transitions()


def _by_scipy(gain_TD: Array) -> list[tuple[int, int]]:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(-np.maximum(gain_TD, 0))
    pairs = ((int(row), int(column)) for row, column in zip(rows, columns, strict=True))
    return [(row, column) for row, column in pairs if gain_TD[row, column] > 0]


def follower(name: str, fps: float) -> Follower:
    """Make a follower for a clip of which `fps` frames a second are answered."""
    match name:
        case "ByteTrack":
            return Library("ByteTrackTracker", fps, track_activation_threshold=0.25)
        case "OC-SORT":
            return Library("OCSORTTracker", fps, high_conf_det_threshold=0.25)
        case _:
            return Ours()


def installed() -> list[str]:
    """List the contenders that can run here."""
    names = ["ours"]
    if importlib.util.find_spec("scipy"):
        names.append("ours, scipy")
    names.append("ours, velocity")
    if importlib.util.find_spec("trackers"):
        names += ["ByteTrack", "OC-SORT"]
    return names


# ---------------------------------------------------------------- scoring
# MOTA and IDF1 by motmetrics, and how well extrapolated boxes fit.


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


# ---------------------------------------------------------------- run
# `python -m benchmarks tracking`: needs motmetrics; `trackers` for the libraries' trackers.


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
        scores[name] = identities(followed)
    return {"answered_a_second": fps, "scores": scores}


def _places(clips: list[list[Frame]]) -> list[dict[str, Any]]:
    """Frames every `ahead` seconds, answered so late."""
    rows = []
    for ahead in AHEAD:
        for name in ("ours", "ours, velocity"):
            with contender(name):
                every = round(ahead * FPS)
                each = [extrapolated(c[::every], c, every / FPS) for c in clips]
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
