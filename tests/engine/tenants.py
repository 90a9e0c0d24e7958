"""Two tenants of one engine, and what each observes."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from hypothesis import strategies as st
from legato_engine.images.decoding import content_key, image_id
from legato_engine.ipc.messages import (
    Done,
    DropImage,
    EngineOutput,
    Failed,
    HoldImage,
    ImageDropped,
    ImageHeld,
    Started,
)
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import (
    CachedImage,
    DetectTask,
    EncodedImage,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
)
from PIL import Image

NAMES = ("acme", "rival")
KINDS = ("show", "show_unkept", "name", "ask", "hold", "drop")

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(KINDS), st.integers(0, 1)),
    min_size=2,
    max_size=12,
)
"""Operations of two tenants on two images or two questions, in any order."""

Operation = tuple[str, str, int]


class Observation(NamedTuple):
    """What a caller is told of an operation."""

    outcome: str
    image_id: str = ""
    cache_hit: bool | None = None
    cached_tokens: int = 0


def _png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


IMAGES = (_png(0), _png(1))
_IDS = tuple(image_id(content_key(data)) for data in IMAGES)
_QUESTIONS = ("what is it that the picture shows to the left of the cup", "how many cups are there")

Make = Callable[[BlobReader, Callable[[EngineOutput], None], Callable[[], None]], Any]


class Tenants:
    """An engine, made by `make`, in use by several tenants."""

    def __init__(self, make: Make) -> None:
        self._blobs = BlobStore(new_namespace())
        self._outputs: dict[RequestKey, list[EngineOutput]] = {}
        self._woken = threading.Event()
        self._names = itertools.count()
        self._engine = make(BlobReader(self._blobs.namespace), self._take, self._woken.set)

    def perform(self, operations: Sequence[Operation]) -> list[Observation]:
        """Perform operations at the same time, each to its end."""
        keys = [self._start(*operation) for operation in operations]
        ends = (Done, Failed, ImageHeld, ImageDropped)
        while not all(
            any(isinstance(output, ends) for output in self._outputs.get(key, ())) for key in keys
        ):
            if not self._engine.busy:
                self._woken.wait(0.05)
                self._woken.clear()
            self._engine.step()
        return [_observation(self._outputs[key]) for key in keys]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if hasattr(self._engine, "close"):
            while self._engine.busy:
                self._engine.step()
            self._engine.close()
        self._blobs.close()

    def _take(self, output: EngineOutput) -> None:
        self._outputs.setdefault(output.request_id, []).append(output)

    def _start(self, tenant: str, kind: str, index: int) -> RequestKey:
        # The tenants' ids are the same, and their owner: only the tenant tells them apart.
        key = RequestKey(f"r{next(self._names)}", tenant)
        if kind == "hold":
            image = self._encoded(index)
            self._engine.hold(HoldImage(request_id=key, image=image, owner="o", ttl=60.0))
        elif kind == "drop":
            self._engine.drop(DropImage(request_id=key, image_id=_IDS[index], owner="o"))
        else:
            self._engine.submit(
                Request(
                    request_id=key,
                    task=QueryTask(question=_QUESTIONS[index])
                    if kind == "ask"
                    else DetectTask(object="cup"),
                    image=self._image(kind, index),
                    cache_image=kind != "show_unkept",
                    sampling=SamplingParams(max_tokens=4),
                )
            )
        return key

    def _image(self, kind: str, index: int) -> EncodedImage | CachedImage | None:
        if kind == "ask":
            return None
        return CachedImage(image_id=_IDS[index]) if kind == "name" else self._encoded(index)

    def _encoded(self, index: int) -> EncodedImage:
        return EncodedImage(blob=self._blobs.put(IMAGES[index]), mime_type="image/png")


def check_each_is_as_if_alone(make: Callable[[], Tenants], operations: list[Operation]) -> None:
    """Perform the operations, pairs of different tenants at once, and each tenant's own alone."""
    together: dict[str, list[Observation]] = {name: [] for name in NAMES}
    with make() as world:
        for batch in _batches(operations):
            for (name, _, _), observation in zip(batch, world.perform(batch), strict=True):
                together[name].append(observation)
    for name in NAMES:
        own = [operation for operation in operations if operation[0] == name]
        with make() as world:
            alone = [world.perform([operation])[0] for operation in own]
        assert together[name] == alone


def _batches(operations: list[Operation]) -> list[list[Operation]]:
    batches: list[list[Operation]] = []
    for operation in operations:
        if batches and len(batches[-1]) == 1 and batches[-1][0][0] != operation[0]:
            batches[-1].append(operation)
        else:
            batches.append([operation])
    return batches


def _observation(outputs: list[EngineOutput]) -> Observation:
    last = outputs[-1]
    match last:
        case Failed():
            return Observation(last.error.kind)
        case Done():
            started = next(output for output in outputs if isinstance(output, Started))
            assert started.cached_tokens == last.usage.cached_tokens
            image = last.image
            return Observation(
                "Done",
                image.image_id if image else "",
                image.cache_hit if image else None,
                last.usage.cached_tokens,
            )
        case ImageHeld():
            return Observation("ImageHeld", last.image.image_id, last.image.cache_hit)
    return Observation(type(last).__name__)
