"""Image sources of a run: files, folders, videos, standard input."""

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


class RunRefused(Exception):
    """The message is for the user, who must change what was asked."""


# ---------------------------------------------------------------- sources

# Where pictures come from: files, folders, videos, names on standard input.

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
            found = _listed(stdin)
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


def pictures(names: Iterable[str], choice: video.FrameChoice) -> Iterator[Picture]:
    """The pictures of files; a video has the chosen ones of its frames.

    A video that cannot be read, or not to its end, gives one more picture, whose `read` fails.
    """
    for name in names:
        if is_video(name):
            yield from _frames(name, choice)
        else:
            yield Picture(Key(name, None), functools.partial(_read, name))


def _frames(name: str, choice: video.FrameChoice) -> Iterator[Picture]:
    try:
        _check_regular(name)
        for frame in video.frames(name, choice):
            yield Picture(Key(name, frame.number), frame.read, frame.time)
    except (OSError, ValueError) as error:
        problem = error

        def fail() -> NoReturn:
            raise problem

        yield Picture(Key(name, None), fail)


def _listed(stdin: IO[bytes]) -> Iterator[str]:
    """Names, one a line: bytes as the system has them, or the UTF-16 that PowerShell 5 writes."""
    first = stdin.readline()
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            yield from (first + stdin.read()).decode("utf-16").splitlines()
        except UnicodeDecodeError as error:
            raise RunRefused(f"the list of names is neither UTF-8 nor UTF-16: {error}") from None
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


def _below(folder: str, left_out: Collection[Path]) -> Iterator[str]:
    for path, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith(".") and Path(path, each).resolve() not in left_out
        )
        for name in sorted(names):
            if name.lower().endswith(PICTURES + VIDEOS) and not name.startswith("."):
                found = os.path.join(path, name)
                if os.path.isfile(found) or not os.path.exists(found):  # a broken link is reported
                    yield found


def _fail(error: OSError) -> NoReturn:
    raise error
