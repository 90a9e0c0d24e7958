"""Adapter store: adapters by name, read from folders."""

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
from legato_engine.models.base import Adapter

SUFFIXES = (".safetensors", ".pt")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
_THREADS = 2
_HEADER = 1024 * 1024  # bytes of a file in addition to its values, which are at most float32

Read = Callable[[bytes, str], Adapter]
_Future = concurrent.futures.Future[Adapter]


class _Version(NamedTuple):
    inode: int
    size: int
    mtime_ns: int


class AdapterStore:
    """Store of adapters: `NAME.safetensors` or `NAME.pt` in the first folder that has it.

    Every `start` checks the file for new content; older requests keep the old content.
    """

    def __init__(
        self, read: Read, folders: Sequence[Path], *, max_values: int, cache_bytes: int
    ) -> None:
        """Create a store; `read` parses a file's bytes, given their hash."""
        self._read_file = read
        self._folders = tuple(folders)
        self._max_bytes = 4 * max_values + _HEADER
        self._cache = ImageCache[str, tuple[_Version, Adapter]](cache_bytes)
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "legato-adapters")
        self._reading: dict[str, _Future] = {}

    def start(self, name: str) -> _Future:
        """Read an adapter. Concurrent calls for one name share the future; do not cancel it.

        Raises (in the future):
            AdapterNotFound: no folder has such a file.
            AdapterUnusable: the file cannot be read or is no adapter.
        """
        future = self._reading.get(name)
        if future is None:
            future = self._reading[name] = self._pool.submit(self._get, name)
            future.add_done_callback(lambda _: self._reading.pop(name, None))
        return future

    def close(self) -> None:
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
                        raise AdapterUnusable(
                            f"the adapter cannot be read: {error.strerror}"
                        ) from None
        raise AdapterNotFound("this server has no such adapter", resource=name)

    def _from(self, path: Path) -> Adapter:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileNotFoundError(path)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            version = _Version(status.st_ino, status.st_size, status.st_mtime_ns)
            cached = self._cache.get(str(path))
            if cached is not None and cached[0] == version:
                return cached[1]
            if status.st_size > self._max_bytes:
                raise AdapterUnusable(
                    "the file is larger than an adapter of the highest rank in float32",
                    limit=self._max_bytes,
                    actual=status.st_size,
                )
            data = file.read(self._max_bytes)
        adapter = self._read_file(data, hashlib.sha256(data).hexdigest())
        self._cache.put(str(path), (version, adapter), adapter.num_bytes)
        return adapter
