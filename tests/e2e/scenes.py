"""Images that legato-tiny understands, and what is to be seen in them."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

from legato.v1 import inference_pb2, media_pb2, session_pb2, task_pb2
from legato_client import Box
from PIL import Image, ImageDraw

RED, BLUE, GREEN, GREY = (210, 30, 30), (30, 60, 200), (40, 160, 60), (225, 225, 225)
SIZE = (320, 240)
CIRCLE, SQUARE = (30, 60, 110, 140), (200, 90, 280, 170)  # pixels: left, top, right, bottom


@dataclasses.dataclass(frozen=True)
class Scene:
    """An image and the boxes of what is in it, by noun."""

    image: Image.Image
    boxes: dict[str, Box]

    def file(self, kind: str = "PNG", **options: Any) -> bytes:
        """The image as a file of that kind."""
        buffer = io.BytesIO()
        self.image.save(buffer, kind, **options)
        return buffer.getvalue()

    def message(self) -> media_pb2.Image:
        """The image, as a request carries it."""
        return media_pb2.Image(encoded=media_pb2.EncodedImage(data=self.file()))


def two_shapes(offset: int = 0) -> Scene:
    """A red circle on the left and a blue square on the right; `offset` pixels lower."""
    image = Image.new("RGB", SIZE, GREY)
    pen = ImageDraw.Draw(image)
    circle, square = (_lower(box, offset) for box in (CIRCLE, SQUARE))
    pen.ellipse(circle, fill=RED)
    pen.rectangle(square, fill=BLUE)
    return Scene(image, {"red circle": _box(circle), "blue square": _box(square)})


def many_circles(count: int = 8) -> Scene:
    """Red circles in two rows."""
    image = Image.new("RGB", SIZE, GREY)
    pen = ImageDraw.Draw(image)
    for number in range(count):
        left, top = 15 + 78 * (number % 4), 40 + 100 * (number // 4)
        pen.ellipse((left, top, left + 52, top + 52), fill=RED)
    return Scene(image, {})


def huge(side: int = 6000) -> bytes:
    """A small file that takes the engine a good part of a second to decode."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), GREEN).save(buffer, "WEBP", quality=50, method=0)
    return buffer.getvalue()


def overlap(one: Box, other: Box) -> float:
    """Intersection over union, 0..1."""
    width = min(one.x_max, other.x_max) - max(one.x_min, other.x_min)
    height = min(one.y_max, other.y_max) - max(one.y_min, other.y_min)
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (_area(one) + _area(other) - shared)


LONG_ANSWER = task_pb2.Sampling(temperature=100.0, top_p=1.0, seed=3, max_tokens=200)
"""Tokens at random: nonsense, the same each time."""


def long_query(**fields: Any) -> inference_pb2.QueryRequest:
    """A request that a server started with `SLOWLY` decodes for seconds."""
    return inference_pb2.QueryRequest(question="hello", sampling=LONG_ANSWER, **fields)


def long_stream(
    max_tokens: int = LONG_ANSWER.max_tokens, **fields: Any
) -> inference_pb2.GenerateRequest:
    """The same as a stream, of that many tokens."""
    task = task_pb2.Task(query=task_pb2.QueryTask(question="hello"), sampling=LONG_ANSWER)
    task.sampling.max_tokens = max_tokens
    return inference_pb2.GenerateRequest(task=task, **fields)


def session_of(asked: inference_pb2.GenerateRequest) -> list[session_pb2.SessionRequest]:
    """The same as the one frame of a session."""
    frame = session_pb2.Frame(
        stamp=media_pb2.FrameStamp(sequence=1), image=asked.image, extra_tasks=[asked.task]
    )
    return [
        session_pb2.SessionRequest(open=session_pb2.SessionOpen(stream_deltas=True)),
        session_pb2.SessionRequest(frame=frame),
    ]


def _area(box: Box) -> float:
    return (box.x_max - box.x_min) * (box.y_max - box.y_min)


def _lower(box: tuple[int, int, int, int], offset: int) -> tuple[int, int, int, int]:
    left, top, right, bottom = box
    return left, top + offset, right, bottom + offset


def _box(pixels: tuple[int, int, int, int]) -> Box:
    left, top, right, bottom = pixels
    return Box(left / SIZE[0], top / SIZE[1], (right + 1) / SIZE[0], (bottom + 1) / SIZE[1])
