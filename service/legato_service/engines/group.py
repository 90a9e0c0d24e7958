"""The engines of a server: routing, directory, totals, timelines."""

from __future__ import annotations

import asyncio
import collections
import functools
import math
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from legato_engine.client.connection import EngineConnection
from legato_engine.client.monitor import EngineState, Observable
from legato_engine.client.request_stream import RequestStream
from legato_engine.client.timeline_watch import TimelineWatch, Watched
from legato_engine.errors import EngineLost, ImageNotFound
from legato_engine.ipc.messages import (
    Done,
    DropImage,
    HoldImage,
    ImageHeld,
    PrefillStarted,
    SchedulerLoad,
    ServedModel,
)
from legato_engine.shm import BlobStore
from legato_engine.types import CachedImageRef

MAX_LEAD = 0.5
"""Maximum lead over the least loaded engine, as a fraction of an engine's rows, at which an engine
still gets the requests whose data it holds."""


class Candidate(NamedTuple):
    """An engine that serves.

    `wait` is the predicted one in seconds, `load` the requests that it has, in units of the rows
    that it runs at a time. `holds`: it has computed something that the request needs.
    """

    number: int
    wait: float = 0.0
    load: float = 0.0
    holds: bool = False
    is_full: bool = False  # its queue takes no more

    @property
    def score(self) -> float:
        """Estimate a request's wait: `load` counts requests that `wait` does not include yet."""
        return self.wait + self.load


def choose(candidates: Sequence[Candidate], turn: int, recomputing: float) -> Candidate:
    """Return the engine where a request waits least.

    An engine that holds what the request needs is preferred, unless it lets the request wait
    longer than the `recomputing` takes elsewhere, in seconds, or leads by `MAX_LEAD`. Of equal
    engines `turn` decides.
    """
    least = least_loaded(candidates, turn)
    holders = [
        each
        for each in candidates
        if each.holds
        and not each.is_full
        and each.wait <= least.wait + recomputing
        and each.load <= least.load + MAX_LEAD
    ]
    return least_loaded(holders, turn) if holders else least


def least_loaded(candidates: Sequence[Candidate], turn: int) -> Candidate:
    """Return the engine where a request waits least, whatever it holds."""
    start = turn % len(candidates)
    return min((*candidates[start:], *candidates[:start]), key=lambda each: each.score)


# ---------------------------------------------------------------- directory

Key = tuple[Hashable, ...]
"""Cache key; its first part is the kind."""

MAX_KEYS = 16_384  # about 200 bytes each


def image_key(tenant: str, image_id: str) -> Key:
    return "image", tenant, image_id


