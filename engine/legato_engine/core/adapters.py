"""Adapter store: adapters by name, read from folders."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from legato_engine.errors import AdapterNotFound, AdapterUnusable
from legato_engine.images.cache import ImageCache
from legato_engine.models.adapters import MAX_HEADER, SETTINGS, WEIGHTS
from legato_engine.models.base import Adapter

_FILES = ("{}.safetensors", "{}.pt", f"{{}}/{SETTINGS}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
_THREADS = 2

Read = Callable[[bytes, str, bytes], Adapter]
_Future = concurrent.futures.Future[Adapter]


class _Version(NamedTuple):
    inode: int
    size: int
    mtime_ns: int


class AdapterStore:
    """Store of adapters: `NAME.safetensors`, `NAME.pt` or a folder `NAME` of PEFT's files.

    The first folder that has it wins. Every `start` checks the files for new content; older
    requests keep the old content.
    """

    def __init__(
        self, read: Read, folders: Sequence[Path], *, max_values: int, cache_bytes: int
    ) -> None:
        """Create a store.

        `read` parses tensors, given the hash of all content, and settings, which a folder has.
        """
        self._read_file = read
        self._folders = tuple(folders)
        self._max_bytes = 4 * max_values + MAX_HEADER  # values in float32
        self._cache = ImageCache[str, tuple[tuple[_Version, ...], Adapter]](cache_bytes)
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
                for pattern in _FILES:
                    try:
                        return self._from(folder / pattern.format(name))
                    except (FileNotFoundError, NotADirectoryError):
                        continue
                    except OSError as error:
                        raise AdapterUnusable(
                            f"the adapter cannot be read: {error.strerror}"
                        ) from None
        raise AdapterNotFound("this server has no such adapter", resource=name)

    def _from(self, path: Path) -> Adapter:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(_opened(path))]
            if path.name == SETTINGS:
                files.insert(0, stack.enter_context(_weights_beside(path)))
            version = tuple(map(_version, files))
            cached = self._cache.get(str(path))
            if cached is not None and cached[0] == version:
                return cached[1]
            for each in version:
                if each.size > self._max_bytes:
                    raise AdapterUnusable(
                        "the file is larger than an adapter of the highest rank in float32",
                        limit=self._max_bytes,
                        actual=each.size,
                    )
            data, settings = (*(file.read(self._max_bytes) for file in files), b"")[:2]
        key = hashlib.sha256(data)
        key.update(settings)
        adapter = self._read_file(data, key.hexdigest(), settings)
        self._cache.put(str(path), (version, adapter), adapter.num_bytes)
        return adapter


def _opened(path: Path) -> BinaryIO:
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileNotFoundError(path)
    return path.open("rb")


def _weights_beside(settings: Path) -> BinaryIO:
    try:
        return _opened(settings.with_name(WEIGHTS))
    except FileNotFoundError:
        raise AdapterUnusable(f"{WEIGHTS} is missing beside {SETTINGS}") from None


def _version(file: BinaryIO) -> _Version:
    status = os.fstat(file.fileno())
    return _Version(status.st_ino, status.st_size, status.st_mtime_ns)
