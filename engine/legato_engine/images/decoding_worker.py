"""A process that decodes image files: `python -m legato_engine.images.decoding_worker`.

File and pixels are in memory shared with the engine. The kernel ends the process when an image
takes more CPU time than its limit, and refuses it memory beyond its limit. It is confined to that
memory and its connection (`sandbox`); whatever its libraries write to standard error is logged by
the engine.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import signal
import socket
import sys

import msgspec
import numpy as np
from PIL import Image, MpoImagePlugin, TiffImagePlugin, WebPImagePlugin

from legato_engine import failpoints, sandbox
from legato_engine.errors import (
    ErrorValue,
    ImageTooLarge,
    InternalError,
    LegatoError,
    to_value,
)
from legato_engine.images.decoding import decode_file
from legato_engine.images.headers import ImageHeader
from legato_engine.images.memory import Pixels
from legato_engine.parent_process import bind_to_parent

MAX_MESSAGE = 64 * 1024  # bytes of a job or a reply
_STATM_SIZE, _STATM_DATA = 0, 5  # fields of /proc/self/statm
_MAX_FILES = 16  # one of them temporarily: Python duplicates a mapped descriptor
_LOADED_LATE = (MpoImagePlugin, TiffImagePlugin, WebPImagePlugin)
"""Modules that Pillow loads at the first image that needs them, which a confined process cannot."""


class Job(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Image file at the start of the shared memory; its pixels are written at `pixels_at`."""

    header: ImageHeader
    num_bytes: int  # of the file
    pixels_at: int
    memory_size: int  # of the shared memory
    max_pixels: int
    max_seconds: float  # of CPU time
    max_memory: int  # bytes in addition to the shared memory


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """Result of a decoded image, with its displayed sides."""

    height: int
    width: int


class NotDecoded(msgspec.Struct, frozen=True, tag=True):
    """Result of an image that could not be decoded."""

    error: ErrorValue


Reply = Decoded | NotDecoded


def main() -> int:
    """Decode one image after another until the engine closes the connection."""
    parser = argparse.ArgumentParser(prog="legato_engine.images.decoding_worker")
    parser.add_argument("--connection", type=int, required=True, help="inherited SEQPACKET socket")
    parser.add_argument("--memory", type=int, required=True, help="inherited memory file")
    parser.add_argument("--parent", type=int, required=True, help="process id of the engine")
    parser.add_argument("--nice", type=int, default=0)
    arguments = parser.parse_args()
    bind_to_parent(arguments.parent)
    os.nice(arguments.nice)
    os.set_blocking(sys.stderr.fileno(), False)  # a full pipe must not stop it
    memory: mmap.mmap | None = None  # shared with the engine
    statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    Image.preinit()
    decoder, encoder = msgspec.msgpack.Decoder(Job), msgspec.msgpack.Encoder()
    with socket.socket(fileno=arguments.connection) as connection:
        if problem := sandbox.confine(max_files=_MAX_FILES):
            print(problem, file=sys.stderr)  # noqa: T201 - the engine logs it
        while message := connection.recv(MAX_MESSAGE):
            job = decoder.decode(message)
            signal.setitimer(signal.ITIMER_PROF, job.max_seconds)  # SIGPROF ends the process
            _limit_memory(statm, job)
            if memory is None or len(memory) != job.memory_size:
                memory = mmap.mmap(arguments.memory, job.memory_size)
            reply = _run(job, memoryview(memory))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(encoder.encode(reply))
    return 0


def _run(job: Job, memory: memoryview) -> Reply:
    try:
        height, width = _decode(job, memory)
        return Decoded(height, width)
    except LegatoError as error:
        return NotDecoded(to_value(error))
    except MemoryError:
        too_large = ImageTooLarge(
            f"decoding the image takes more than {job.max_memory} bytes of memory",
            field="image",
            limit=job.max_memory,
            unit="bytes of memory",
        )
        return NotDecoded(to_value(too_large))
    except Exception as error:  # noqa: BLE001 - the engine logs it
        return NotDecoded(to_value(InternalError(f"{type(error).__name__}: {error}")))


def _decode(job: Job, memory: memoryview) -> tuple[int, int]:
    data = memory[: job.num_bytes].toreadonly()
    if failpoints.hit("decode.begin"):
        data = data[: len(data) // 2]
    size = job.header.num_pixels * 3
    target_N = np.frombuffer(memory, np.uint8, size, job.pixels_at)

    def allocate(shape: tuple[int, int, int]) -> Pixels:
        return target_N.reshape(shape)

    pixels_HWC = decode_file(data, job.header, allocate, max_pixels=job.max_pixels)
    if not np.may_share_memory(pixels_HWC, target_N):
        np.copyto(target_N.reshape(pixels_HWC.shape), pixels_HWC)
    return pixels_HWC.shape[0], pixels_HWC.shape[1]


def _limit_memory(statm: int, job: Job) -> None:
    """Limit private memory and the total including shared memory."""
    pages = [int(field) for field in os.pread(statm, 200, 0).split()]
    for kind, used, more in (
        (resource.RLIMIT_DATA, pages[_STATM_DATA], job.max_memory),
        (resource.RLIMIT_AS, pages[_STATM_SIZE], job.max_memory + job.memory_size),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (used * mmap.PAGESIZE + more, hard))


if __name__ == "__main__":
    sys.exit(main())
