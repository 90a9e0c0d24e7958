"""Listeners of a service process and their gRPC options.

gRPC ignores unknown names, so a test covers the effect of each.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from legato_service import addresses
from legato_service.access.control import AccessControl
from legato_service.access.tls import ServerCertificate
from legato_service.config import ServiceConfig
from legato_service.rpc import reflection
from legato_service.rpc.call_log import CallLog
from legato_service.rpc.gate import RECEIVE_BYTES, Gate, ReceiveLimit
from legato_service.rpc.health import HealthServicer
from legato_service.rpc.middleware import RpcMiddleware

TRANSPORT_EXTRA = 1024 * 1024
"""Bytes above the message limit that the transport accepts, to refuse them with details. Beyond it
gRPC itself responds with RESOURCE_EXHAUSTED, without details, before it receives them."""

MAX_CONNECTIONS = 4096
"""Maximum per listener, and at most three quarters of the process's descriptors."""

MAX_CALLS_PER_CONNECTION = 256
"""Further calls wait in the client, whose deadlines and cancellations apply at once."""

MAX_PENDING_CALLS = 16_384
"""Calls that gRPC has received and this process has not accepted: those of 64 connections."""


MIN_RECEIVING = 4
"""Minimum messages that are received at a time, however large `max_request_bytes` is."""


