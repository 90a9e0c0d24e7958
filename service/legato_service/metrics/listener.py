"""The HTTP listener for scrapes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import socket
from collections.abc import Awaitable, Callable
from email.parser import BytesParser
from email.policy import HTTP

import structlog

from legato_service.metrics.snapshot import Exposition

PATH = "/metrics"
MAX_CONNECTIONS = 16
HEAD_TIMEOUT = 2.0  # seconds for a request, which a scraper sends at once
TIMEOUT = 10.0  # seconds for a request and its response
_MAX_HEAD = 16 * 1024  # bytes
_ACCEPT_PAUSE = 1.0  # seconds after an accept that failed
_LOG_PERIOD = 60.0  # seconds between two lines about failed accepts
_METHODS = ("GET", "HEAD")

log = structlog.get_logger("legato.service")

Scrape = Callable[[str], Awaitable[Exposition]]
"""Called with HTTP's Accept header."""


class MetricsListener:
    """HTTP listener for GET and HEAD of `/metrics`, one request a connection.

    A connection always gets in: beyond the limit the oldest one ends, because a scraper is the one
    that has just come and asks at once.
    """

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape
        self._accepting: list[asyncio.Task[None]] = []
        self._open: dict[asyncio.Task[None], None] = {}  # oldest first
        self._failure_logged = float("-inf")

    async def start(self, address: str) -> str:
        """Listen at HOST:PORT; return it with its real port.

        Raises:
            OSError: the address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        found = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with contextlib.ExitStack() as bound:
            listening = [
                bound.enter_context(
                    socket.create_server(name[:2], family=family, backlog=MAX_CONNECTIONS)
                )
                for family, _, _, _, name in dict.fromkeys(found)
            ]
            bound.pop_all()
        self._accepting = [asyncio.create_task(self._accept(each)) for each in listening]
        return f"{host}:{listening[0].getsockname()[1]}"

    def close(self) -> None:
        for task in self._accepting:
            task.cancel()

    async def _accept(self, listening: socket.socket) -> None:
        """Accept here: asyncio's servers log thousands of tracebacks without free descriptors."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        with listening:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(listening)
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    self._log_failure(error, loop.time())
                    await asyncio.sleep(_ACCEPT_PAUSE)
                    continue
                if len(self._open) >= MAX_CONNECTIONS:
                    next(iter(self._open)).cancel()
                task = asyncio.create_task(self._serve(accepted))
                self._open[task] = None
                task.add_done_callback(self._open.pop)
                await asyncio.sleep(0)  # lets cancelled tasks end

    def _log_failure(self, error: OSError, now: float) -> None:
        if now - self._failure_logged >= _LOG_PERIOD:
            self._failure_logged = now
            name = errno.errorcode.get(error.errno or 0, type(error).__name__)
            log.error("metrics_accept_failed", error=name)

    async def _serve(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            # The scraper is gone or too slow.
            reader, writer = await asyncio.open_connection(sock=accepted, limit=_MAX_HEAD)
            try:
                async with asyncio.timeout(TIMEOUT):
                    writer.write(await self._response(reader))
                    writer.close()
                    await writer.wait_closed()
            finally:
                writer.transport.abort()

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _error(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        line, _, rest = head.partition(b"\r\n")
        words = line.decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _error(http.HTTPStatus.BAD_REQUEST)
        if words[0] not in _METHODS:
            return _error(http.HTTPStatus.METHOD_NOT_ALLOWED)
        if words[1].partition("?")[0] != PATH:
            return _error(http.HTTPStatus.NOT_FOUND)
        headers = BytesParser(policy=HTTP).parsebytes(rest, headersonly=True)
        try:
            text, content_type = await self._scrape(str(headers.get("accept", "")))
        except Exception as error:
            log.error("scrape_failed", exc_info=error)
            return _error(http.HTTPStatus.INTERNAL_SERVER_ERROR)
        return _message(http.HTTPStatus.OK, content_type, text, with_body=words[0] == "GET")


def _error(status: http.HTTPStatus) -> bytes:
    return _message(status, "text/plain; charset=utf-8", f"{status.phrase}\n".encode())


def _message(
    status: http.HTTPStatus, content_type: str, body: bytes, *, with_body: bool = True
) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
