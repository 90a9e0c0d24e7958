"""Files that are read again when they change."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

Version = tuple[tuple[int, int, int, int], ...]
"""Inode, size, and times of change in nanoseconds, of each file."""


class FileRejected(Exception):
    """A file of credentials or certificates cannot be used; the text tells why."""


class WatchedFiles:
    """Notices when files are written or replaced, also behind symbolic links."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._loaded: Version = ()
        self._seen: Version = ()

    def read(self) -> list[bytes]:
        """Read all files and take their version as the loaded one.

        Raises:
            FileRejected: a file cannot be read, or was written meanwhile.
        """
        self._loaded = self._seen = before = self._version()
        contents = []
        for path in self._paths:
            try:
                with open(path, "rb") as file:
                    contents.append(file.read())
            except OSError as error:
                raise FileRejected(f"{path}: {error.strerror}") from None
        if self._version() != before:
            self._loaded = ()
            raise FileRejected("written while it was read")
        return contents

    def changed(self) -> bool:
        """Whether to read again: the files differ from those loaded, and rest since the last look.

        A file that is written in place is seen half way otherwise.
        """
        version, before = self._version(), self._seen
        self._seen = version
        return version == before != self._loaded

    def are_stale(self) -> bool:
        return self._version() != self._loaded

    def _version(self) -> Version:
        return tuple(_version(path) for path in self._paths)


def _version(path: str) -> tuple[int, int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_exposed(path: str) -> bool:
    """Whether other users can read the file, or its group can write it."""
    return bool(os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP))
