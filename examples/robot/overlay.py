"""The boxes on the images, for people: single moments, a sheet of them, a film."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from legato_client import Box, Detection, TrackNow
from legato_client.draw import annotate
from PIL import Image, ImageDraw

from examples.robot.recording import Answer, Recording
from examples.robot.report import match, mean
from examples.robot.scene import Scene

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
    then, late = (mean([_fit(scene, a.noun, a.boxes, at) for a in answers]) for at in (taken, t))
    boxes = [(answer.noun, [track.box for track in answer.tracks]) for answer in answers]
    expected = mean([_fit(scene, noun, each, t) for noun, each in boxes])
    text = "{:.0f} ms old: IoU {:.2f} extrapolated, {:.2f} as answered, {:.2f} when taken"
    caption = text.format(1000 * (t - taken), expected, late, then)
    ImageDraw.Draw(tile).text((8, _TILE[1] + 5), caption, fill="black", font_size=15)
    return tile


def _fit(scene: Scene, noun: str, boxes: Sequence[Box], t: float) -> float:
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
