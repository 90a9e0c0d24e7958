"""BatchImage sources of a run: files, folders, videos, standard input."""

from __future__ import annotations

import codecs
import dataclasses
import errno
import functools
import itertools
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

from legato_client._images.sources import ImageInput
from legato_client.batch import video


class RunError(Exception):
    """Error in what the user asked for; the message says what to change."""


STANDARD_INPUT = "-"
IMAGES = (".jpg", ".jpeg", ".png", ".webp")
VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")
"""Suffixes of the files that are found in folders; they also tell videos from images."""


class Key(NamedTuple):
    """Identity of an image in every run: its file as it was named, and a video frame's number."""

    source: str
    frame: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class BatchImage:
    """BatchImage that is read lazily.

    `time` is in seconds from the first frame. `read` raises OSError or ValueError.
    """

    key: Key
    read: Callable[[], ImageInput]
    time: float | None = None


def files(names: Iterable[str], excluded: Collection[Path], stdin: IO[bytes]) -> Iterator[str]:
    """Yield every file that is named or lies in a named folder, in the order of names, each once.

    `excluded` are folders that this run writes.

    Raises:
        RunError: a name is neither a file nor a folder.
        OSError: a folder cannot be read.
    """
    seen: set[str] = set()
    found: Iterator[str]
    for name in names:
        if name == STANDARD_INPUT:
            found = _listed(stdin)
        elif os.path.isdir(name):
            found = _below(name, [folder.resolve() for folder in excluded])
        elif os.path.exists(name):
            found = iter((name,))
        else:
            raise RunError(f"no such file or folder: {name}")
        for each in filter(None, found):
            path = os.path.normpath(each)
            if path not in seen:
                seen.add(path)
                yield path


def is_video(name: str) -> bool:
    return name.lower().endswith(VIDEOS)


def images(names: Iterable[str], choice: video.FrameChoice) -> Iterator[BatchImage]:
    """Yield the images of files, and the chosen frames of videos.

    A video that cannot be read, or not to its end, gives one more image, whose `read` fails.
    """
    for name in names:
        if is_video(name):
            yield from _frames(name, choice)
        else:
            yield BatchImage(Key(name, None), functools.partial(_read, name))


def _frames(name: str, choice: video.FrameChoice) -> Iterator[BatchImage]:
    try:
        _check_regular(name)
        for frame in video.frames(name, choice):
            yield BatchImage(Key(name, frame.number), frame.read, frame.time)
    except (OSError, ValueError) as error:
        problem = error

        def fail() -> NoReturn:
            raise problem

        yield BatchImage(Key(name, None), fail)


def _listed(stdin: IO[bytes]) -> Iterator[str]:
    """Yield names, one per line: the system's bytes, or UTF-16 as PowerShell 5 writes it."""
    first = stdin.readline()
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            yield from (first + stdin.read()).decode("utf-16").splitlines()
        except UnicodeDecodeError as error:
            raise RunError(f"the list of names is neither UTF-8 nor UTF-16: {error}") from None
        return
    for line in itertools.chain([first.removeprefix(codecs.BOM_UTF8)], stdin):
        yield os.fsdecode(line.rstrip(b"\r\n"))


def _read(name: str) -> bytes:
    _check_regular(name)
    return Path(name).read_bytes()


def _check_regular(name: str) -> None:
    """Raise OSError for a pipe, a device and the like, which might block a reader for ever."""
    if not stat.S_ISREG(os.stat(name).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)


def _below(folder: str, excluded: Collection[Path]) -> Iterator[str]:
    for path, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith(".") and Path(path, each).resolve() not in excluded
        )
        for name in sorted(names):
            if name.lower().endswith(IMAGES + VIDEOS) and not name.startswith("."):
                found = os.path.join(path, name)
                if os.path.isfile(found) or not os.path.exists(found):  # a broken link is reported
                    yield found


def _fail(error: OSError) -> NoReturn:
    raise error
