"""Adapters by name: the files of some folders, read and checked on threads of their own."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from legato_engine.errors import AdapterNotFound, AdapterUnusable
from legato_engine.images.cache import ImageCache
from legato_engine.models.capabilities import Adapter

SUFFIXES = (".safetensors", ".pt")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
_THREADS = 2
_HEADER = 1024 * 1024  # bytes that a file may have beside its values, which are float32 at most

Read = Callable[[bytes, str], Adapter]
_Future = concurrent.futures.Future[Adapter]


class _Version(NamedTuple):
    """What tells one content of a file from the next."""

    inode: int
    size: int
    mtime_ns: int


class AdapterStore:
    """Finds `NAME.safetensors` or `NAME.pt` in the first of its folders that has it.

    A file is looked at whenever its adapter is asked for: one that has just appeared is found, and
    one that was replaced is read anew, while those that began with the old content end with it.
    What was read stays in memory up to `cache_bytes`, least recently used first out.
    """

    def __init__(
        self, read: Read, folders: Sequence[Path], *, max_values: int, cache_bytes: int
    ) -> None:
        """`read` makes an adapter, of `max_values` at most, of a file's bytes and their hash."""
        self._read_file = read
        self._folders = tuple(folders)
        self._max_bytes = 4 * max_values + _HEADER
        self._cache = ImageCache[tuple[_Version, Adapter]](cache_bytes)
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "legato-adapters")
        self._reading: dict[str, _Future] = {}

    def start(self, name: str) -> _Future:
        """Read an adapter; those who ask for the same one at a time share the future.

        It is nobody's to cancel. It raises `AdapterNotFound` or `AdapterUnusable`.
        """
        future = self._reading.get(name)
        if future is None:
            future = self._reading[name] = self._pool.submit(self._get, name)
            future.add_done_callback(lambda _: self._reading.pop(name, None))
        return future

    def close(self) -> None:
        """Drop what has not begun and stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _get(self, name: str) -> Adapter:
        if _NAME.fullmatch(name):
            for folder in self._folders:
                for suffix in SUFFIXES:
                    try:
                        return self._from(folder / f"{name}{suffix}")
                    except (FileNotFoundError, NotADirectoryError):
                        continue
                    except OSError as error:
                        raise AdapterUnusable(f"it cannot be read: {error.strerror}") from None
        raise AdapterNotFound("this server has no such adapter", resource=name)

    def _from(self, path: Path) -> Adapter:
        """The adapter of a file, from memory as long as the file is the same."""
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileNotFoundError(path)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            version = _Version(status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._cache.get(str(path))
            if known is not None and known[0] == version:
                return known[1]
            if status.st_size > self._max_bytes:
                raise AdapterUnusable(
                    "the file is larger than an adapter of the highest rank is in float32",
                    limit=self._max_bytes,
                    actual=status.st_size,
                )
            data = file.read(self._max_bytes)
        adapter = self._read_file(data, hashlib.sha256(data).hexdigest())
        self._cache.put(str(path), (version, adapter), adapter.num_bytes)
        return adapter
