"""Frames for a server on this host, through shared memory: the writer's side of `SharedImage`.

A region is a ring of slots. Each has a generation that is odd while the slot is written, so that
the server notices a frame that was overwritten while it was read. numpy is not needed, and never
imported here.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import struct
import tempfile
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from legato.v1 import media_pb2

from legato_client._images.raw_frame import RawFrame

if TYPE_CHECKING:
    import numpy as np

HEADER_SIZE = 64
_MAGIC = b"LEGATO01"
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = len(_MAGIC)  # from the header's start
Frame: TypeAlias = "bytes | bytearray | memoryview | RawFrame | np.ndarray[Any, Any]"


class SlotsBusy(BufferError):
    """Every slot holds a frame that was not released."""


def shm_namespace() -> str:
    """This host's shared memory, as `GetServerInfoResponse.shm_namespace` names the server's.

    Frames are for a server whose own is the same. Empty where there is no shared memory.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}:{_folder().stat().st_dev}"
    except OSError:
        return ""


class SharedFrame:
    """A frame in its slot, until `release`; also a context manager that releases."""

    def __init__(self, ring: SharedFrames, slot: int, image: media_pb2.SharedImage) -> None:
        self._ring = ring
        self._slot = slot
        self._image = image
        self._released = False

    def to_image(self) -> media_pb2.Image:
        """The frame as a request carries it."""
        return media_pb2.Image(shared=self._image)

    def release(self) -> None:
        """Let the slot be written again, once the server answered. Idempotent."""
        if not self._released:
            self._released = True
            self._ring._give_back(self._slot)

    def __enter__(self) -> SharedFrame:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class SharedFrames:
    """`num_slots` slots of `slot_bytes` bytes each; safe to use from several threads.

        with SharedFrames(slot_bytes=1920 * 1080 * 3) as frames, frames.write(array) as frame:
            client.detect(frame, "cup")

    The region is this user's alone and leaves with `close`, or with the last reference; a process
    that is killed does not remove it.

    Raises:
        OSError: Shared memory has no room for the region.
    """

    def __init__(self, slot_bytes: int, num_slots: int = 4) -> None:
        if slot_bytes < 1 or num_slots < 1:
            raise ValueError("a ring has at least one slot of at least one byte")
        self.slot_bytes = slot_bytes
        self.region = f"legato-{os.geteuid()}-{secrets.token_hex(16)}"
        self._stride = HEADER_SIZE + -(-slot_bytes // HEADER_SIZE) * HEADER_SIZE
        self._generations = [0] * num_slots
        self._free = collections.deque(range(num_slots))
        self._changed = threading.Condition()
        path = _folder() / self.region
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._end = weakref.finalize(self, _remove, self._file, path, os.getpid())
        try:
            os.posix_fallocate(self._file, 0, self._stride * num_slots)
            for slot in range(num_slots):
                os.pwrite(self._file, _MAGIC, slot * self._stride)
        except OSError:
            self._end()
            raise

    @property
    def num_free(self) -> int:
        """Slots that may be written now."""
        return len(self._free)

    def write(
        self,
        frame: Frame,
        *,
        layout: media_pb2.PixelLayout | None = None,
        mime_type: str = "",
        timeout: float = 0.0,
    ) -> SharedFrame:
        """Copy a frame into a free slot, waiting up to `timeout` seconds for one.

        An array is uint8 of shape (height, width), (height, width, 3) RGB or (height, width, 4)
        RGBA; a `RawFrame` has a shape of its own. Bytes are pixels of `layout`, or without one an
        image file, of `mime_type` if that is given. Raises
        `SlotsBusy`, and ValueError for a frame that does not fit a slot or after `close`.
        """
        image = media_pb2.SharedImage(region=self.region)
        data, own_layout = _bytes_of(frame)
        layout = layout or own_layout
        if layout is not None:
            image.layout.CopyFrom(layout)
        else:
            image.mime_type = mime_type
        if not 1 <= len(data) <= self.slot_bytes:
            raise ValueError(f"a slot takes 1 to {self.slot_bytes} bytes, not {len(data)}")
        slot = self._take(timeout)
        try:
            image.generation = self._fill(slot, data)
        except BaseException:
            self._give_back(slot)
            raise
        image.offset = slot * self._stride + HEADER_SIZE
        image.size_bytes = len(data)
        return SharedFrame(self, slot, image)

    def close(self) -> None:
        """Remove the region; the server can read no frame of it any more. Idempotent."""
        with self._changed:
            self._end()
            self._changed.notify_all()

    def __enter__(self) -> SharedFrames:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, timeout: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self._end.alive, timeout)
            self._check_open()
            if not self._free:
                raise SlotsBusy(f"all {len(self._generations)} slots hold frames to be released")
            return self._free.popleft()

    def _give_back(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def _fill(self, slot: int, data: memoryview) -> int:
        """The slot's new generation. Every store is a system call, so that none passes another."""
        with self._changed:  # `close` must not take the file away meanwhile
            self._check_open()
            header = slot * self._stride
            generation = self._generations[slot]
            self._store_generation(header, generation + 1)
            _write_all(self._file, data, header + HEADER_SIZE)
            self._store_generation(header, generation + 2)
            self._generations[slot] = generation + 2
            return generation + 2

    def _store_generation(self, header: int, generation: int) -> None:
        os.pwrite(self._file, _GENERATION.pack(generation), header + _GENERATION_AT)

    def _check_open(self) -> None:
        if not self._end.alive:
            raise ValueError("the region is closed")


def _folder() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _remove(file: int, path: Path, owner: int) -> None:
    os.close(file)
    if os.getpid() == owner:  # and not a process that was forked from it
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _bytes_of(frame: Frame) -> tuple[memoryview, media_pb2.PixelLayout | None]:
    """A frame's bytes, and the layout of one that has a shape."""
    if isinstance(frame, bytes | bytearray | memoryview):
        return memoryview(frame).cast("B"), None
    shaped = frame if isinstance(frame, RawFrame) else RawFrame.from_array(frame)
    return shaped.view, shaped.layout
