"""Locks that tell which files' owners are alive.

The kernel releases a lock with the process that holds it, however that ends; process ids are used
again, and mean nothing in another container that shares the folder.

The folders are shared with other programs, whose names may look like ours. A lock is ours if it is
a regular file of this user and of mode 0600 whose content is `_MARKER`; what it protects has modes
and names that only this package gives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import stat
from collections.abc import Collection, Iterator

_FLAGS = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_MARKER = b"lock of a Legato server process\n"


class OwnerLock:
    """A lock file that this process holds until `release`."""

    def __init__(self, path: pathlib.Path) -> None:
        """Make and lock the file.

        Raises:
            OSError: it cannot be made.
        """
        self._path = path
        while True:
            descriptor = os.open(path, _FLAGS, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _names(path, descriptor):
                break
            os.close(descriptor)  # swept between the two calls
        os.pwrite(descriptor, _MARKER, 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Remove the file. Idempotent."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def sweep_files(folder: pathlib.Path, lock_name: re.Pattern[str]) -> int:
    """Remove the files of dead owners in `folder`; return how many.

    The first group of `lock_name` is the prefix of its owner's files, which may begin with a dot.
    """
    removed = 0
    for lock in _entries(folder):
        if (match := lock_name.fullmatch(lock.name)) is None:
            continue
        with _abandoned(lock) as is_abandoned:
            if is_abandoned:
                owned = (*folder.glob(f"{match[1]}-*"), *folder.glob(f".{match[1]}-*"))
                for path in (*filter(_is_private_file, owned), lock):
                    with contextlib.suppress(OSError):
                        path.unlink()
                        removed += path is not lock
    return removed


def sweep_folders(
    parent: pathlib.Path, name: re.Pattern[str], lock_name: str, files: Collection[str]
) -> int:
    """Remove the folders of dead owners, each with a lock in it; return how many.

    Only `files` are removed from a folder. One that holds anything else stays.
    """
    removed = 0
    for folder in _entries(parent):
        if name.fullmatch(folder.name) is None or not _is_private(folder, stat.S_IFDIR | 0o700):
            continue
        with _abandoned(folder / lock_name) as is_abandoned:
            if is_abandoned and {path.name for path in _entries(folder)} <= {lock_name, *files}:
                with contextlib.suppress(OSError):
                    for each in (*files, lock_name):
                        (folder / each).unlink(missing_ok=True)
                    folder.rmdir()
                    removed += 1
    return removed


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """List a folder; one that cannot be read has nothing to sweep."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


@contextlib.contextmanager
def _abandoned(lock: pathlib.Path) -> Iterator[bool]:
    """Yield whether a lock of this user has no owner; nothing can take it within the block."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # there is none, or it is another user's
        yield False
        return
    try:
        if not _is_lock(descriptor):
            yield False
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield _names(lock, descriptor)
    finally:
        os.close(descriptor)


def _names(path: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def _is_lock(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    return (found.st_uid, found.st_mode) == (os.geteuid(), stat.S_IFREG | 0o600) and os.pread(
        descriptor, len(_MARKER) + 1, 0
    ) == _MARKER


def _is_private_file(path: pathlib.Path) -> bool:
    return _is_private(path, stat.S_IFREG | 0o600)


def _is_private(path: pathlib.Path, mode: int) -> bool:
    """Return whether it is this user's and of this type and mode; a link is followed nowhere."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return False
    return (found.st_uid, found.st_mode) == (os.geteuid(), mode)
