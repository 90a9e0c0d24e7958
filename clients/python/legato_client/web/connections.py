"""Limits of the HTTP listener's connections: how many, how silent, how many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from legato_client.web.errors import RejectedRequest, document_of

_OTHER_DESCRIPTORS = 128  # of this process's channels, files and libraries
_ACCEPT_PAUSE = 1.0  # seconds after an accept that failed
_DISCARD_PAUSE = 0.025  # seconds between two discarding reads of 256 KiB
_FULL_PAUSE = 0.05  # seconds between polls of a full listener
_GRACE = 1.0  # seconds for the first bytes, before a client counts as silent
_LOG_PERIOD = 10.0  # seconds between two lines about failed accepts

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Counts, and times in seconds.

    `head_timeout`: for the TLS handshake, and for the whole head of a request since the connection
    was opened or the answer before it ended. `write_timeout`: how long a client may leave an
    answer unread. `ahead_pause`: how long a client that sent requests ahead waits for its
    connection to end, so that it does not connect anew at once. `requests`: how many are answered
    at once; the connections above them are for health checks.
    """

    connections: int = 1024
    requests: int = 896
    head_timeout: float = 10.0
    write_timeout: float = 60.0
    ahead_pause: float = 5.0

    @classmethod
    def of_process(cls) -> ConnectionLimits:
        """Return the defaults, or less where this process may open fewer files."""
        usual = cls()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= usual.connections + _OTHER_DESCRIPTORS:
            return usual
        connections = max(soft - _OTHER_DESCRIPTORS, soft // 2, 2)
        return cls(connections=connections, requests=connections - connections // 8 - 1)


class GuardedConnection(H11Protocol):
    """Connection that is aborted when its client is silent on its turn.

    uvicorn limits only the silence between two requests, and cancels that timer at the first byte.
    """

    limits = ConnectionLimits()
    cycle: Any  # None before the first request
    _timer: asyncio.TimerHandle | None = None
    _since = 0.0
    _begun: object = None
    _discards = False

    @property
    def is_clients_turn(self) -> bool:
        """Return whether there is no request, or its body is incomplete."""
        return self._is_idle or bool(self.cycle.more_body)

    @property
    def eviction_order(self) -> tuple[bool, bool, float]:
        """Silent connections first, of these the ones without a request, then the oldest."""
        is_silent = self._since < self.loop.time() - _GRACE
        return not is_silent, is_silent and not self._is_idle, self._since

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discards:
            self.flow.pause_reading()  # take no time from other connections
            self.loop.call_later(_DISCARD_PAUSE, self.flow.resume_reading)
            return
        super().data_received(data)
        if self.cycle is not self._begun:
            self._begun, self._since = self.cycle, self.loop.time()
            if self.cycle.more_body and not self._is_idle:
                self.flow.pause_reading()  # until the application asks for the body
        self._follow()

    def on_response_complete(self) -> None:
        """Keep the connection, unless its client sends ahead of the answers or continues a body.

        The rest of a body is discarded unparsed for a while: a connection that is cut while bytes
        arrive is reset, and its client may never see the answer.
        """
        if self.conn.their_state is h11.SEND_BODY and self.transport.can_write_eof():
            self._discards = True
            with contextlib.suppress(OSError):  # the client has left
                self.transport.write_eof()
        elif self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.flow.pause_reading()
            self._stop_timer()
            self._timer = self.loop.call_later(self.limits.ahead_pause, self._close)
            return
        super().on_response_complete()
        self._follow()

    def _close(self) -> None:
        self.transport.close()
        self._start_timer(self.limits.write_timeout)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._timer is None:
            self._start_timer(self.limits.write_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._is_idle:
            self._stop_timer()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Leave the connection to the websocket's own pings."""
        self._stop_timer()
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        """Answer in the form of every other failure."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer has started
            return
        body = msgspec.json.encode(document_of(RejectedRequest(msg, code="bad_request")))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=HTTPStatus.BAD_REQUEST, headers=headers)
        for part in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part))
        self.transport.close()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _follow(self) -> None:
        if self.transport.get_protocol() is not self:
            return  # a websocket now
        if not self._is_idle:
            self._stop_timer()
        elif self._timer is None:
            self._since = self.loop.time()
            self._start_timer(self.limits.head_timeout)

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclasses.dataclass
class Acceptor:
    """Acceptor of connections up to a limit, in place of uvicorn's and asyncio's.

    asyncio's own servers do not count TLS handshakes, and write thousands of tracebacks a second
    into the log while there is no free descriptor.
    """

    listening: socket.socket
    make_protocol: Callable[[], asyncio.Protocol]
    open_connections: set[Any]
    limits: ConnectionLimits
    tls: ssl.SSLContext | None
    _opening: dict[asyncio.Task[None], None] = dataclasses.field(default_factory=dict)
    """TLS handshakes, oldest first."""
    _logged: float = float("-inf")
    _num_failed: int = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.listening.setblocking(False)
        try:
            while True:
                if len(self.open_connections) + len(self._opening) >= self.limits.connections:
                    await asyncio.sleep(0 if self._evict() else _FULL_PAUSE)
                    continue
                try:
                    accepted, _ = await loop.sock_accept(self.listening)
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    self._report(error, loop.time())
                    await asyncio.sleep(_ACCEPT_PAUSE)
                    continue
                task = loop.create_task(self._start(accepted))
                self._opening[task] = None
                task.add_done_callback(self._opening.pop)
                await asyncio.sleep(0)  # an accept that succeeds at once does not suspend
        finally:
            for task in self._opening:
                task.cancel()

    async def _start(self, accepted: socket.socket) -> None:
        seconds = self.limits.head_timeout if self.tls else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self.make_protocol,
                accepted,
                ssl=self.tls,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
        except OSError:  # the client left, or does not speak TLS
            accepted.close()

    def _evict(self) -> bool:
        """Abort the connection that has waited longest for its client; False if none waits."""
        guarded = (each for each in self.open_connections if isinstance(each, GuardedConnection))
        waiting = [each for each in guarded if each.is_clients_turn]
        if waiting:
            min(waiting, key=lambda each: each.eviction_order).abort()
        elif self._opening:
            next(iter(self._opening)).cancel()
        return bool(waiting or self._opening)

    def _report(self, error: OSError, now: float) -> None:
        self._num_failed += 1
        if now - self._logged >= _LOG_PERIOD:
            name = errno.errorcode.get(error.errno or 0, type(error).__name__)
            log.error("cannot accept connections (%s), %d times", name, self._num_failed)
            self._logged, self._num_failed = now, 0
