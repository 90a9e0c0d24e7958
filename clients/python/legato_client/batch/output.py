"""The file of a run: a line that says what was asked, then a line for each picture.

A line is written whole by one thread at a time, and only its end counts: what a killed run left
behind its last line end is cut off. So the file always holds the pictures that are done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from legato_client.batch.errors import RunRefused
from legato_client.batch.lines import Line, encode, has_failed, key_of
from legato_client.batch.sources import Key

_VERSION = 1
_BEGINNING = b'{"legato_run": '


class Output:
    """Opened by one run at a time; safe to share between threads.

    `done` are the pictures that have a line, `num_failed` is how many of those have an error.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """`settings` say what is asked, in values of JSON; a run goes on with equal ones only.

        Raises:
            RunRefused: it is another run's file, in use, or no file of a run.
            OSError: it cannot be read or written.
        """
        self._path = path
        self._lock = threading.Lock()
        self._broken = False
        self.done: set[Key] = set()
        self.num_failed = 0
        self._file = _open_locked(path)
        try:
            self._read(json.loads(json.dumps(settings)))
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def append(self, line: Line) -> None:
        """Raises OSError; the file then has no part of the line, and takes no other."""
        data = encode(line)
        with self._lock:
            if self._broken:
                raise OSError("an earlier line could not be written")
            self._append(data)
            self._count(line)

    def lines(self) -> Iterator[Line]:
        """Each picture's line, in the order of completion."""
        return (json.loads(data) for _, data in self._pieces())

    def places(self) -> Iterator[tuple[Key, int]]:
        """Each picture with where its line begins, for `line_at`."""
        return ((key_of(json.loads(data)), place) for place, data in self._pieces())

    def line_at(self, place: int) -> Line:
        with open(self._path, "rb") as file:
            file.seek(place)
            line: Line = json.loads(file.readline())
        return line

    def sort(self) -> None:
        """Order the lines by source and frame."""
        order = sorted(self.places(), key=lambda each: (each[0].source, each[0].frame or 0))
        self._rewrite(encode(self.line_at(place)) for _, place in order)

    def drop_failed(self) -> None:
        """Forget the pictures that failed."""
        if not self.num_failed:
            return
        self._rewrite(encode(line) for line in self.lines() if not has_failed(line))
        self.done = {key for key, _ in self.places()}
        self.num_failed = 0

    def _read(self, settings: Mapping[str, Any]) -> None:
        header = {"legato_run": _VERSION, **settings}
        with open(self._path, "rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                self._begin(first, header)
                return
            _check_header(self._path, first, header)
            end = len(first)
            for number, data in enumerate(file, start=2):
                if not data.endswith(b"\n"):
                    os.ftruncate(self._file, end)
                    break
                self._take(number, data)
                end += len(data)

    def _begin(self, torn: bytes, header: Mapping[str, Any]) -> None:
        """`torn` is the part of a first line that a killed run may have written."""
        if not (torn.startswith(_BEGINNING) or _BEGINNING.startswith(torn)):
            raise RunRefused(f"{self._path} is no file of a run: name another one")
        os.ftruncate(self._file, 0)
        self._append(encode(header))

    def _take(self, number: int, data: bytes) -> None:
        try:
            self._count(json.loads(data))
        except (ValueError, KeyError, TypeError):
            raise RunRefused(f"line {number} of {self._path} is not of a run") from None

    def _count(self, line: Line) -> None:
        self.done.add(key_of(line))
        self.num_failed += has_failed(line)

    def _append(self, data: bytes) -> None:
        end = os.fstat(self._file).st_size
        try:
            _write(self._file, data)
        except OSError:
            self._broken = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        with open(self._path, "rb") as file:
            place = len(file.readline())
            for data in file:
                yield place, data
                place += len(data)

    def _rewrite(self, lines: Iterator[bytes]) -> None:
        """The new file takes the place of the old one at once, and is locked before."""
        with open(self._path, "rb") as old:
            header = old.readline()
        part = _part_of(self._path)
        file = os.open(part, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            _write(file, header)
            for data in lines:
                _write(file, data)
            os.replace(part, self._path)
        except BaseException:
            os.close(file)
            part.unlink()
            raise
        os.close(self._file)
        self._file = file


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name to write to, which becomes `path` if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = _part_of(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _part_of(path: Path) -> Path:
    """Ends as `path` does, which may tell a form."""
    return path.with_name(f".part-{path.name}")


def _open_locked(path: Path) -> int:
    """For appending. A file that was replaced before it was locked is not the one any more."""
    if path.exists() and not path.is_file():
        raise RunRefused(f"{path} is not a file that a later run could go on with")
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BlockingIOError:
            os.close(file)
            raise RunRefused(f"another run is writing {path}") from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _write(file: int, data: bytes) -> None:
    """A full disk may take a part of it before the error."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _check_header(path: Path, first: bytes, header: Mapping[str, Any]) -> None:
    try:
        found = json.loads(first)
        version = found["legato_run"]
    except (ValueError, KeyError, TypeError):
        raise RunRefused(f"{path} is no file of a run: name another one") from None
    if version != _VERSION:
        raise RunRefused(f"{path} is of another version of legato run ({version})")
    changed = [name for name in header if found.get(name) != header[name]]
    if changed:
        before, now = ({name: each.get(name) for name in changed} for each in (found, header))
        raise RunRefused(
            f"{path} is of a run that asked something else: {_said(before)} there, {_said(now)} "
            "now; ask the same, or name another file"
        )


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items())
