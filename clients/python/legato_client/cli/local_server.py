"""A server for the length of a `with` block."""

from __future__ import annotations

import importlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc

from legato_client.cli.exits import CommandError, ExitCode

_SERVICE = "legato.v1.InferenceService"
_POLL = 0.2  # seconds
_CHECK_TIMEOUT = 2.0  # seconds
_STOP_TIMEOUT = 30.0  # seconds from SIGTERM to the exit
_LOG_TAIL = 2000  # bytes of the log shown when the server fails


class LocalServer:
    """`legato serve` on a free loopback port.

    Leaving the block sends SIGTERM and waits. An exit code other than 0 raises CommandError, unless
    the block already failed. The process never outlives the block.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = options
        self._port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "asked for the process of a server that was not started"
        return self._process.pid

    def __enter__(self) -> LocalServer:
        program = [sys.executable, "-m", "legato_client.cli", "serve"]
        self._process = subprocess.Popen(
            [*program, "--listen", self.target, *self._options],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process is not None, "left a block that was not entered"
        code = _stop(self._process)
        tail = self._tail()
        self._log.close()
        if error is None and code != 0:
            raise CommandError(f"the server stopped with exit code {code}{tail}")

    def wait_until_serving(self, timeout: float, update: Callable[[str], object]) -> None:
        """Wait for SERVING. Raises CommandError when the server fails or is too slow."""
        assert self._process is not None, "waited for a server that was not started"
        start = time.monotonic()
        while not _is_serving(self.target):
            elapsed = time.monotonic() - start
            if (code := self._process.poll()) is not None:
                raise CommandError(
                    f"the server ended with exit code {code} while starting{self._tail()}",
                    ExitCode.UNAVAILABLE,
                )
            if elapsed > timeout:
                raise CommandError(
                    f"the server was not ready after {timeout:g} s{self._tail()}",
                    ExitCode.UNAVAILABLE,
                )
            update(f"starting the server ({elapsed:.0f} s)")
            time.sleep(_POLL)

    def _tail(self) -> str:
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL))
        text = self._log.read().decode("utf-8", "replace").strip()
        return f"; the end of its log:\n{text}" if text else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_serving(target: str) -> bool:
    """Ask over a new connection: one that was refused is tried again only after a while."""
    health: Any = importlib.import_module("grpc_health.v1.health_pb2")
    with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health.HealthCheckRequest.SerializeToString,
            response_deserializer=health.HealthCheckResponse.FromString,
        )
        try:
            response = check(health.HealthCheckRequest(service=_SERVICE), timeout=_CHECK_TIMEOUT)
        except grpc.RpcError:
            return False
    return bool(response.status == health.HealthCheckResponse.SERVING)


def _stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
