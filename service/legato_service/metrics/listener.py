"""The HTTP listener for scrapes."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Awaitable, Callable
from email.parser import BytesParser
from email.policy import HTTP

import structlog

from legato_service.metrics.exposition import Exposition

PATH = "/metrics"
MAX_CONNECTIONS = 16
TIMEOUT = 10.0  # seconds for a request and its response
_MAX_HEAD = 16 * 1024  # bytes
_METHODS = ("GET", "HEAD")

log = structlog.get_logger("legato.service")

Scrape = Callable[[str], Awaitable[Exposition]]
"""Takes HTTP's Accept header."""


class MetricsListener:
    """Answers GET and HEAD of `/metrics`, one request a connection."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape
        self._server: asyncio.Server | None = None
        self._num_open = 0

    async def start(self, address: str) -> str:
        """Listen at HOST:PORT; return it with its real port.

        Raises:
            OSError: the address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(
            self._serve, host.strip("[]"), int(port), limit=_MAX_HEAD
        )
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            async with asyncio.timeout(TIMEOUT):
                if self._num_open <= MAX_CONNECTIONS:
                    writer.write(await self._response(reader))
                else:
                    writer.write(_error(http.HTTPStatus.SERVICE_UNAVAILABLE))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the scraper is gone or too slow
        finally:
            self._num_open -= 1
            writer.close()

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        try:
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
