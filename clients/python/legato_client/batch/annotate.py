"""Images and videos with their results drawn onto them. Needs Pillow, for videos PyAV too."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from legato_client import draw
from legato_client.batch import video
from legato_client.batch.images import IMAGES, RunError, is_video
from legato_client.batch.output import Line, Output, has_failed, marks, replacing, texts


def annotate(
    output: Output, folder: Path, choice: video.FrameChoice, tell: Callable[[], None]
) -> Iterator[str]:
    """Draw every image that has a line; `tell` is called after each, a video's frame included.

    A drawing lies below `folder` where its image lies below the folder that holds all of them,
    and has its name, with another ending where it has another form. Yields what cannot be drawn,
    with the reason.

    Raises:
        RunError: drawings would replace images.
        OSError: a drawing cannot be written.
    """
    images: dict[str, int] = {}
    videos: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for key, place in output.places():
        if key.frame is None:
            images[key.source] = place
        else:
            videos[key.source][key.frame] = place
    targets = _targets(folder, [*images, *videos])
    for source, place in images.items():
        line = output.line_at(place)
        if not has_failed(line) or line.get("results"):
            yield from _image(source, line, targets[source])
        tell()
    for source, places in videos.items():
        yield from _video(source, output, places, targets[source], choice, tell)


def _image(source: str, line: Line, target: Path) -> Iterator[str]:
    try:
        drawn = draw.annotate(source, marks(line), lines=texts(line))
    except (OSError, ValueError) as error:
        yield f"{source}: {error}"
        return
    with replacing(target) as part:
        drawn.save(part)


def _video(
    source: str,
    output: Output,
    places: dict[int, int],
    target: Path,
    choice: video.FrameChoice,
    tell: Callable[[], None],
) -> Iterator[str]:
    """Yield the requested frames at their times. Texts are left out: frames have one size."""
    problems: list[str] = []
    with replacing(target) as part, video.VideoWriter(part) as writer:
        for frame in _readable(source, choice, problems):
            if frame.number in places:
                line = output.line_at(places[frame.number])
                writer.write(draw.annotate(frame.image(), marks(line)), frame.time)
                tell()
    yield from problems


def _readable(
    source: str, choice: video.FrameChoice, problems: list[str]
) -> Iterator[video.DecodedFrame]:
    """Yield frames as far as the video can be read; append the error to `problems`."""
    try:
        yield from video.frames(source, choice)
    except (OSError, ValueError) as error:
        problems.append(f"{source}: {error}")


def _targets(folder: Path, sources: list[str]) -> dict[str, Path]:
    """Return the output paths. Raises RunError if one is a source, or two are the same."""
    real = {source: Path(os.path.realpath(source)) for source in sources}
    above = os.path.commonpath([path.parent for path in real.values()]) if real else ""
    targets = {source: folder / _named(path.relative_to(above)) for source, path in real.items()}
    taken = {path.resolve() for path in targets.values()}
    if taken & set(real.values()):
        raise RunError(f"drawings in {folder} would replace the images: name another folder")
    if len(taken) < len(targets):
        raise RunError(f"two images have one name in {folder}")
    return targets


def _named(path: Path) -> Path:
    if is_video(path.name):
        return path if path.suffix.lower() == ".mp4" else path.with_name(f"{path.name}.mp4")
    known = path.suffix.lower() in IMAGES
    return path if known else path.with_name(f"{path.name}.png")
