"""Ways of an image into the server: inline, by the id of an upload, through shared memory.

One caller sends a new frame each time, as a camera does; an id is that of an image uploaded before.
With the model `null` nothing is decoded and nothing runs, so only the transfer is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
from legato.v1 import (
    image_pb2,
    image_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    task_pb2,
)
from legato_client._images.sources import SharedFrames
from legato_client.cli.demo import LocalServer

from benchmarks import record
from benchmarks.image.charts import Photographer

START_TIMEOUT = 300.0
CHUNK = 256 * 1024
MAX_MESSAGE = 64 * 1024 * 1024
WAYS = ("inline", "shared", "id", "put")


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Frames of one kind: their bytes and, unless they are files, their layout."""

    name: str
    data: bytes
    layout: media_pb2.PixelLayout | None = None

    def fresh(self, number: int) -> bytes:
        """Return a frame unique to a number; a file may have trailing bytes."""
        mark = number.to_bytes(8, "little")
        return self.data + mark if self.layout is None else mark + self.data[8:]

    def inline(self, data: bytes) -> media_pb2.Image:
        """Return the frame as part of its request."""
        image = media_pb2.Image()
        if self.layout is None:
            image.encoded.data = data
        else:
            image.raw.layout.CopyFrom(self.layout)
            image.raw.data = data
        return image

    def upload(self, data: bytes) -> Iterator[image_pb2.PutImageRequest]:
        """Return the frame in chunks."""
        header = image_pb2.PutImageHeader(layout=self.layout, size_bytes=len(data))
        yield image_pb2.PutImageRequest(header=header)
        for at in range(0, len(data), CHUNK):
            yield image_pb2.PutImageRequest(chunk=data[at : at + CHUNK])


class Asker:
    """Requests one token about a frame, or only uploads it."""

    def __init__(self, channel: grpc.Channel, frames: SharedFrames) -> None:
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self._images: Any = image_pb2_grpc.ImageServiceStub(channel)
        self._frames = frames
        self._number = 0
        self._ids: dict[str, str] = {}

    def ask(self, kind: Kind, way: str) -> float:
        """Return milliseconds from a frame's bytes to the answer."""
        self._number += 1
        data = kind.fresh(self._number)
        if way == "id" and kind.name not in self._ids:
            self._ids[kind.name] = self._images.PutImage(kind.upload(data)).image.image_id
        start = time.perf_counter()
        if way == "put":
            image_id = self._images.PutImage(kind.upload(data)).image.image_id
        elif way == "shared":
            with self._frames.write(data, layout=kind.layout) as frame:
                self._query(frame.to_image())
        elif way == "id":
            self._query(media_pb2.Image(image_id=self._ids[kind.name]))
        else:
            self._query(kind.inline(data))
        spent = time.perf_counter() - start
        if way == "put":
            self._images.DeleteImage(image_pb2.DeleteImageRequest(image_id=image_id))
        return spent * 1000

    def _query(self, image: media_pb2.Image) -> None:
        request = inference_pb2.QueryRequest(question="?", sampling=task_pb2.Sampling(max_tokens=1))
        request.image.CopyFrom(image)
        self._inference.Query(request)


def kinds(width: int, height: int) -> list[Kind]:
    """Return noise as RGB and as NV12, and a photograph as JPEG."""

    def layout(form: media_pb2.PixelFormat.ValueType) -> media_pb2.PixelLayout:
        return media_pb2.PixelLayout(width=width, height=height, format=form)

    noise = np.random.default_rng(0).integers(0, 256, width * height * 3, dtype=np.uint8).tobytes()
    jpeg = Photographer(0, max(width, height)).jpeg(0, (width, height))
    return [
        Kind("RGB", noise, layout(media_pb2.PIXEL_FORMAT_RGB8)),
        Kind("NV12", noise[: width * height * 3 // 2], layout(media_pb2.PIXEL_FORMAT_NV12)),
        Kind("JPEG", jpeg),
    ]


def medians(ask: Callable[[Kind, str], float], kind: Kind, calls: int, block: int) -> list[float]:
    """Return P50 of each way, in turns; the first of each block is not counted."""
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    while len(spent["inline"]) < calls:
        for way, times in spent.items():
            ask(kind, way)
            times += [ask(kind, way) for _ in range(block)]
    return [statistics.median(times) for times in spent.values()]


def main(argv: Sequence[str]) -> int:
    """Measure every way of every kind, and record."""
    arguments = _parse(argv)
    serve = ["--model", arguments.model, "--device", "cpu", "--shared-images"]
    size = arguments.width * arguments.height * 3
    options = (("grpc.max_send_message_length", MAX_MESSAGE),)
    with ExitStack() as stack:
        server = stack.enter_context(LocalServer(serve))
        server.wait_until_serving(START_TIMEOUT, lambda _: None)
        channel = stack.enter_context(grpc.insecure_channel(server.target, options))
        asker = Asker(channel, stack.enter_context(SharedFrames(size)))
        measured = [
            (kind, medians(asker.ask, kind, arguments.calls, arguments.block))
            for kind in kinds(arguments.width, arguments.height)
        ]
    rows = [
        [
            *(kind.name, f"{len(kind.data) / 1e6:.2f}"),
            *(f"{value:.2f}" for value in times),
            *(f"{times[0] / value:.1f}" for value in times[1:3]),
        ]
        for kind, times in measured
    ]
    heads = ("frame", "MB", *(f"{way}, P50 ms" for way in WAYS), "inline/shared", "inline/id")
    figures = {
        "serve": serve,
        "size": (arguments.width, arguments.height),
        "calls": arguments.calls,
        "p50_ms": {kind.name: dict(zip(WAYS, times, strict=True)) for kind, times in measured},
    }
    title = f"Ways of an image, {arguments.width}x{arguments.height}: {' '.join(serve)}"
    record.write(arguments.name, title, figures, [record.table(heads, rows)])
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks intake", description=__doc__)
    parser.add_argument("--name", default="intake", help="of the record")
    parser.add_argument("--model", default="null")
    parser.add_argument("--width", type=int, default=1920)
    parser.add_argument("--height", type=int, default=1080)
    parser.add_argument("--calls", type=int, default=100, help="each way")
    parser.add_argument("--block", type=int, default=10, help="counted calls in a row")
    return parser.parse_args(argv)
