"""A recording against the truth: ages, drops, the cost of lateness; tables and images."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from legato_client import Box, Detection, TrackNow
from legato_client.draw import annotate
from PIL import Image, ImageDraw

from examples.robot.recording import Answer, Recording
from examples.robot.scene import Scene

_LIKELY = 2  # standard deviations in which 95 % of places should lie


def summarise(scene: Scene, recording: Recording) -> dict[str, Any]:
    """Compute the figures. Times are in milliseconds; NaN where a figure cannot be known.

    IoU is the mean over every true object of every answer, a missed one counted as 0. The answer's
    boxes are held against where the object was when the image was taken, which is the model's
    quality, and against where it is when the answer arrives, which has the price of its age. The
    extrapolated box is held against the latter too. `iou_at_any_moment` asks the same of a robot
    that looks 30 times a second, from its first answer on: at the newest answer, or at where the
    session expects the object now.
    """
    captured = recording.captured()
    good = [answer for answer in recording.answers if not answer.error]
    ages = [1000 * (answer.arrived - captured[answer.sequence]) for answer in good]
    then = [score for a in good for score in _fit(scene, a, captured[a.sequence])]
    now = [score for a in good for score in _fit(scene, a, a.arrived)]
    expected = [score for a in good for score in _track_fit(scene, a.noun, a.tracks, a.arrived)]
    told = [1000 * answer.told_age for answer in good if answer.told_age is not None]
    late = [1000 * (frame.sent - frame.captured) for frame in recording.sent]
    return {
        "frames": {
            "taken": recording.num_frames,
            "left_out": len(recording.left_out),
            "sent": len(recording.sent),
            "answered": len(recording.answered()),
            "dropped": len(recording.drops),
            "dropped_by_reason": recording.reasons(),
            "dropped_as_the_server_counts": max((d.total for d in recording.drops), default=0),
        },
        "answers": {"total": len(recording.answers), "failed": len(recording.answers) - len(good)},
        "faults": recording.faults(),
        "age_ms": {**quantiles(ages), "max": max(ages, default=float("nan"))},
        "between_answers_ms": quantiles(_gaps(good)),
        "sent_late_ms": quantiles(late),
        "iou_at_capture": _quality(then),
        "iou_on_arrival": _quality(now),
        "iou_extrapolated": _quality(expected),
        "iou_at_any_moment": _moments(scene, recording, good),
        "likely_places": mean(_likely_places(scene, recording)),
        "tracks_by_noun": _tracks_by_noun(recording),
        "told_age_ms": quantiles(told),
        "boxes_too_many": sum(max(0, len(answer.boxes) - 1) for answer in good),
    }


def _fit(scene: Scene, answer: Answer, t: float) -> list[float]:
    """How the answer's boxes fit what was asked for, where it is at time t."""
    return match(answer.boxes, [scene.truth(t)[answer.noun]])


def _track_fit(scene: Scene, noun: str, tracks: Iterable[TrackNow], t: float) -> list[float]:
    return match([track.box for track in tracks], [scene.truth(t)[noun]])


def _moments(scene: Scene, recording: Recording, good: list[Answer]) -> dict[str, float]:
    """Return the mean over all looks and nouns that had an answer before."""
    held, expected = [], []
    for look in recording.looks:
        for noun in recording.nouns:
            newest = newest_answer(good, noun, look.time)
            if newest is not None:
                held += _fit(scene, newest, look.time)
                tracks = [track for track in look.tracks if track.task_id == noun]
                expected += _track_fit(scene, noun, tracks, look.time)
    return {"newest_answer": mean(held), "extrapolated": mean(expected)}


def newest_answer(answers: list[Answer], noun: str, t: float) -> Answer | None:
    """Return the answer about the newest image of all that had arrived by then."""
    known = (a for a in answers if a.noun == noun and a.arrived <= t and not a.error)
    return max(known, key=lambda answer: answer.sequence, default=None)


def _likely_places(scene: Scene, recording: Recording) -> list[bool]:
    """Of all extrapolated centres, whether the truth lies within two standard deviations."""
    found = []
    for look in recording.looks:
        for track in look.tracks:
            center_x, center_y = _center(scene.truth(look.time)[track.task_id])
            found.append(abs(track.axes.center_x - center_x) <= _LIKELY * track.deviation.center_x)
            found.append(abs(track.axes.center_y - center_y) <= _LIKELY * track.deviation.center_y)
    return found


def _center(box: Box) -> tuple[float, float]:
    return (box.x_min + box.x_max) / 2, (box.y_min + box.y_max) / 2


def _tracks_by_noun(recording: Recording) -> dict[str, int]:
    """How many tracks each object had; 1 is right."""
    ids = {(answer.noun, each) for answer in recording.answers for each in answer.track_ids}
    return {noun: sum(name == noun for name, _ in ids) for noun in recording.nouns}


def _quality(scores: list[float]) -> dict[str, float]:
    return {"mean": mean(scores), f"at_least_{HIT}": mean([score >= HIT for score in scores])}


