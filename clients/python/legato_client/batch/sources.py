"""Where pictures come from: files, folders, videos, names on standard input."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

from legato_client._images.sources import ImageInput
from legato_client.batch import video
from legato_client.batch.errors import RunRefused

STANDARD_INPUT = "-"
PICTURES = (".jpg", ".jpeg", ".png", ".webp")
VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
"""Endings by which files of a folder are found, and videos told from pictures."""


class Key(NamedTuple):
    """Names a picture in every run: its file as it was named, and the number of a video's frame."""

    source: str
    frame: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A picture that is not read yet.

    `time` is in seconds from the first frame. `read` raises OSError or ValueError.
    """

    key: Key
    read: Callable[[], ImageInput]
    time: float | None = None


def files(names: Iterable[str], left_out: Collection[Path], stdin: IO[bytes]) -> Iterator[str]:
    """Every file that is named or lies in a named folder, in the order of names, each once.

    `left_out` are folders whose files this run writes itself.

    Raises:
        RunRefused: a name is neither a file nor a folder.
        OSError: a folder cannot be read.
    """
    seen: set[str] = set()
    found: Iterator[str]
    for name in names:
        if name == STANDARD_INPUT:
            found = (os.fsdecode(line.rstrip(b"\r\n")) for line in stdin)
        elif os.path.isdir(name):
            found = _below(name, [folder.resolve() for folder in left_out])
        elif os.path.exists(name):
            found = iter((name,))
        else:
            raise RunRefused(f"no such file or folder: {name}")
        for each in filter(None, found):
            path = os.path.normpath(each)
            if path not in seen:
                seen.add(path)
                yield path


def is_video(name: str) -> bool:
    return name.lower().endswith(VIDEOS)


def pictures(names: Iterable[str], choice: video.Choice) -> Iterator[Picture]:
    """The pictures of files; a video has the chosen ones of its frames.

    A video that cannot be read, or not to its end, gives one more picture, whose `read` fails.
    """
    for name in names:
        if is_video(name):
            yield from _frames(name, choice)
        else:
            yield Picture(Key(name, None), Path(name).read_bytes)


def _frames(name: str, choice: video.Choice) -> Iterator[Picture]:
    try:
        for frame in video.frames(name, choice):
            yield Picture(Key(name, frame.number), frame.read, frame.time)
    except (OSError, ValueError) as error:
        problem = error

        def fail() -> NoReturn:
            raise problem

        yield Picture(Key(name, None), fail)


def _below(folder: str, left_out: Collection[Path]) -> Iterator[str]:
    for path, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith(".") and Path(path, each).resolve() not in left_out
        )
        for name in sorted(names):
            if name.lower().endswith(PICTURES + VIDEOS) and not name.startswith("."):
                yield os.path.join(path, name)


def _fail(error: OSError) -> NoReturn:
    raise error
