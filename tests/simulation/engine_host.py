"""Incarnations of an engine in virtual time, and the connections to it in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
    FINAL,
    Abort,
    Command,
    EngineMessage,
    Heartbeat,
    Loading,
    Ready,
    RunningAlone,
    ServedModel,
    Shutdown,
    Stop,
    Submit,
    decode_command,
    decode_engine_message,
    encode,
)
from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.models.frontend import PreparedImage
from legato_engine.scheduler.batch import Launch
from legato_engine.scheduler.interfaces import Clock
from legato_engine.scheduler.scheduler import Pipeline, Scheduler
from legato_engine.sequence import Constraint
from legato_engine.types import CachedImageRef, ImageProperties, ImageSource, Request, RequestKey

from tests.engine.scheduler.world import RandomBlocks, shared
from tests.fake_runner import FakeRunner
from tests.fakes import FakeTask

# ---------------------------------------------------------------- virtual time
# An asyncio loop whose clock jumps to the next timer.

START = 1000.0  # seconds


class NothingLeft(Exception):
    """No callback is due and no timer is set, but the main task has not ended."""


class _NoWait(selectors.DefaultSelector):
    """Polls, and lets the clock jump instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft
        self._loop.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs without sockets, threads or signals. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = START
        super().__init__(_NoWait(self))

    def time(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return round(self.now * 1e9)


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """Yield a loop that also drives `time.monotonic` and `time.perf_counter_ns`."""
    loop = VirtualLoop()
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "perf_counter_ns", loop.time_ns),
    ):
        try:
            yield loop
        finally:
            loop.close()


# ---------------------------------------------------------------- connections in memory
# Connections between service processes and the engine, in memory.
#
# A message arrives a random moment after it was sent, in order. What a dying engine had not
# flushed
# is lost, and so are the commands that it had not received; the service then sees the end.

TICK = 1e-9  # seconds


class Wire:
    """One direction of a connection."""

    def __init__(
        self, chance: random.Random, delay: float, arrived: Callable[[bytes], None]
    ) -> None:
        self._chance = chance
        self._delay = delay  # seconds at most
        self._arrived = arrived
        self._last = 0.0
        self.cut = False

    def send(self, frame: bytes) -> None:
        loop = asyncio.get_running_loop()
        # Timers of one moment have no order.
        now = loop.time()
        self._last = max(self._last + TICK, now + self._chance.uniform(0, self._delay))
        loop.call_at(self._last, self._deliver, frame)

    def _deliver(self, frame: bytes) -> None:
        if not self.cut:
            self._arrived(frame)

    @property
    def last(self) -> float:
        """When the latest message arrives."""
        return self._last


class Network:
    """Where service processes find the engine; one connection waits for each of them."""

    def __init__(self, chance: random.Random, delay: float = 0.002) -> None:
        self.chance = chance
        self.delay = delay
        self.transports: list[SimulatedTransport] = []
        self.engine: EngineEnd | None = None

    def connect(self, transport: SimulatedTransport) -> None:
        self.transports.append(transport)
        if self.engine is not None:
            self.engine.accept(transport)

    def disconnect(self, transport: SimulatedTransport) -> None:
        if transport in self.transports:
            self.transports.remove(transport)
            if self.engine is not None:
                self.engine.lost(transport)


