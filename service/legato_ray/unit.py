"""A server of its own processes, started and stopped by a replica."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.v1 import admin_pb2, admin_pb2_grpc

from legato_ray.autoscaling import BUSY, QUEUE_SECONDS

INFERENCE = "legato.v1.InferenceService"
LIVENESS = ""  # SERVING while the service process answers

_POLL = 0.05  # seconds
_ANSWER = 2.0  # seconds for a server that does not hang to say anything
_EXIT = 10.0  # seconds beyond delay and grace for the last writes


class StartFailed(RuntimeError):
    """The server ended, or did not serve in time."""


class Unit:
    """`legato serve` on ports that the kernel chooses. Methods block; threads may share it."""

    def __init__(
        self,
        options: Sequence[str],
        *,
        host: str,
        max_running: int,
        drain_delay: float,
        drain_grace: float,
    ) -> None:
        """`host` is the IP address to listen on; delay and grace are in seconds."""
        self._max_running = max_running
        self._patience = drain_delay + drain_grace + _EXIT
        self._folder = tempfile.TemporaryDirectory(prefix="legato-ray-")
        admin = f"unix:{self._folder.name}/admin"
        command = [sys.executable, "-m", "legato_ray.lifeline", *options]
        command += ["--listen", _any_port(host), "--health-listen", _any_port(host)]
        command += ["--admin-listen", admin, "--max-running", str(max_running)]
        command += ["--drain-delay", str(drain_delay), "--drain-grace", str(drain_grace)]
        # A session of its own: Ray ends the process group of a replica that was killed, and the
        # server is to drain then. The pipe ends it in any case.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._said: dict[str, str] = {}  # addresses by event, written by the thread
        assert self._process.stderr is not None
        threading.Thread(target=self._read_log, args=(self._process.stderr,), daemon=True).start()
        self._channel = grpc.insecure_channel(admin)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str:
        """HOST:PORT for calls, once it serves."""
        return self._said["ready"]

    @property
    def health_address(self) -> str:
        """HOST:PORT for health checks without credentials, once it serves."""
        return self._said["health_listening"]

    def wait_until_serving(self, timeout: float) -> None:
        """Wait until the server serves. Raises StartFailed and ends the process if it does not."""
        end = time.monotonic() + timeout
        while not (self._is_known() and self.is_serving()):
            code = self._process.poll()
            if code is not None or time.monotonic() > end:
                self.kill()
                why = f"did not serve in {timeout:g} s" if code is None else f"ended with {code}"
                raise StartFailed(f"the server {why}; its log says more")
            time.sleep(_POLL)

    def is_serving(self) -> bool:
        return self._is_known() and serves(self.health_address, _ANSWER)

    def is_alive(self) -> bool:
        """Its service process runs and answers; its engine may be lost, which it replaces."""
        return (
            self._process.poll() is None
            and self._is_known()
            and serves(self.health_address, _ANSWER, LIVENESS)
        )

    def load(self) -> dict[str, float]:
        """Ask for the figures of the autoscaling. Raises `grpc.RpcError` without an answer."""
        load: admin_pb2.GetLoadResponse = self._admin.GetLoad(
            admin_pb2.GetLoadRequest(), timeout=_ANSWER
        )
        wait = load.estimated_wait.seconds + load.estimated_wait.nanos / 1e9
        return {QUEUE_SECONDS: wait, BUSY: min(1.0, load.running / self._max_running)}

    def stop(self) -> None:
        """Drain, and return when it has ended; one that hangs is killed at once. Idempotent."""
        if self.is_alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience)
        self.kill()

    def kill(self) -> None:
        """With all processes of the server. Idempotent."""
        if self._process.returncode is None:  # else the id may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._channel.close()
        self._folder.cleanup()

    def _is_known(self) -> bool:
        return {"ready", "health_listening"} <= self._said.keys()

    def _read_log(self, lines: IO[bytes]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and "address" in entry:
                    self._said[str(entry.get("event"))] = str(entry["address"])
            sys.stderr.write(line.decode(errors="replace"))


def _any_port(host: str) -> str:
    return f"[{host}]:0" if ":" in host else f"{host}:0"


# ---------------------------------------------------------------- health


def serves(address: str, timeout: float, service: str = INFERENCE) -> bool:
    """Return whether the server at HOST:PORT says SERVING within `timeout` seconds."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),  # so that an old connection says nothing
        ("grpc.enable_http_proxy", 0),
    ]
    with grpc.insecure_channel(address, options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = stub.Check(request, timeout=timeout)
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