def server_options(config: ServiceConfig, *, shared: bool = False) -> list[tuple[str, int]]:
    keepalive_timeout_ms = round(config.keepalive_timeout * 1000)
    max_message = config.max_request_bytes + TRANSPORT_EXTRA
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        descriptors = MAX_CONNECTIONS * 2
    return [
        # A second server on the port is an error to report, and must not get half of the load.
        ("grpc.so_reuseport", int(shared)),
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        # Refuse bursts of calls that are reset at once, before they reach Python. The protection
        # also counts calls that are answered and not cleaned up yet: without the second option it
        # refuses those of callers that share a busy connection.
        ("grpc.http.overload_protection", 1),
        ("grpc.http2.max_deallocating_streams", 2 * MAX_CALLS_PER_CONNECTION),
        # Beyond these gRPC cancels new calls at random, without a status.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
        ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, descriptors * 3 // 4)),
        # For TLS and the beginning of HTTP/2.
        ("grpc.server_handshake_timeout_ms", round(config.handshake_timeout * 1000)),
        # Connections without calls; clients open another one when they need it.
        ("grpc.max_connection_idle_ms", round(config.idle_timeout * 1000)),
        # Find dead peers.
        ("grpc.keepalive_time_ms", round(config.keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", keepalive_timeout_ms),
        # A frozen process still acknowledges TCP; only the ping's own timeout detects it.
        ("grpc.http2.ping_timeout_ms", keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients that ping idle connections more often are disconnected.
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            round(config.min_client_ping_interval * 1000),
        ),
        # Images are large: larger frames and a large first window shorten their time on the wire.
        # A peer may send so much of each call before a place to receive it is free.
        ("grpc.http2.max_frame_size", 4 * 1024 * 1024),
        ("grpc.http2.lookahead_bytes", 256 * 1024),
        ("grpc.http2.bdp_probe", 0),
    ]


# ---------------------------------------------------------------- listeners

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Listener:
    """gRPC listener. Without `certificate` it has no TLS, without `access` it is open."""

    def __init__(
        self,
        config: ServiceConfig,
        call_log: CallLog,
        health: HealthServicer,
        *,
        shared: bool = False,
        expect: Callable[[], None] = lambda: None,
        certificate: ServerCertificate | None = None,
        access: AccessControl | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._grpc = grpc.aio.server(options=server_options(config, shared=shared))
        self.gate = gate
        self.certificate = certificate
        places = RECEIVE_BYTES // (config.max_request_bytes + TRANSPORT_EXTRA)
        self.receive_limit = ReceiveLimit(max(places, MIN_RECEIVING))
        self._middleware = RpcMiddleware(
            config.stall_timeout,
            call_log,
            self.receive_limit,
            expect,
            access,
            self.gate,
        )
        self._grpc.add_generic_rpc_handlers((self._middleware,))
        health_pb2_grpc.add_HealthServicer_to_server(health, self.as_server)
        self._address = ""

    @property
    def as_server(self) -> grpc.aio.Server:
        return self._middleware.as_server

    def reflect(self, services: Sequence[str]) -> None:
        self._middleware.add_generic_rpc_handlers(reflection.handlers((*services, _HEALTH)))

    async def start(self, address: str) -> str:
        """Listen; return the address with its real port.

        Raises:
            OSError: the address cannot be bound.
        """
        certificate = self.certificate
        credentials = None if certificate is None else certificate.credentials()
        self._address = addresses.bind(self._grpc, address, credentials)
        await self._grpc.start()
        return self._address

    async def stop(self, grace: float) -> None:
        await self._grpc.stop(grace)
        addresses.remove_socket(self._address)


class Listeners:
    """The main listener, the operator's and that of health checks.

    The last two belong to the first process. A unix socket is protected by its folder and mode,
    and has neither TLS nor credentials. Files of credentials and certificates are read again when
    they change.

    Raises:
        FileRejected: a file of credentials or certificates cannot be used.
    """

    def __init__(
        self,
        config: ServiceConfig,
        call_log: CallLog,
        health: HealthServicer,
        expect: Callable[[], None],
        gate: Gate,
        *,
        is_first: bool,
    ) -> None:
        self._config = config
        self.certificate = (
            ServerCertificate(config.tls_cert, config.tls_key, config.tls_client_ca)
            if config.tls_cert
            else None
        )
        self.access = AccessControl(config) if config.has_credentials else None
        self.main = Listener(
            config,
            call_log,
            health,
            shared=config.processes > 1,
            expect=expect,
            certificate=self.certificate,
            access=self.access,
            gate=gate,
        )
        self.admin: Listener | None = None
        if config.has_own_admin and is_first:
            by_network = bool(config.admin_listen) and not config.admin_listen.startswith(
                addresses.UNIX
            )
            self.admin = Listener(
                config,
                call_log,
                health,
                certificate=self.certificate if by_network else None,
                access=self.access if by_network else None,
            )
        self._health = (
            Listener(config, call_log, health) if config.health_listen and is_first else None
        )
        self.admin_address = ""  # empty: AdminService is off
        self.admin_problem = "--admin-listen off"
        self.health_address = ""
        self._reloading: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Return the main port.

        Raises:
            OSError: an address cannot be bound; no listener is left open.
        """
        try:
            return await self._start()
        except OSError:
            await self.stop(0)
            raise

    async def _start(self) -> int:
        address = await self.main.start(self._config.listen)
        port = int(address.rpartition(":")[2])
        if self._config.admin_on_main:
            self.admin_address = address
        if self.admin is not None:
            await self._start_admin(self.admin, port)
        if self._health is not None:
            self.health_address = await self._health.start(self._config.health_listen)
        if self.access is not None or self.certificate is not None:
            self._reloading = asyncio.create_task(self._keep_reloading(), name="access files")
        return port

    async def _start_admin(self, admin: Listener, main_port: int) -> None:
        if self._config.admin_listen:
            self.admin_address = await admin.start(self._config.admin_listen)
            return
        try:  # a server without a folder for its socket still serves
            self.admin_address = await admin.start(addresses.admin_socket(main_port))
        except OSError as error:
            self.admin_problem = str(error)

    def reload_failures(self) -> dict[str, int]:
        watched = {"tls": self.certificate, "credentials": self.access}
        return {
            files: 0 if each is None else each.num_failed_reloads for files, each in watched.items()
        }

    async def _keep_reloading(self) -> None:
        while True:
            await asyncio.sleep(self._config.access_interval)
            if self.certificate is not None:
                self.certificate.reload_changed()
            if self.access is not None:
                self.access.reload_changed()

    async def stop(self, grace: float) -> None:
        """Stop the listeners. Idempotent."""
        if self._reloading is not None:
            self._reloading.cancel()
        listeners = (self.main, self.admin, self._health)
        await asyncio.gather(*(each.stop(grace) for each in listeners if each is not None))