class SimulatedTransport:
    """Has the interface of `EngineTransport`; `endpoint` is the network."""

    def __init__(
        self,
        endpoint: Network,
        on_message: Callable[[EngineMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        self._network = endpoint
        self._on_message = on_message
        self._on_end = on_end
        self._closed = False
        self._commands: Wire | None = None
        self._early: list[bytes] = []  # sent while no engine runs
        self.incoming = Wire(endpoint.chance, endpoint.delay, self._arrived)
        endpoint.connect(self)

    def attach(self, commands: Wire) -> None:
        self._commands = commands
        early, self._early = self._early, []
        for frame in early:
            commands.send(frame)

    def send(self, command: Command, *, at_once: bool = False) -> None:
        if self._closed:
            return
        if self._commands is None:
            self._early.append(encode(command))
        else:
            self._commands.send(encode(command))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.incoming.cut = True
            self._network.disconnect(self)

    def engine_died(self) -> None:
        """End after the messages that are under way."""
        if self in self._network.transports:
            self._network.transports.remove(self)
        loop = asyncio.get_running_loop()
        loop.call_at(max(self.incoming.last + TICK, loop.time()), self._ended)

    def _arrived(self, frame: bytes) -> None:
        if not self._closed:
            self._on_message(decode_engine_message(frame))

    def _ended(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_end()


class EngineEnd:
    """The engine's end of all connections; what `ServiceConnections` does."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._wires: dict[SimulatedTransport, Wire] = {}
        self._commands: deque[tuple[SimulatedTransport, Command]] = deque()
        self._owners: dict[RequestKey, SimulatedTransport] = {}
        self._unsent: list[tuple[SimulatedTransport, bytes]] = []
        self._status: Loading | Ready | None = None
        self.arrived = asyncio.Event()

    def open(self) -> None:
        assert self._network.engine is None, "two engines at once"
        self._network.engine = self
        for transport in list(self._network.transports):
            self.accept(transport)

    def accept(self, transport: SimulatedTransport) -> None:
        network = self._network
        wire = Wire(network.chance, network.delay, lambda frame: self._received(transport, frame))
        self._wires[transport] = wire
        transport.attach(wire)
        if self._status is not None:
            transport.incoming.send(encode(self._status))

    def lost(self, transport: SimulatedTransport) -> None:
        """A service process has gone: its open requests are aborted."""
        wire = self._wires.pop(transport, None)
        if wire is None:
            return
        wire.cut = True
        for key in [key for key, owner in self._owners.items() if owner is transport]:
            del self._owners[key]
            self._commands.append((transport, Abort(request_id=key)))
        self.arrived.set()

    def broadcast(self, message: Loading | Ready | Heartbeat | RunningAlone) -> None:
        if isinstance(message, (Loading, Ready)):
            self._status = message
        for transport in self._wires:
            transport.incoming.send(encode(message))

    def post(self, output: EngineMessage) -> None:
        """Send with the next `flush`."""
        owner = self._owners.get(output.request_id)  # type: ignore[union-attr,arg-type]
        if owner is None:
            return
        self._unsent.append((owner, encode(output)))
        if isinstance(output, FINAL):
            del self._owners[output.request_id]

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for transport, frame in unsent:
            if transport in self._wires:
                transport.incoming.send(frame)

    def receive(self) -> list[Command]:
        commands, self._commands = self._commands, deque()
        self.arrived.clear()
        return [command for _, command in commands if self._register(_, command)]

    def die(self) -> None:
        self._network.engine = None
        for wire in self._wires.values():
            wire.cut = True
        for transport in list(self._wires):
            transport.engine_died()
        self._wires.clear()

    def _register(self, transport: SimulatedTransport, command: Command) -> bool:
        match command:
            case Submit(request=request):
                if transport not in self._wires:
                    return False
                assert request.request_id not in self._owners, "a request id is used twice"
                self._owners[request.request_id] = transport
            case Abort(request_id=request_id):
                self._owners.pop(request_id, None)
            case Stop(request_id=request_id):
                return request_id in self._owners
            case Shutdown():
                return False
        return True

    def _received(self, transport: SimulatedTransport, frame: bytes) -> None:
        self._commands.append((transport, decode_command(frame)))
        self.arrived.set()


# ---------------------------------------------------------------- engine host
# Incarnations of an engine: the real `EngineCore` and scheduler on the fake device.

PREFIX = 5  # positions of BOS and an image
NAME = "simulated"
POISON = 10_000  # the seed of a request that no engine survives
INFO = ServedModel(
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
    max_images = 1
    places_images = False
    tasks = ("query",)
    constraints = (Constraint(),) * 8  # as many as `FakeTask` names
    vocab_size = 2**31

    def prefix_length(self, has_image: bool) -> int:
        return PREFIX if has_image else 1

    def make_task(self, request: Request, images: Sequence[PreparedImage] = ()) -> FakeTask:
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
        assert isinstance(source, CachedImageRef)
        if source.image_id not in ("img_0", "img_1", "img_2", "img_3"):
            raise ImageNotFound("no such image", resource=source.image_id)
        info = ImageProperties(image_id=source.image_id, width=4, height=4, cache_hit=False)
        image = PreparedImage(source.image_id, None, info, 48, self._chance.choice((0, 1, 3)))
        return PreprocessedImage(image, 0.0)

    def start(self, *_: Any, **__: Any) -> None:
        raise AssertionError("`find` returns every named image")

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
