"""Incarnations of an engine: the real `EngineCore` and scheduler on the fake device."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

from legato_engine.core.engine_core import EngineCore
from legato_engine.core.leases import LeaseHandler
from legato_engine.core.output import OutputSink
from legato_engine.core.preprocessor import PreprocessedImage
from legato_engine.core.quarantine import Quarantine
from legato_engine.core.refinements import Refinements
from legato_engine.core.requests import RequestTable
from legato_engine.errors import ImageNotFound
from legato_engine.images.cache import ImageCache, ImageKey, ImageLeases
from legato_engine.images.memory import ByteQuota
from legato_engine.ipc.messages import (
    Abort,
    Command,
    Heartbeat,
    ModelInfo,
    Ready,
    RunningAlone,
    Stop,
    Submit,
)
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.models.bundle import PreparedImage
from legato_engine.scheduler.batch import Launch
from legato_engine.scheduler.interfaces import Clock
from legato_engine.scheduler.scheduler import Pipeline, Scheduler
from legato_engine.sequence import Constraint
from legato_engine.types import CachedImage, ImageInfo, ImageSource, Request

from tests.engine.scheduler.world import RandomBlocks, shared
from tests.fake_runner import FakeRunner
from tests.fakes import FakeTask
from tests.simulation.link import EngineEnd, Network

PREFIX = 5  # positions of BOS and an image
NAME = "simulated"
POISON = 10_000  # the seed of a request that no engine survives
INFO = ModelInfo(
    name=NAME,
    device="none",
    tasks=("query",),
    max_context_tokens=256,
    max_output_tokens=64,
    max_running=4,
    max_waiting=256,
    num_parameters=0,
    dtype="none",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of an engine."""

    depth: int = 2
    num_pages: int = 33
    page_size: int = 4
    num_rows: int = 4
    max_waiting: int = 64
    max_draft: int = 0  # 0: no speculation
    step_seconds: float = 0.004


class LoopClock(Clock):
    """The clock of the running loop."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time

    def perf_ns(self) -> int:
        return round(self.now() * 1e9)


class FakeFrontend:
    """Reads a task's sizes from the question: `<prompt tokens> <constrained>`."""

    name = NAME
    takes_images = True
    tasks = ("query",)
    constraints = (Constraint(),) * 8  # as many as `FakeTask` names
    vocab_size = 2**31

    def prefix_length(self, has_image: bool) -> int:
        return PREFIX if has_image else 1

    def make_task(self, request: Request) -> FakeTask:
        return task_of(request)


def task_of(request: Request) -> FakeTask:
    num_prompt, constrained = request.task.question.split()  # type: ignore[union-attr]
    return FakeTask(
        seed=request.sampling.seed or 0,
        num_prompt=int(num_prompt),
        max_tokens=request.sampling.max_tokens or 1,
        constrained=constrained == "1",
    )


class FakePreprocessor:
    """Knows the images `img_0` to `img_3`; some take a moment."""

    images_cached = 0

    def __init__(self, chance: random.Random, wake: Callable[[], None]) -> None:
        self._chance = chance
        self._wake = wake

    def find(self, source: ImageSource, **_: Any) -> PreprocessedImage | None:
        assert isinstance(source, CachedImage)
        if source.image_id not in ("img_0", "img_1", "img_2", "img_3"):
            raise ImageNotFound("no such image", resource=source.image_id)
        info = ImageInfo(image_id=source.image_id, width=4, height=4, cache_hit=False)
        image = PreparedImage(source.image_id, None, info, 48, self._chance.choice((0, 1, 3)))
        return PreprocessedImage(image, 0.0)

    def close(self) -> None:
        pass


class EngineDied(Exception):
    """The poisoned request ended the engine."""


class MortalRunner(FakeRunner):
    """Dies of a launch with a request whose seed is `POISON`."""

    def forward(self, launch: Launch) -> None:
        if any(row.sequence.task.sampling.seed == POISON for row in launch.plan.rows):
            raise EngineDied
        super().forward(launch)


class Incarnation:
    """One engine process, from its start to its death."""

    def __init__(self, network: Network, shape: Shape, chance: random.Random) -> None:
        self._chance = chance
        self._shape = shape
        self.end = EngineEnd(network)
        self._woken = asyncio.Event()
        table = RequestTable(wake=self._wake)
        refinements = Refinements(None, table, send=self.end.post)
        sink = OutputSink(NAME, table, send=self.end.post, finish=refinements.finish)
        self.manager = KVCacheManager(shape.num_pages, shape.page_size, shape.num_rows)
        blocks = RandomBlocks(shape.max_draft, chance.getrandbits(32)) if shape.max_draft else None
        scheduler = Scheduler(
            MortalRunner(shape.page_size, seed=chance.getrandbits(32)),
            self.manager,
            Pipeline(shape.depth),
            LoopClock(),
            sink,
            max_waiting=shape.max_waiting,
            limits=shared(chance.choice((1, 3))),
            block_sizes=blocks,
        )
        preprocessor: Any = FakePreprocessor(chance, self._wake)
        frontend: Any = FakeFrontend()
        cache = ImageCache[ImageKey, PreparedImage](0)
        leases = LeaseHandler(
            preprocessor,
            ImageLeases(cache, ByteQuota("images", per_caller=0, total=0)),
            send=self.end.post,
        )
        self.core = EngineCore(
            frontend, scheduler, table, preprocessor, leases, None, refinements, sink
        )
        self.table = table
        self._quarantine = Quarantine(lambda: self.core.idle, self._apply, self._announce)
        self.steps = 0

    def _wake(self) -> None:
        self.end.arrived.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        self.end.open()
        self.end.broadcast(Ready(model=INFO, pid=1))
        try:
            while True:
                self.end.flush()
                for command in self.end.receive():
                    self._quarantine.receive(command)
                self._quarantine.advance()
                worked = self.core.step()
                self.steps += 1
                if self._chance.random() < 0.05:
                    self._beat()
                await self._sleep(worked=worked)
        finally:
            self.end.die()

    async def _sleep(self, *, worked: bool) -> None:
        loop = asyncio.get_running_loop()
        if worked or self.core.busy or (self._quarantine.num_held and self.core.idle):
            await asyncio.sleep(self._chance.uniform(0.1, 1) * self._shape.step_seconds)
            return
        self.end.flush()
        deadline = self.core.next_deadline()
        try:
            async with asyncio.timeout_at(deadline if deadline < loop.time() + 1e6 else None):
                await self.end.arrived.wait()
        except TimeoutError:
            pass

    def _beat(self) -> None:
        load = self.core.load()
        self.end.broadcast(Heartbeat(step=self.core.steps_committed, load=load, estimated_wait=0.0))

    def _announce(self, message: RunningAlone) -> None:
        self.end.flush()
        self.end.broadcast(message)

    def _apply(self, command: Command) -> None:
        match command:
            case Submit(request=request):
                self.core.submit(request)
            case Abort(request_id=request_id):
                self.core.abort(request_id)
            case Stop(request_id=request_id):
                self.core.stop(request_id)

    def check_rest(self) -> None:
        """Everything that requests held was given back."""
        load = self.core.load()
        assert not self.core.busy
        assert self._quarantine.num_held == 0, "a command is held back"
        assert len(self.table) == 0, "a request is left in the table"
        held = (load.running, load.waiting, load.inflight, load.rows_used, load.pages_used)
        assert held == (0, 0, 0, 0, 0), f"resources are in use: {load}"
        self.manager.check()
