"""The engines of a server."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from legato_engine.client import monitor
from legato_engine.client.monitor import EngineState
from legato_engine.client.request_stream import RequestStream
from legato_engine.core.images import CachedImage
from legato_engine.errors import EngineLost, ImageNotFound
from legato_engine.ipc.commands import DropImage, HoldImage
from legato_engine.ipc.figures import Load
from legato_engine.ipc.messages import Done, ImageHeld, ModelInfo, Started
from legato_engine.shm.blob_store import BlobStore

from legato_service.engine import Engine
from legato_service.engines.directory import Directory, Key, image_key
from legato_service.engines.routing import Candidate, choose, least_loaded
from legato_service.engines.totals import total_load

_READY = EngineState.READY  # looking up a member of an enum is slow
_STANDING = (
    EngineState.READY,
    EngineState.HUNG,
    EngineState.STARTING,
    EngineState.LOST,
    EngineState.DRAINING,
    EngineState.STOPPED,
)
"""From the best: the state of several engines is that of the best one."""
_RECOMPUTING = 0.05  # seconds to prepare an image and compute its positions, before any was seen
_LATEST_SHARE = 0.1  # of a new figure in the mean

Keys = Sequence[Key]
"""What a request needs of an engine, the most valuable first."""


class Held(NamedTuple):
    """A hold, and the engine that has begun it."""

    engine: Engine
    reply: ImageHeld


class EngineGroup:
    """Engines of one model, each with a device, a queue and caches of its own.

    A request goes where it would wait least, or to the engine that holds what it needs
    (`routing`). The requests of a lost engine go on with the others. Belongs to one event loop;
    each service process routes by itself.
    """

    def __init__(
        self, members: Sequence[Engine], *, affinity: bool = True, has_peers: bool = False
    ) -> None:
        """`has_peers`: other service processes use the engines, too."""
        self.members = tuple(members)
        self._affinity = affinity
        self._has_peers = has_peers
        self._directory = Directory()
        self._turn = 0
        self._recomputing = _RECOMPUTING
        self._subscribers: list[Callable[[EngineState], None]] = []
        for each in self.members:
            each.subscribe(functools.partial(self._on_state, each))
            if len(self.members) > 1:
                each.siblings = self
        self._note_serving()

    # ------------------------------------------------------------ state

    @property
    def state(self) -> EngineState:
        """Of the best engine: the server serves while one does."""
        return self._best.state

    @property
    def load(self) -> Load:
        return total_load([each.load for each in self.members])

    @property
    def step(self) -> int:
        return sum(each.step for each in self.members)

    @property
    def estimated_wait(self) -> float:
        """Seconds that a new request would wait where it waits least."""
        if len(asked := self._asked) == 1:
            return asked[0].estimated_wait
        return min([each.estimated_wait for each in asked])

    @property
    def num_open(self) -> int:
        if len(members := self.members) == 1:
            return members[0].num_open
        return sum([each.num_open for each in members])

    @property
    def resumptions(self) -> int:
        return sum(each.resumptions for each in self.members)

    @property
    def num_poisoned(self) -> int:
        return sum(each.num_poisoned for each in self.members)

    def subscribe(self, callback: Callable[[EngineState], None]) -> Callable[[], None]:
        """Call `callback` with this state whenever that of a member changes."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    async def wait_ready(self) -> None:
        """Wait until an engine serves.

        Raises:
            Draining: the engines are draining or stopped.
        """
        await monitor.wait_ready(self)

    # ------------------------------------------------------------ requests

    def expect(self) -> None:
        """Announce a request to the engine that an idle group would choose."""
        if not self.num_open:
            self.members[(self._turn + 1) % len(self.members)].expect()

    def route(self, keys: Keys = (), *, has_bytes: bool = True) -> Engine:
        """Return the engine for a request that needs `keys`, and note that it holds them then.

        Without `has_bytes` the first key is an image that only its holder can give. When no engine
        serves, the returned one says why.
        """
        serving = self.serving
        if len(serving) < 2:
            return serving[0] if serving else self._best
        self._turn += 1
        holders = self._holders(keys[:1] if not has_bytes else keys)
        candidates = [self._candidate(each, holders) for each in serving]
        if not has_bytes and (known := [each for each in candidates if each.holds]):
            number = least_loaded(known, self._turn)
        elif self._affinity:
            number = choose(candidates, self._turn, self._recomputing)
        else:
            number = least_loaded(candidates, self._turn)
        self._directory.note(keys[0 if has_bytes else 1 :], number)
        return self.members[number]

    async def hold(self, make: Callable[[BlobStore], HoldImage], keys: Keys = ()) -> Held:
        """Have an engine hold an image; `make` stages it. Once more when that engine is lost.

        Raises:
            LegatoError: as `Engine.hold` raises.
        """
        engine = self.route(keys)
        served = engine.state is _READY
        try:
            reply = await engine.hold(make(engine.blobs))
        except EngineLost:
            if not served:
                raise
            await self.wait_ready()
            engine = self.route(keys)
            reply = await engine.hold(make(engine.blobs))
        key = image_key(reply.request_id.tenant, reply.image.image_id)
        self._directory.note((key,), engine.number)
        return Held(engine, reply)

    async def drop(self, command: DropImage) -> None:
        """End the owner's holds on an image, wherever they are.

        Raises:
            ImageNotFound: the owner holds no such image.
            LegatoError: as `Engine.drop` raises.
        """
        missing: list[ImageNotFound] = []
        engines = self.serving or [self._best]
        for each in engines:
            try:
                await each.drop(command)
            except ImageNotFound as error:
                missing.append(error)
        if len(missing) == len(engines):
            raise missing[0]

    def drain(self) -> None:
        for each in self.members:
            each.drain()

    # ------------------------------------------------------------ what engines ask of the others

    def take_over(self, stream: RequestStream) -> bool:
        serving = self.serving
        if not serving:
            return False
        self._turn += 1
        candidates = [self._candidate(each, frozenset()) for each in serving]
        self.members[least_loaded(candidates, self._turn)].adopt(stream)
        return True

    def find_image(self, stream: RequestStream) -> bool:
        left = [each for each in self.serving if each.number not in stream.searched]
        if not left:
            return False
        image = stream.request.image
        assert isinstance(image, CachedImage), "only an image that is named can be elsewhere"
        holders = self._holders((image_key(stream.request.tenant, image.image_id),))
        first = next((each for each in left if each.number in holders), left[0])
        first.adopt(stream, renew=False)
        return True

    def saw(self, stream: RequestStream, output: Started | Done, number: int) -> None:
        image = output.image
        if image is None or not image.image_id:
            return
        if stream.request.cache_image:
            self._directory.note((image_key(stream.request.tenant, image.image_id),), number)
        if isinstance(output, Done) and not image.cache_hit:
            seconds = output.timings.image + output.timings.prefill
            self._recomputing += _LATEST_SHARE * (seconds - self._recomputing)

    # ------------------------------------------------------------ details

    @property
    def _best(self) -> Engine:
        return min(self.members, key=lambda each: _STANDING.index(each.state))

    def _holders(self, keys: Keys) -> frozenset[int]:
        """The serving engines that hold the first key that any of them holds."""
        serving = frozenset(each.number for each in self.serving)
        found = (holders & serving for holders in self._directory.holders(keys))
        return next(filter(None, found), frozenset())

    def _candidate(self, engine: Engine, holders: frozenset[int]) -> Candidate:
        model = engine.model
        assert model is not None, "an engine that serves has a model"
        num_requests = engine.num_open + (engine.num_elsewhere if self._has_peers else 0)
        return Candidate(
            number=engine.number,
            wait=engine.estimated_wait,
            load=num_requests / model.max_running,
            holds=engine.number in holders,
            is_full=num_requests >= _capacity(model),
        )

    def _note_serving(self) -> None:
        """Every call asks for these, and they change with states only."""
        self.serving = [each for each in self.members if each.state is _READY]
        self._asked = self.serving or self.members  # for what a new request meets
        models = [each.model for each in self.members if each.model is not None]
        self.model = models[0] if models else None  # None until the first engine was ready
        # Requests that the serving engines run and queue; infinite before one was ready.
        self.capacity = sum(_capacity(each.model) for each in self._asked)

    def _on_state(self, engine: Engine, state: EngineState) -> None:
        self._note_serving()
        if state is EngineState.LOST:
            self._directory.forget(engine.number)
        elif state is _READY:
            for each in self.members:
                if each.state is not _READY:
                    each.offer_waiting()
        for callback in list(self._subscribers):
            callback(self.state)


def _capacity(model: ModelInfo | None) -> float:
    return math.inf if model is None else model.max_running + model.max_waiting
