"""The engine keeps tenants apart, with a model and without."""

from __future__ import annotations

import dataclasses
import io
import itertools
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.images.decoding import content_key, image_id
from legato_engine.ipc.messages import (
    Done,
    DropImage,
    EngineOutput,
    Failed,
    HoldImage,
    ImageDropped,
    ImageHeld,
    PrefillStarted,
)
from legato_engine.null_engine import NullEngine
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import (
    CachedImageRef,
    DetectSpec,
    EncodedImage,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
)
from PIL import Image

# ---------------------------------------------------------------- two tenants

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
                    task=QuerySpec(question=_QUESTIONS[index])
                    if kind == "ask"
                    else DetectSpec(object="cup"),
                    image=self._image(kind, index),
                    cache_image=kind != "show_unkept",
                    sampling=SamplingParams(max_tokens=4),
                )
            )
        return key

    def _image(self, kind: str, index: int) -> EncodedImage | CachedImageRef | None:
        if kind == "ask":
            return None
        return CachedImageRef(image_id=_IDS[index]) if kind == "name" else self._encoded(index)

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
            started = next(output for output in outputs if isinstance(output, PrefillStarted))
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


# ---------------------------------------------------------------- with a model

CONFIG = EngineConfig(
    model="random-tiny", device="cpu", threads=1, max_running=3, max_waiting=8, page_size=16
)


@pytest.fixture(scope="module")
def assembly():
    """One small model for all tests."""
    made = assemble(CONFIG)
    yield made
    made.device.close()


@pytest.fixture(scope="module")
def make_world(assembly):
    """Return a function that makes two tenants of a new engine."""

    def make():
        fresh = dataclasses.replace(assembly)
        return Tenants(lambda blobs, send, wake: fresh.core(blobs=blobs, send=send, wake=wake))

    return make


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(OPERATIONS)
def test_each_tenant_observes_what_it_would_alone(make_world, operations):
    """Hits, ids, cached tokens, deletions and errors do not depend on what another tenant does."""
    check_each_is_as_if_alone(make_world, operations)


@pytest.mark.parametrize("kind", ["show", "ask"])
def test_what_another_tenant_sent_is_a_miss(make_world, kind):
    """Another tenant's image or prompt is no hit; the tenant's own is, the positive control."""
    with make_world() as world:
        (first,), (other,), (again,) = (
            world.perform([(tenant, kind, 0)]) for tenant in ("acme", "rival", "acme")
        )
    assert other == first
    assert other.cached_tokens == 0
    assert not other.cache_hit
    assert again.cached_tokens > 0


def test_the_time_to_find_a_known_image_is_not_spent_on_anothers(make_world):
    """Bytes that only another tenant sent are not looked up before they are decoded."""
    with make_world() as world:
        world.perform([("acme", "show", 0)])
        seen = world._engine.preprocessor._seen
        data = memoryview(IMAGES[0])
        assert seen.has("acme", data)
        assert not seen.has("rival", data)


# ---------------------------------------------------------------- without a model


def null_world():
    """Two tenants of a null engine."""
    config = EngineConfig(model="null")
    return Tenants(lambda blobs, send, _wake: NullEngine(config, blobs=blobs, send=send))


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_each_tenant_of_a_null_engine_observes_what_it_would_alone(operations):
    """Hits, ids, counts, deletions and errors do not depend on what another tenant does."""
    check_each_is_as_if_alone(null_world, operations)


def test_a_tenant_cannot_ask_about_or_delete_anothers_image():
    """The id of another tenant's image is unknown, before and after an attempt to delete it."""
    with null_world() as world:
        (held,) = world.perform([("acme", "hold", 0)])
        assert [
            each[0] for each in world.perform([("rival", "name", 0), ("rival", "drop", 0)])
        ] == [
            "ImageNotFound",
            "ImageNotFound",
        ]
        (named,) = world.perform([("acme", "name", 0)])
        assert named[1:3] == (held[1], True)
