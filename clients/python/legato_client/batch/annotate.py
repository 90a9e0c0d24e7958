"""Pictures and videos with their results drawn onto them. Needs Pillow, for videos PyAV too."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from legato_client import draw
from legato_client.batch import output as lines
from legato_client.batch import video
from legato_client.batch.images import PICTURES, RunRefused, is_video
from legato_client.batch.output import Output, replacing


def annotate(
    output: Output, folder: Path, choice: video.FrameChoice, tell: Callable[[], None]
) -> Iterator[str]:
    """Draw every picture that has a line; `tell` is called after each, a video's frame included.

    A drawing lies below `folder` where its picture lies below the folder that holds all of them,
    and has its name, with another ending where it has another form. Yields what cannot be drawn,
    with the reason.

    Raises:
        RunRefused: drawings would replace pictures.
        OSError: a drawing cannot be written.
    """
    pictures: dict[str, int] = {}
    videos: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for key, place in output.places():
        if key.frame is None:
            pictures[key.source] = place
        else:
            videos[key.source][key.frame] = place
    targets = _targets(folder, [*pictures, *videos])
    for source, place in pictures.items():
        line = output.line_at(place)
        if not lines.has_failed(line) or line.get("results"):
            yield from _picture(source, line, targets[source])
        tell()
    for source, places in videos.items():
        yield from _video(source, output, places, targets[source], choice, tell)


def _picture(source: str, line: lines.Line, target: Path) -> Iterator[str]:
    try:
        drawn = draw.annotate(source, lines.marks(line), lines=lines.texts(line))
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
    """Frames that were asked, at their times. Texts are left out: frames have one size."""
    problems: list[str] = []
    with replacing(target) as part, video.VideoWriter(part) as writer:
        for frame in _readable(source, choice, problems):
            if frame.number in places:
                line = output.line_at(places[frame.number])
                writer.write(draw.annotate(frame.image(), lines.marks(line)), frame.time)
                tell()
    yield from problems


def _readable(source: str, choice: video.FrameChoice, problems: list[str]) -> Iterator[video.Frame]:
    """Frames up to where the video cannot be read any more; why goes to `problems`."""
    try:
        yield from video.frames(source, choice)
    except (OSError, ValueError) as error:
        problems.append(f"{source}: {error}")


def _targets(folder: Path, sources: list[str]) -> dict[str, Path]:
    """Raises RunRefused where one is a source, or two are the same."""
    real = {source: Path(os.path.realpath(source)) for source in sources}
    above = os.path.commonpath([path.parent for path in real.values()]) if real else ""
    targets = {source: folder / _named(path.relative_to(above)) for source, path in real.items()}
    taken = {path.resolve() for path in targets.values()}
    if taken & set(real.values()):
        raise RunRefused(f"drawings in {folder} would replace the pictures: name another folder")
    if len(taken) < len(targets):
        raise RunRefused(f"two pictures have one name in {folder}")
    return targets


def _named(path: Path) -> Path:
    if is_video(path.name):
        return path if path.suffix.lower() == ".mp4" else path.with_name(f"{path.name}.mp4")
    known = path.suffix.lower() in PICTURES
    return path if known else path.with_name(f"{path.name}.png")