class Directory:
    """The engines that hold each key: an image, a prefix, an adapter or a session.

    A hint: an engine may have evicted noted entries, and hold what other processes had it
    compute. The least recently used keys are dropped.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._holders: collections.OrderedDict[Key, int] = collections.OrderedDict()  # bits

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, keys: Iterable[Key], number: int) -> None:
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) | 1 << number
            self._holders.move_to_end(key)
            if len(self._holders) > self._max_keys:
                self._holders.popitem(last=False)

    def holders(self, keys: Iterable[Key]) -> Iterator[frozenset[int]]:
        """Return the engines that hold each key, for keys that any holds."""
        for key in keys:
            bits = self._holders.get(key, 0)
            if bits:
                yield frozenset(each for each in range(bits.bit_length()) if bits >> each & 1)

    def forget(self, number: int) -> None:
        kept = {key: bits & ~(1 << number) for key, bits in self._holders.items()}
        self._holders = collections.OrderedDict((key, bits) for key, bits in kept.items() if bits)


# ---------------------------------------------------------------- totals


_ADDED = (
    *("running", "waiting", "preparing", "inflight", "rows_used", "adapters_used"),
    *("pages_used", "prefix_pages", "pages_total", "images_cached"),
)


def total_load(loads: Sequence[SchedulerLoad]) -> SchedulerLoad:
    """Add up the loads of engines; measurements over a window are kept for a single engine only."""
    if len(loads) == 1:
        return loads[0]
    return SchedulerLoad(**{name: sum(getattr(each, name) for each in loads) for name in _ADDED})


# ---------------------------------------------------------------- timeline


async def batches(
    timelines: Sequence[TimelineWatch], seconds: float | None = None
) -> AsyncGenerator[tuple[int, Watched], None]:
    """Yield batches with their engine for some seconds, or until the generator is closed.

    A reader that lags leaves them in each engine's `TimelineWatch`, which drops the oldest.
    """
    merged: asyncio.Queue[tuple[int, Watched] | None] = asyncio.Queue(maxsize=1)

    async def read(number: int, timeline: TimelineWatch) -> None:
        async with aclosing(timeline.batches(seconds)) as found:
            async for batch in found:
                await merged.put((number, batch))
        await merged.put(None)

    readers = [asyncio.create_task(read(*each)) for each in enumerate(timelines)]
    left = len(readers)
    try:
        while left:
            batch = await merged.get()
            if batch is None:
                left -= 1
            else:
                yield batch
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


# ---------------------------------------------------------------- group

_READY = EngineState.READY  # looking up a member of an enum is slow
_STANDING = (
    EngineState.READY,
    EngineState.HUNG,
    EngineState.STARTING,
    EngineState.LOST,
    EngineState.DRAINING,
    EngineState.STOPPED,
)
"""States from the best; a group has the state of its best engine."""
_RECOMPUTING = 0.05  # seconds to prepare an image and compute its positions, before any was seen
_LATEST_SHARE = 0.1  # weight of a new value in the moving average

Keys = Sequence[Key]
"""Cache keys that a request needs of an engine, the most valuable first."""


class EngineGroup(Observable):
    """Engines of one model, each with a device, a queue and caches of its own.

    A request goes where it would wait least, or to the engine that holds what it needs
    (`routing`). The requests of a lost engine continue on the others. Belongs to one event loop;
    each service process routes by itself.
    """

    def __init__(
        self, members: Sequence[EngineConnection], *, affinity: bool = True, has_peers: bool = False
    ) -> None:
        """Create the group; with `has_peers` other service processes use the engines too."""
        super().__init__()
        self.members = tuple(members)
        self._affinity = affinity
        self._has_peers = has_peers
        self._directory = Directory()
        self._turn = 0
        self._recomputing = _RECOMPUTING
        for each in self.members:
            each.subscribe(functools.partial(self._on_state, each))
            if len(self.members) > 1:
                each.siblings = self
        self._cache_serving()

    # ------------------------------------------------------------ state

    @property
    def state(self) -> EngineState:
        """Return the state of the best engine: the server serves while one does."""
        return self._best.state

    @property
    def load(self) -> SchedulerLoad:
        return total_load([each.load for each in self.members])

    @property
    def step(self) -> int:
        return sum(each.step for each in self.members)

    @property
    def estimated_wait(self) -> float:
        """Seconds that a new request would wait where it waits least."""
        return min([each.estimated_wait for each in self._asked])

    @property
    def num_open(self) -> int:
        return sum([each.num_open for each in self.members])

    # ------------------------------------------------------------ requests

    def expect(self) -> None:
        """Announce a request to the engine that an idle group would choose."""
        if not self.num_open:
            self.members[(self._turn + 1) % len(self.members)].expect()

    def route(self, keys: Keys = (), *, has_bytes: bool = True) -> EngineConnection:
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
            chosen = least_loaded(known, self._turn)
        elif self._affinity:
            chosen = choose(candidates, self._turn, self._recomputing)
        else:
            chosen = least_loaded(candidates, self._turn)
        number = chosen.number
        self._directory.note(keys[0 if has_bytes else 1 :], number)
        return self.members[number]

    async def hold(
        self, make: Callable[[BlobStore], HoldImage], keys: Keys = ()
    ) -> tuple[EngineConnection, ImageHeld]:
        """Let an engine hold an image, and another one if it is lost; return it and its reply.

        `make` stages the image.

        Raises:
            LegatoError: as `EngineConnection.hold` raises.
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
        return engine, reply

    async def drop(self, command: DropImage) -> None:
        """End the owner's holds on an image, wherever they are.

        Raises:
            ImageNotFound: the owner holds no such image.
            LegatoError: as `EngineConnection.drop` raises.
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
        if not self.serving:
            return False
        self.route().adopt(stream)
        return True

    def find_image(self, stream: RequestStream) -> bool:
        left = [each for each in self.serving if each.number not in stream.searched]
        has_blobs = bool(stream.request.blobs)  # which an engine has read
        if not left or (has_blobs and stream.restage is None):
            return False
        named = (each for each in stream.request.images if isinstance(each, CachedImageRef))
        tenant = stream.request.tenant
        holders = self._holders(tuple(image_key(tenant, each.image_id) for each in named))
        first = next((each for each in left if each.number in holders), left[0])
        first.adopt(stream, renew=has_blobs)
        return True

    def record_image(
        self, stream: RequestStream, output: PrefillStarted | Done, number: int
    ) -> None:
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
    def _best(self) -> EngineConnection:
        return min(self.members, key=lambda each: _STANDING.index(each.state))

    def _holders(self, keys: Keys) -> frozenset[int]:
        """Return the serving engines that hold the first key held by any of them."""
        serving = frozenset(each.number for each in self.serving)
        found = (holders & serving for holders in self._directory.holders(keys))
        return next(filter(None, found), frozenset())

    def _candidate(self, engine: EngineConnection, holders: frozenset[int]) -> Candidate:
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

    def _cache_serving(self) -> None:
        self.serving = [each for each in self.members if each.state is _READY]
        self._asked = self.serving or self.members  # for what a new request meets
        models = [each.model for each in self.members if each.model is not None]
        self.model = models[0] if models else None  # None until the first engine was ready
        # Requests that the serving engines run and queue; infinite before one was ready.
        self.capacity = sum(_capacity(each.model) for each in self._asked)

    def _on_state(self, engine: EngineConnection, state: EngineState) -> None:
        self._cache_serving()
        if state is EngineState.LOST:
            self._directory.forget(engine.number)
        elif state is _READY:
            for each in self.members:
                if each.state is not _READY:
                    each.offer_waiting()
        self._notify(self.state)


def _capacity(model: ServedModel | None) -> float:
    return math.inf if model is None else model.max_running + model.max_waiting
