"""Uploads that cannot be decoded leave nothing behind, in either process."""

import asyncio
import functools
import os
from collections.abc import Callable

import grpc
import pytest
from legato.v1 import image_pb2, image_pb2_grpc, inference_pb2, inference_pb2_grpc, media_pb2

from tests.e2e.server import ENVIRONMENT, Server, open_files, own_bytes
from tests.hostile_images import file, smooth

MAX_GROWTH = 3 * 1024 * 1024  # bytes of each process
MAX_DESCRIPTORS = 50  # of each process
AT_A_TIME = 16
SETTLING = 500  # calls before the first reading
LONG_SETTLING = 20_000  # until rings of bounded size are full, and allocators have their arenas
KINDS = ("PNG", "JPEG", "progressive", "WEBP")

LEAKS = """
import legato_engine.shm as reader
import legato_service.services.image as servicer
kept = []
def leaking(function):
    def call(*arguments):
        result = function(*arguments)
        kept.append((result, bytearray(20_000)))
        return result
    return call
reader._take_file = leaking(reader._take_file)
servicer.read_header = leaking(servicer.read_header)
"""
"""A `sitecustomize` of a deliberate leak: each upload keeps memory in both processes, and a
descriptor in the engine."""


@functools.cache
def half(kind: str) -> bytes:
    """The first half of a good file."""
    options = {"progressive": True} if kind == "progressive" else {}
    data = file(smooth(64, 48), "JPEG" if kind == "progressive" else kind, **options)
    return data[: len(data) // 2]


def broken(kind: str, number: int) -> bytes:
    """A file with a good header that is cut off; each number has other bytes, of no marker."""
    return half(kind) + f"{number:08}".encode()


class Growth:
    """How far the processes of a server grow from the first reading."""

    def __init__(self, server: Server) -> None:
        self._pids = {"service": server.process.pid, "engine": server.engine_pid}
        self._before = self._read()

    def _read(self) -> dict[str, tuple[int, int]]:
        return {name: (own_bytes(pid), open_files(pid).total()) for name, pid in self._pids.items()}

    def over_limit(self) -> list[str]:
        """What grew by too much."""
        found = []
        for name, (memory, descriptors) in self._read().items():
            before = self._before[name]
            if memory - before[0] > MAX_GROWTH:
                found.append(f"{name}: {memory - before[0]} bytes")
            if descriptors - before[1] > MAX_DESCRIPTORS:
                found.append(f"{name}: {descriptors - before[1]} descriptors")
        print(self._before, self._read())  # noqa: T201 - the figures of a failed run
        return found


async def _upload(channel: grpc.aio.Channel, data: bytes) -> None:
    stub = image_pb2_grpc.ImageServiceStub(channel)
    parts = [
        image_pb2.PutImageRequest(header=image_pb2.PutImageHeader()),
        image_pb2.PutImageRequest(chunk=data),
    ]
    await stub.PutImage(iter(parts))


async def _detect(channel: grpc.aio.Channel, data: bytes) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    image = media_pb2.Image(encoded=media_pb2.EncodedImage(data=data))
    await stub.Detect(inference_pb2.DetectRequest(image=image, object="cat"))


def send(address: str, numbers: range) -> set[tuple[grpc.StatusCode, str]]:
    """Send broken images, uploads and requests in turn; return the codes and fields of failure."""
    ends: set[tuple[grpc.StatusCode, str]] = set()

    async def send_some(channel: grpc.aio.Channel, mine: range) -> None:
        for number in mine:
            call: Callable[..., object] = _detect if number % 2 else _upload
            data = broken(KINDS[number // 2 % len(KINDS)], number)
            try:
                await call(channel, data)  # type: ignore[misc]
                ends.add((grpc.StatusCode.OK, ""))
            except grpc.aio.AioRpcError as error:
                ends.add((error.code(), (error.details() or "").partition(":")[0]))

    async def send_all() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            shares = [numbers[start::AT_A_TIME] for start in range(AT_A_TIME)]
            await asyncio.gather(*(send_some(channel, share) for share in shares))

    asyncio.run(send_all())
    return ends


def check(server: Server, count: int, settling: int) -> list[str]:
    """What grows by too much over `count` broken images."""
    refused = {
        (grpc.StatusCode.INVALID_ARGUMENT, "chunk"),
        (grpc.StatusCode.INVALID_ARGUMENT, "image.encoded.data"),
    }
    assert send(server.address, range(settling)) == refused
    growth = Growth(server)
    assert send(server.address, range(settling, settling + count)) == refused
    server.settle()
    return growth.over_limit()


@pytest.mark.timeout(600)
def test_broken_uploads_leave_neither_memory_nor_descriptors(tmp_path):
    """A thousand images that cannot be decoded: no process grows, and none restarts."""
    with Server(tmp_path) as server:
        engine = server.engine_pid
        assert check(server, 1000, SETTLING) == []
        assert server.engine_pid == engine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gate_finds_a_deliberate_leak(tmp_path):
    """The control: what the same gate says of a server that keeps something of every upload."""
    (tmp_path / "sitecustomize.py").write_text(LEAKS)
    path = os.pathsep.join((str(tmp_path), ENVIRONMENT["PYTHONPATH"]))
    with Server(tmp_path, environment={"PYTHONPATH": path}) as server:
        found = " ".join(check(server, 400, 100))
    assert "service: " in found
    assert "engine: " in found
    assert "descriptors" in found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_broken_uploads_leave_nothing(tmp_path):
    """The same bounds, a hundred times as many."""
    with Server(tmp_path) as server:
        assert check(server, 100_000, LONG_SETTLING) == []
