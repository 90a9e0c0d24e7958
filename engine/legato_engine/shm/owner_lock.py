"""Locks that tell which files' owners are alive.

The kernel releases a lock with the process that holds it, however that ends; process ids are used
again, and mean nothing in another container that shares the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

_FLAGS = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


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
        self._descriptor = descriptor

    def release(self) -> None:
        """Remove the file. Idempotent."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def sweep_files(folder: pathlib.Path, lock_name: str) -> int:
    """Remove what dead owners left in `folder`; return how many files.

    `lock_name` is the name of a lock file with `*` for the prefix of its owner's files, which may
    begin with a dot.
    """
    before, after = lock_name.split("*")
    removed = 0
    for lock in folder.glob(lock_name):
        with _abandoned(lock) as is_abandoned:
            if is_abandoned:
                prefix = lock.name.removeprefix(before).removesuffix(after)
                owned = (*folder.glob(f"{prefix}-*"), *folder.glob(f".{prefix}-*"))
                for path in (*owned, lock):
                    with contextlib.suppress(OSError):
                        path.unlink()
                        removed += path is not lock
    return removed


def sweep_folders(parent: pathlib.Path, pattern: str, lock_name: str) -> int:
    """Remove the folders of dead owners, each with a lock file in it; return how many."""
    removed = 0
    for folder in parent.glob(pattern):
        with _abandoned(folder / lock_name) as is_abandoned:
            if is_abandoned and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
    return removed


@contextlib.contextmanager
def _abandoned(lock: pathlib.Path) -> Iterator[bool]:
    """Yield whether a lock of this user has no owner; nothing can take it within the block."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # there is none, or it is another user's
        yield False
        return
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
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
