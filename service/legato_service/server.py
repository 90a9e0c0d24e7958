"""The gRPC server: assembled, started, drained, stopped."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    image_pb2,
    inference_pb2,
    inference_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
    session_pb2,
)
from legato_engine.blobs import BlobStore

from legato_service.config import ServiceConfig
from legato_service.dispatch import Dispatcher
from legato_service.engine import Engine
from legato_service.gate import Gate
from legato_service.health import HealthServicer, Progress
from legato_service.interceptors.boundary import Boundary
from legato_service.options import server_options
from legato_service.picture import PictureIntake
from legato_service.reflection import Descriptors, Reflection
from legato_service.replies import Replies
from legato_service.servicer import unimplemented
from legato_service.servicer.admin import AdminServicer
from legato_service.servicer.inference import InferenceServicer
from legato_service.servicer.server import ServerServicer

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_SERVER = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_UNBUILT = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"],
    image_pb2.DESCRIPTOR.services_by_name["ImageService"],
)
BUILT = (_INFERENCE.full_name, _SERVER.full_name)
"""Services that have a readiness of their own."""

_LAST_WRITES = 5.0  # seconds that answers already made get to leave, beyond the drain's grace


class Server:
    """One listener in front of one engine. Made and used within the running event loop."""

    def __init__(self, config: ServiceConfig, engine: Engine, blobs: BlobStore) -> None:
        self._config = config
        self._engine = engine
        self._gate = Gate()
        self.replies = Replies()
        progress = Progress(
            engine, stuck_after=config.stuck_after, silent_after=config.silent_after
        )
        self._health = HealthServicer(BUILT, progress)
        self._health_task: asyncio.Task[None] | None = None
        self._grpc = grpc.aio.server(
            interceptors=[Boundary(config.stall_timeout)], options=server_options(config)
        )
        self._add_services(blobs, progress)
        engine.subscribe(lambda _: self._health.update())

    def _add_services(self, blobs: BlobStore, progress: Progress) -> None:
        pictures = PictureIntake(
            blobs,
            max_bytes=self._config.max_request_bytes,
            max_pixels=self._config.engine.max_image_pixels,
        )
        inference = InferenceServicer(
            Dispatcher(self._engine, pictures, self._gate),
            self.replies,
            unary_deadline=self._config.unary_deadline,
            stream_deadline=self._config.stream_deadline,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, self._grpc)
        server_pb2_grpc.add_ServerServiceServicer_to_server(
            ServerServicer(self._config, self._engine), self._grpc
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self._engine, progress), self._grpc
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        listed = (*BUILT, _ADMIN.full_name, _HEALTH.full_name)
        reflection = Reflection(listed, Descriptors.of_contract())
        self._grpc.add_generic_rpc_handlers(
            (*reflection.handlers(), *(unimplemented.handler(service) for service in _UNBUILT))
        )

    @property
    def num_in_flight(self) -> int:
        """Requests admitted and not ended."""
        return len(self._gate)

    async def start(self) -> int:
        """Listen; returns the port. Raises `OSError` when the address cannot be had."""
        try:
            port = self._grpc.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._config.listen}") from error
        await self._grpc.start()
        self._health.update()
        self._health_task = asyncio.create_task(
            self._health.keep_updated(self._config.health_interval), name="health"
        )
        return port

    async def drain(self, grace: float) -> bool:
        """Withdraw, refuse new work, and wait for what runs; whether all of it ended in time."""
        until = time.monotonic() + grace
        self._health.withdraw()
        self._gate.close()
        self._engine.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(until - time.monotonic(), 0)):
                await self._gate.wait_empty()
        return len(self._gate) == 0

    async def stop(self) -> None:
        """Close the listener; answers already made still go out, all else is cut. Idempotent."""
        self._health.withdraw()
        self._health.close()
        if self._health_task is not None:
            self._health_task.cancel()
        drained = len(self._gate) == 0
        await self._grpc.stop(_LAST_WRITES if drained else 0)