def _gaps(answers: list[Answer]) -> list[float]:
    """Return the times from one answered frame to the next."""
    ends = sorted(answer.arrived for answer in answers if answer.is_last)
    return [1000 * (later - earlier) for earlier, later in itertools.pairwise(ends)]


def markdown(title: str, setting: dict[str, Any], figures: dict[str, Any]) -> str:
    """Write the figures for people, with how they came about."""
    frames, age = figures["frames"], figures["age_ms"]
    then, now = figures["iou_at_capture"], figures["iou_on_arrival"]
    expected, moments = figures["iou_extrapolated"], figures["iou_at_any_moment"]
    tracks = ", ".join(f"{noun} {count}" for noun, count in figures["tracks_by_noun"].items())
    reasons = ", ".join(f"{n} {reason}" for reason, n in frames["dropped_by_reason"].items())
    rows = [
        ("frames taken", frames["taken"]),
        ("frames left out here, for want of a credit", frames["left_out"]),
        ("frames sent", frames["sent"]),
        ("frames answered", frames["answered"]),
        ("frames dropped", f"{frames['dropped']} ({reasons})" if reasons else frames["dropped"]),
        ("dropped, as the server counts", frames["dropped_as_the_server_counts"]),
        ("frames unaccounted for, and other faults", len(figures["faults"])),
        ("answers that failed", figures["answers"]["failed"]),
        ("age of an answer, P50 / P90 / P99", _ms(age)),
        ("age as the server tells it", _ms(figures["told_age_ms"])),
        ("from one answered frame to the next", _ms(figures["between_answers_ms"])),
        ("frames sent late by", _ms(figures["sent_late_ms"])),
        ("mean IoU, truth when the image was taken", f"{then['mean']:.3f}"),
        ("mean IoU, truth when the answer arrived", f"{now['mean']:.3f}"),
        ("mean IoU then, extrapolated", f"{expected['mean']:.3f}"),
        ("mean IoU at any moment, newest answer", f"{moments['newest_answer']:.3f}"),
        ("mean IoU at any moment, extrapolated", f"{moments['extrapolated']:.3f}"),
        ("truth within two deviations", f"{figures['likely_places']:.1%}"),
        ("tracks of each object", tracks),
        (f"objects found (IoU {HIT}), when taken", f"{then[f'at_least_{HIT}']:.1%}"),
        (f"objects found (IoU {HIT}), on arrival", f"{now[f'at_least_{HIT}']:.1%}"),
        (f"objects found (IoU {HIT}), extrapolated", f"{expected[f'at_least_{HIT}']:.1%}"),
        ("boxes too many", figures["boxes_too_many"]),
    ]
    lines = [f"# {title}", "", *(f"- {name}: `{value}`" for name, value in setting.items()), ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += [f"- **fault**: {fault}" for fault in figures["faults"]]
    return "\n".join(lines).rstrip() + "\n"


def without_nan(value: Any) -> Any:
    """Replace NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {name: without_nan(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _ms(quantile: dict[str, float]) -> str:
    return " / ".join(f"{quantile[p]:.1f}" for p in ("p50", "p90", "p99")) + " ms"


# ---------------------------------------------------------------- scoring
# How well boxes fit, and what fitting costs when the boxes come late.


HIT = 0.5  # the least overlap that counts as found


def overlap(one: Box, other: Box) -> float:
    """Intersection over union, 0..1; 0 where neither has an area."""
    width = min(one.x_max, other.x_max) - max(one.x_min, other.x_min)
    height = min(one.y_max, other.y_max) - max(one.y_min, other.y_min)
    shared = max(width, 0.0) * max(height, 0.0)
    union = _area(one) + _area(other) - shared
    return shared / union if union > 0 else 0.0


def match(found: Sequence[Box], truth: Sequence[Box]) -> list[float]:
    """Return the overlap of each true box with its match, in the order of `truth`.

    Pairs are taken by greatest overlap first; a box is matched at most once, and a true box that
    gets none has 0.
    """
    pairs = sorted(
        ((overlap(box, true), i, j) for i, box in enumerate(found) for j, true in enumerate(truth)),
        reverse=True,
    )
    taken: set[int] = set()
    scores: dict[int, float] = {}
    for score, i, j in pairs:
        if score > 0 and i not in taken and j not in scores:
            taken.add(i)
            scores[j] = score
    return [scores.get(j, 0.0) for j in range(len(truth))]


def mean(values: Sequence[float]) -> float:
    """Their mean; not a number if there are none."""
    return math.fsum(values) / len(values) if values else math.nan


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` (0..1) of the values do not exceed; NaN if none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def quantiles(values: Sequence[float]) -> Mapping[str, float]:
    """Return the three quantiles that are reported."""
    return {f"p{p}": percentile(values, p / 100) for p in (50, 90, 99)}


def _area(box: Box) -> float:
    return max(box.x_max - box.x_min, 0.0) * max(box.y_max - box.y_min, 0.0)


# ---------------------------------------------------------------- images
# The boxes on the images, for people: single moments, a sheet of them, a film.

_TILE = (480, 360)  # pixels of a moment on the sheet
_CAPTION = 26  # pixels below it
_GAP = 8  # pixels between moments
_COLUMNS = 3
_TRUTH = (255, 255, 255)
_STALE = (90, 90, 90)


def moment(scene: Scene, t: float, tracks: Iterable[TrackNow], stale: Iterable[Box]) -> Image.Image:
    """Draw the scene at time t: white boxes where things are, coloured where they are expected.

    The `stale` boxes, thin and grey, are where the model saw them.
    """
    image = scene.image(t)
    pen = ImageDraw.Draw(image)
    for boxes, colour, width in ((stale, _STALE, 1), (scene.truth(t).values(), _TRUTH, 2)):
        for box in boxes:
            corners = box.to_pixels(image.width - 1, image.height - 1)
            pen.rectangle(corners, outline=colour, width=width)
    marks = [
        Detection(track.box, f"{track.label} #{track.track_id} {1000 * track.age:.0f} ms")
        for track in tracks
    ]
    return annotate(image, marks)


def sheet(scene: Scene, recording: Recording, moments: int = 6) -> Image.Image:
    """Moments at which a frame's last answer arrived, evenly taken from the whole recording.

    ValueError if no frame was answered.
    """
    ends = [answer for answer in recording.answers if answer.is_last and not answer.error]
    if not ends:
        raise ValueError("no frame was answered, so there is nothing to show")
    count = min(moments, len(ends))
    chosen = [ends[round(i * (len(ends) - 1) / max(1, count - 1))] for i in range(count)]
    width, height = _TILE[0] + _GAP, _TILE[1] + _CAPTION + _GAP
    columns = min(_COLUMNS, count)
    size = (columns * width - _GAP, -(-count // columns) * height - _GAP)
    canvas = Image.new("RGB", size, "white")
    for i, end in enumerate(chosen):
        corner = (i % columns * width, i // columns * height)
        canvas.paste(_tile(scene, recording, end), corner)
    return canvas


def _tile(scene: Scene, recording: Recording, end: Answer) -> Image.Image:
    answers = recording.answered()[end.sequence]
    taken, t = recording.captured()[end.sequence], end.arrived
    tracks = [track for answer in answers for track in answer.tracks]
    stale = [box for answer in answers for box in answer.boxes]
    tile = Image.new("RGB", (_TILE[0], _TILE[1] + _CAPTION), "white")
    tile.paste(moment(scene, t, tracks, stale).resize(_TILE, Image.Resampling.LANCZOS))
    then, late = (
        mean([_overlap_of(scene, a.noun, a.boxes, at) for a in answers]) for at in (taken, t)
    )
    boxes = [(answer.noun, [track.box for track in answer.tracks]) for answer in answers]
    expected = mean([_overlap_of(scene, noun, each, t) for noun, each in boxes])
    text = "{:.0f} ms old: IoU {:.2f} extrapolated, {:.2f} as answered, {:.2f} when taken"
    caption = text.format(1000 * (t - taken), expected, late, then)
    ImageDraw.Draw(tile).text((8, _TILE[1] + 5), caption, fill="black", font_size=15)
    return tile


def _overlap_of(scene: Scene, noun: str, boxes: Sequence[Box], t: float) -> float:
    return match(boxes, [scene.truth(t)[noun]])[0]


def film(scene: Scene, recording: Recording) -> Iterator[Image.Image]:
    """Draw what the robot expects, moment by moment."""
    for look in recording.looks:
        stale = [track.last.box for track in look.tracks]
        yield moment(scene, look.time, look.tracks, stale)


def write_film(path: Path, images: Iterable[Image.Image], fps: float) -> None:
    """Write a .gif, or an .mp4 where ffmpeg is installed; ValueError for anything else."""
    if path.suffix == ".gif":
        first, *rest = (image.quantize(96) for image in images)
        duration = 1000 / fps  # milliseconds an image
        first.save(path, save_all=True, append_images=rest, duration=duration, loop=0)
    elif path.suffix == ".mp4" and shutil.which("ffmpeg"):
        _write_mp4(path, images, fps)
    else:
        raise ValueError(f"cannot write {path}: .gif always works, .mp4 needs ffmpeg")


def _write_mp4(path: Path, images: Iterable[Image.Image], fps: float) -> None:
    """Images of one size with even sides."""
    images = iter(images)
    first = next(images)
    size, rate = f"{first.width}x{first.height}", f"{fps:g}"
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", rate, "-i", "-"]
    command = ["ffmpeg", "-y", "-loglevel", "error", *source, "-pix_fmt", "yuv420p", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as ffmpeg:
        assert ffmpeg.stdin is not None, "asked for a pipe"
        for image in (first, *images):
            ffmpeg.stdin.write(image.tobytes())
    if ffmpeg.returncode:
        raise ValueError(f"ffmpeg could not write {path}, exit code {ffmpeg.returncode}")
