"""The gRPC server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog
from legato.kserve import open_inference_pb2, open_inference_pb2_grpc
from legato.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    image_pb2,
    image_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from legato_engine.device.host import return_freed_memory
from legato_engine.images.memory import ByteQuota

from legato_service.config import ServiceConfig
from legato_service.engines.group import EngineGroup
from legato_service.images.intake import HeldUploads, ImageIntake
from legato_service.images.shared_memory import SharedMemory
from legato_service.lifecycle import CUT_WRITES, LAST_WRITES, Drain, Peers
from legato_service.listeners import Listeners
from legato_service.metrics.calls import CallMetrics
from legato_service.metrics.collector import Collector
from legato_service.metrics.listener import MetricsListener
from legato_service.metrics.snapshot import Snapshot
from legato_service.requests.dispatcher import Dispatcher
from legato_service.requests.idempotency import IdempotencyCache
from legato_service.requests.registry import RequestRegistry
from legato_service.rpc.call_log import CallLog
from legato_service.rpc.gate import Gate
from legato_service.rpc.health import HealthServicer
from legato_service.services.admin import AdminServicer
from legato_service.services.image import ImageServicer
from legato_service.services.inference import InferenceServicer
from legato_service.services.kserve import KServeServicer
from legato_service.services.server import ServerServicer
from legato_service.services.session import SessionServicer
from legato_service.session.session import SessionLimits, SessionRegistry

if TYPE_CHECKING:
    from legato_service.tracing import Tracer

log = structlog.get_logger("legato.service")

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
MAIN_SERVICES = tuple(
    service.full_name
    for file in (inference_pb2, session_pb2, image_pb2, server_pb2, open_inference_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)
"""Services of the main listener, each with a health status of its own."""


class Server:
    """The services of a process and its listeners.

    Belongs to the running event loop. `peers` are the server's other processes.

    Raises:
        FileRejected: a file of credentials or certificates cannot be used.
    """

    def __init__(
        self,
        config: ServiceConfig,
        engines: EngineGroup,
        peers: Peers,
    ) -> None:
        self._config = config
        self._engines = engines
        self.requests = RequestRegistry()
        self.sessions = SessionRegistry(config.max_sessions)
        self.shutdown = Drain(self.requests, self.sessions)
        self._engine_drain: asyncio.Task[None] | None = None
        self.idempotency_cache = IdempotencyCache()
        records_calls = config.metrics or config.metrics_listen
        calls = CallMetrics(config.metrics_tenants) if records_calls else None
        self.tracer = _tracer(config, engines)
        self._call_log = CallLog(
            [each.observe for each in (calls, self.tracer) if each is not None]
        )
        self.metrics = Collector(
            config,
            engines,
            self.requests,
            self.sessions,
            calls,
            self._call_log,
            peers=peers,
            reload_failures=lambda: self.listeners.reload_failures(),  # noqa: PLW0108 - made below
        )
        serves_metrics = bool(config.metrics_listen) and peers.number == 0
        self._scrapes = MetricsListener(self.metrics.exposition) if serves_metrics else None
        self.metrics_address = ""  # empty: there is no listener
        self._upload_quota = ByteQuota(
            "uploads",
            per_caller=config.engine.image_quota_bytes,
            total=config.engine.image_hold_bytes,
        )
        self.held_uploads = HeldUploads(engines, self._upload_quota)
        max_pixels = config.engine.max_image_pixels
        stores = [each.blobs for each in engines.members]
        read_shared = None
        if config.shared_images:
            shared = SharedMemory(stores, max_bytes=config.max_image_bytes, max_pixels=max_pixels)
            read_shared = shared.read
        self.images = ImageIntake(
            max_bytes=config.max_request_bytes, max_pixels=max_pixels, read_shared=read_shared
        )
        self.health = HealthServicer(MAIN_SERVICES)
        self.listeners = Listeners(
            config,
            self._call_log,
            self.health,
            engines.expect,
            Gate(engines, return_freed_memory),
            is_first=peers.number == 0,
        )
        admin = AdminServicer(
            engines,
            self.requests,
            self.sessions,
            peers,
            default_grace=config.drain_grace,
            scrape=self.metrics.exposition,
            sets_depth=config.depth_switch,
        )
        self._add_services(admin)
        engines.subscribe(self.health.update)

    def _add_services(self, admin: AdminServicer) -> None:
        dispatcher = Dispatcher(self._engines, self.images, self.requests, self.held_uploads)
        main = self.listeners.main
        inference = InferenceServicer(
            dispatcher,
            self.idempotency_cache,
            unary_deadline=self._config.unary_deadline,
            stream_deadline=self._config.stream_deadline,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, main.as_server)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            KServeServicer(
                dispatcher,
                lambda: self.health.is_ready,
                deadline=self._config.unary_deadline,
            ),
            main.as_server,
        )
        session_limits = SessionLimits(
            open_timeout=self._config.session_open_timeout,
            credit_timeout=self._config.stall_timeout,
            frame_deadline=self._config.unary_deadline,
            max_age=self._config.max_session_age,
        )
        session_pb2_grpc.add_SessionServiceServicer_to_server(
            SessionServicer(dispatcher, self.sessions, session_limits), main.as_server
        )
        image_pb2_grpc.add_ImageServiceServicer_to_server(
            ImageServicer(
                self._config,
                self._engines,
                self._engines.members[0].blobs,
                self.requests,
                self.held_uploads,
                self._upload_quota,
            ),
            main.as_server,
        )
        admin_here = self._config.admin_on_main
        capabilities = ("admin",) if admin_here else ()
        server_pb2_grpc.add_ServerServiceServicer_to_server(
            ServerServicer(self._config, self._engines, capabilities), main.as_server
        )
        if admin_here:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, main.as_server)
        main.reflect((*MAIN_SERVICES, _ADMIN) if admin_here else MAIN_SERVICES)
        if (own := self.listeners.admin) is not None:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, own.as_server)
            own.reflect((_ADMIN,))

    async def start(self) -> int:
        """Listen; return the main port.

        Raises:
            OSError: an address cannot be bound.
        """
        port = await self.listeners.start()
        if self._scrapes is not None:
            try:
                self.metrics_address = await self._scrapes.start(self._config.metrics_listen)
            except OSError:
                await self.listeners.stop(0)
                raise
        self.metrics.start()
        self.health.update(self._engines.state)
        return port

    def begin_drain(self, grace: float) -> None:
        """Report not serving, refuse new requests, and give open ones `grace` seconds.

        Does not wait. Repeated, it can only shorten the grace.
        """
        self.health.withdraw()
        self.shutdown.begin(grace)
        if self._engine_drain is None:
            self._engine_drain = asyncio.create_task(self._drain_engine(), name="engine drain")
        log.info(
            "drain_begun", in_flight=len(self.requests), grace=round(self.shutdown.time_left, 3)
        )

    async def _drain_engine(self) -> None:
        """Drain the engine, after the sessions: it still runs their frames."""
        await self.sessions.wait_empty()
        self._engines.drain()

    async def snapshot(self) -> Snapshot:
        return self.metrics.snapshot()

    async def drain(self, grace: float) -> bool:
        """Return whether all requests ended in time."""
        self.begin_drain(grace)
        return await self.shutdown.wait()

    async def stop(self) -> None:
        """Send finished responses, end the rest with `Draining`, close the listeners. Idempotent.

        Without open requests responses have `LAST_WRITES` seconds, else `CUT_WRITES`.
        """
        self.health.withdraw()
        self.health.close()
        if self._engine_drain is not None:
            self._engine_drain.cancel()
        self.metrics.close()
        self.held_uploads.close()
        grace = LAST_WRITES
        if len(self.requests) + len(self.sessions):
            grace = CUT_WRITES
            self.requests.close()
            await self.shutdown.cut()
        await self.listeners.stop(grace)
        self._call_log.close()
        if self._scrapes is not None:
            self._scrapes.close()
        if self.tracer is not None:
            await self.tracer.close()


def _tracer(config: ServiceConfig, engines: EngineGroup) -> Tracer | None:
    """Return None when tracing is off; OpenTelemetry is imported only when it is on."""
    if not config.otlp_endpoint:
        return None
    from legato_service.tracing import Tracer, span_exporter

    return Tracer(
        span_exporter(config.otlp_endpoint),
        config.trace_ratio,
        lambda: engines.model.name if engines.model else "",
    )
