"""An engine without its process, its blobs and its outputs."""

import dataclasses
import io
import threading

import msgspec
import numpy as np
import pytest
from legato_engine.config import EngineConfig
from legato_engine.errors import from_value
from legato_engine.ipc.messages import (
    Done,
    EngineMessage,
    Failed,
    HoldImage,
    ImageHeld,
    SchedulerLoad,
)
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import EncodedImage, QuerySpec, Request, RequestKey, SamplingParams
from PIL import Image

CONFIG = EngineConfig(
    model="random-tiny",
    device="cpu",
    threads=1,
    pipeline_depth=2,
    max_running=3,
    max_waiting=8,
    page_size=16,
)

LONG = "why? " * 10_000

EITHER_KIND = pytest.mark.parametrize(
    "assembly", ["random-tiny", "random-tiny3"], indirect=True, scope="module"
)


def png(seed=0, size=(40, 30), **options):
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


class World:
    """An engine, the blobs it reads and the outputs it sent."""

    def __init__(self, assembly, **changes):
        config = msgspec.structs.replace(assembly.config, **changes)
        assembly = dataclasses.replace(assembly, config=config)
        self.outputs: list[EngineMessage] = []
        self.woken = threading.Event()
        self.blobs = BlobStore(new_namespace())
        self.core = assembly.core(
            blobs=BlobReader(self.blobs.namespace), send=self.outputs.append, wake=self.woken.set
        )

    def encoded(self, data):
        """Put an image file into a blob."""
        return EncodedImage(blob=self.blobs.put(data), mime_type="image/png")

    def submit(self, name, task, image=None, tenant="", **fields):
        """Submit a request."""
        key = RequestKey(name, tenant)
        sampling = fields.pop("sampling", SamplingParams(max_tokens=12))
        self.core.submit(
            Request(request_id=key, task=task, image=image, sampling=sampling, **fields)
        )

    def of(self, name, kind=object):
        """Return the outputs of a request."""
        return [r for r in self.outputs if isinstance(r, kind) and r.request_id.caller_id == name]

    def run(self, *names):
        """Step until every named request has ended; return their final outputs."""
        while not all(self.of(name, Done | Failed) for name in names):
            self._step()
        return [self.of(name, Done | Failed)[-1] for name in names]

    def hold(self, data, name="h", ttl=60.0):
        """Lease an image; return the final output."""
        command = HoldImage(
            request_id=RequestKey(name), image=self.encoded(data), owner="me", ttl=ttl
        )
        self.core.hold(command)
        while not self.of(name, ImageHeld | Failed):
            self._step()
        return self.of(name, ImageHeld | Failed)[-1]

    def error(self, name):
        """Return a failed request's error."""
        return from_value(self.of(name, Failed)[-1].error)

    def close(self):
        """Finish; everything must have been freed."""
        while self.core.busy:
            self.core.step()
        load = self.core.load()
        assert load == SchedulerLoad(
            pipeline_depth=load.pipeline_depth,
            pages_total=load.pages_total,
            prefix_pages=load.prefix_pages,
            images_cached=load.images_cached,
            kv=load.kv,
        )
        self.core.close()
        self.blobs.close()

    def _step(self):
        """Wait for work if there is none, then step."""
        if not self.core.busy:
            self.woken.wait(10)
            self.woken.clear()
        self.core.step()


class GatedFrontend:
    """A frontend whose images and long questions are prepared only once `gate` is set."""

    def __init__(self, frontend):
        self._frontend = frontend
        self.gate = threading.Event()
        self.entered = threading.Event()

    def prepare_image(self, *arguments):
        """Wait for the gate."""
        self.entered.set()
        self.gate.wait(30)
        return self._frontend.prepare_image(*arguments)

    def make_task(self, request, images=()):
        """Wait for the gate if the question is `LONG`."""
        if isinstance(request.task, QuerySpec) and request.task.question == LONG:
            self.entered.set()
            assert self.gate.wait(30), "a long text is prepared on the engine's own thread"
        return self._frontend.make_task(request, images)

    def __getattr__(self, name):
        return getattr(self._frontend, name)
