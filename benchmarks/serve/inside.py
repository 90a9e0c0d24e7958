"""The service with the null engine inside its own process: the cost of the service itself.

    python -m benchmarks.serve.inside

Listens on a free port of the loopback address and prints it. The service is the product's; only
the way to another process and back is missing, which `benchmarks.serve.cost` measures beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, cast

import uvloop
from legato_engine import null_engine
from legato_engine.client.connection import EngineConnection, Siblings
from legato_engine.client.monitor import EngineState
from legato_engine.client.request_stream import RequestStream, Restage
from legato_engine.client.timeline_watch import TimelineWatch
from legato_engine.config import EngineConfig
from legato_engine.errors import TaskUnsupported
from legato_engine.ipc import latency_policy
from legato_engine.ipc.messages import ImageTotals, SchedulerLoad, StepTotals
from legato_engine.null_engine import NullEngine
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import Request, RequestKey
from legato_service import lifecycle, logs
from legato_service.config import ServiceConfig
from legato_service.engines.group import EngineGroup
from legato_service.server import Server
from legato_service.workers.processes import WorkerProcesses

CONFIG = EngineConfig(model=null_engine.NAME, null_objects=100_000)


class InsideEngine:
    """An engine connection whose steps run in the service's own event loop."""

    state = EngineState.READY
    load = SchedulerLoad()
    estimated_wait = 0.0
    step_totals, image_totals = StepTotals(), ImageTotals()
    pid = restarts = resumptions = num_poisoned = number = num_elsewhere = 0
    device = "none"
    siblings: Siblings | None = None
    last_heartbeat = 0.0

    def __init__(self) -> None:
        self.blobs = BlobStore(new_namespace())
        self.model = null_engine.info(CONFIG)
        self.timeline = TimelineWatch(lambda _: None)
        self._streams: dict[RequestKey, RequestStream] = {}
        self._engine = NullEngine(
            CONFIG, blobs=BlobReader(self.blobs.namespace), send=self._on_report
        )
        self._turning = False

    @property
    def step(self) -> int:
        """Steps so far."""
        return self._engine.steps_committed

    def expect(self) -> None:
        """Do nothing: it never sleeps."""

    def subscribe(self, callback: Callable[[EngineState], None]) -> None:
        """Its state never changes."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def submit(
        self, request: Request, restage: Restage | None = None, *, may_wait: bool = False
    ) -> RequestStream:
        """As `EngineConnection.submit`."""
        stream = RequestStream(request, self._on_abort, self._on_stop, restage)
        self._streams[request.request_id] = stream
        self._engine.submit(request)
        self._turn()
        return stream

    def adopt(self, stream: RequestStream, *, renew: bool = True) -> NoReturn:
        """There is no other engine."""
        raise AssertionError("one engine only")

    def offer_waiting(self) -> None:
        """None waits."""

    def set_pipeline_depth(self, depth: int) -> None:
        """Do nothing: it has no pipeline."""

    def drain(self) -> None:
        """Do nothing: it ends with its process."""

    async def hold(self, command: object) -> NoReturn:
        """Images are not held here."""
        raise TaskUnsupported("not measured", task="hold")

    async def drop(self, command: object) -> NoReturn:
        """Images are not held here."""
        raise TaskUnsupported("not measured", task="drop")

    def _turn(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._turning = False
        self._engine.step()
        if self._engine.busy:
            self._turn()

    def _on_report(self, report: Any) -> None:  # of streams only
        stream = self._streams.get(report.request_id)
        if stream is not None:
            stream.feed(report)
            if stream.ended:
                self._forget(stream)

    def _on_abort(self, stream: RequestStream) -> None:
        self._engine.abort(stream.request_id)
        self._forget(stream)

    def _on_stop(self, stream: RequestStream) -> None:
        self._engine.stop(stream.request_id)

    def _forget(self, stream: RequestStream) -> None:
        self._streams.pop(stream.request.request_id, None)
        for blob in stream.request.blobs:
            self.blobs.discard(blob)


async def _serve() -> None:
    engine = InsideEngine()
    config = ServiceConfig(listen="127.0.0.1:0", engine=CONFIG)
    peers = WorkerProcesses(
        config,
        (),
        lambda grace: server.begin_drain(grace),  # noqa: PLW0108 - made in the next line
        lambda: server.metrics.snapshot(),  # noqa: PLW0108 - the same
    )
    server = Server(config, EngineGroup([cast(EngineConnection, engine)]), peers)
    print(await server.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    logs.configure("info", terminal=False)
    lifecycle.tune_process(latency_policy.resolve(CONFIG.latency_policy))
    uvloop.run(_serve())
