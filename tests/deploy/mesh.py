"""Servers without a model behind a real Envoy, and callers that never pause."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from legato_client import (
    AsyncClient,
    AsyncSession,
    Finished,
    FrameDropped,
    FrameResult,
    GoAway,
    LegatoError,
    QueryResult,
    QueryTask,
    Sampling,
    TextDelta,
)
from legato_ray.endpoints import EndpointFile

from tests.e2e.server import Server
from tests.service.harness import image_bytes

# ---------------------------------------------------------------- envoy
# A real Envoy with the shipped configuration, on free loopback ports.

ROOT = Path(__file__).parents[2]
ENVOY = str(Path(sys.executable).with_name("envoy"))
DESCRIPTOR = ROOT / "proto/gen/legato/v1/descriptor.binpb"


def render(endpoints: Path, *options: str) -> str:
    """The shipped configuration with ports that the kernel chooses, and more options."""
    command = [sys.executable, str(ROOT / "deploy/envoy/render.py"), "--listen", "127.0.0.1:0"]
    command += ["--admin", "127.0.0.1:0", "--endpoints", str(endpoints)]
    command += ["--descriptor", str(DESCRIPTOR), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Envoy:
    """Envoy in a `with` block, in front of the addresses that were last published."""

    def __init__(self, folder: Path, *addresses: str, options: Sequence[str] = ()) -> None:
        """`options` are those of deploy/envoy/render.py."""
        self._folder = folder
        self._endpoints = folder / "endpoints"
        self._endpoints.mkdir()
        self.file = EndpointFile(self._endpoints)
        if addresses:
            self.file.write(addresses)
        self.config = folder / "envoy.yaml"
        self.config.write_text(render(self._endpoints, *options))
        self.address = ""
        self._admin = ""

    def validate(self) -> subprocess.CompletedProcess[str]:
        """What Envoy itself says of the configuration."""
        command = [ENVOY, "--mode", "validate", "-c", str(self.config)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def __enter__(self) -> Envoy:
        admin = self._folder / "admin"
        command = [ENVOY, "-c", str(self.config), "--admin-address-path", str(admin)]
        command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        self._log = (self._folder / "envoy.log").open("wb")
        self.process = subprocess.Popen(command, stderr=self._log, stdin=subprocess.DEVNULL)
        while not (admin.exists() and (text := admin.read_text())):
            self._check_runs()
        self._admin = f"http://{text}"
        while not self.is_ready():
            self._check_runs()
        (listener,) = json.loads(self.get("/listeners?format=json"))["listener_statuses"]
        socket = listener["local_address"]["socket_address"]
        self.address = f"{socket['address']}:{socket['port_value']}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def get(self, path: str) -> str:
        """A page of its administration."""
        with urllib.request.urlopen(self._admin + path, timeout=10) as response:
            return str(response.read(), "utf-8")

    def is_ready(self) -> bool:
        """It listens, and has checked the health of its first endpoints."""
        try:
            return self.get("/ready").strip() == "LIVE"
        except OSError:
            return False

    def healthy(self, cluster: str = "legato") -> set[str]:
        """The addresses that get calls."""
        statuses = json.loads(self.get("/clusters?format=json"))["cluster_statuses"]
        (hosts,) = (one.get("host_statuses", []) for one in statuses if one["name"] == cluster)
        return {_address(host) for host in hosts if _is_healthy(host["health_status"])}

    def counter(self, name: str) -> int:
        """The value of a statistic; 0 if there is none yet."""
        stats = json.loads(self.get(f"/stats?format=json&filter=^{name}$"))["stats"]
        return sum(int(one.get("value", 0)) for one in stats)

    def _check_runs(self) -> None:
        assert self.process.poll() is None, (self._folder / "envoy.log").read_text()
        time.sleep(0.02)


def _is_healthy(status: dict[str, Any]) -> bool:
    failed = ("failed_active_health_check", "failed_outlier_check", "pending_active_hc")
    return not any(status.get(flag) for flag in failed)


def _address(host: dict[str, Any]) -> str:
    socket = host["address"]["socket_address"]
    return f"{socket['address']}:{socket['port_value']}"


# ---------------------------------------------------------------- servers

NULL = ("--model", "null", "--null-step-ms", "5", "--drain-delay", "1.5")


@contextmanager
def servers(folder: Path, count: int = 2, *options: str) -> Iterator[list[Server]]:
    """They serve, and have logs of their own in folders below `folder`."""
    with ExitStack() as stack:
        started = []
        for number in range(count):
            own = folder / f"server-{number}"
            own.mkdir()
            started.append(stack.enter_context(Server(own, *NULL, *options)))
        yield started


# ---------------------------------------------------------------- traffic
# Callers that use the shipped client without a pause, and what they saw.

_IMAGE = image_bytes()
_LONG = QueryTask("How many?", sampling=Sampling(max_tokens=60))


@dataclasses.dataclass
class Traffic:
    """Written by the callers' thread."""

    answered: int = 0
    slowest: float = 0.0  # seconds
    finished: int = 0  # streams
    resumed: int = 0  # times that another server went on with one
    answers: set[str] = dataclasses.field(default_factory=set)  # of streams: theirs are all equal
    failures: list[str] = dataclasses.field(default_factory=list)
    stream_failures: list[str] = dataclasses.field(default_factory=list)
    frames: int = 0  # answered
    moved: int = 0  # sessions that were told to go away
    session_failures: list[str] = dataclasses.field(default_factory=list)

    def wait_for(self, answers: int) -> None:
        """Until that many more calls were answered."""
        goal = self.answered + answers
        while self.answered < goal:
            time.sleep(0.01)


@contextlib.contextmanager
def traffic(
    target: str, *, callers: int = 8, streams: int = 0, sessions: int = 0
) -> Iterator[Traffic]:
    """Calls, streams and sessions until the block ends; what runs then is waited for."""
    seen = Traffic()
    stop = threading.Event()
    thread = threading.Thread(
        target=lambda: asyncio.run(_call(target, seen, stop, callers, streams, sessions)),
        daemon=True,
    )
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


async def _call(
    target: str, seen: Traffic, stop: threading.Event, callers: int, streams: int, sessions: int
) -> None:
    async with AsyncClient(target) as client:
        calls = [_unary(client, seen, stop) for _ in range(callers)]
        calls += [_stream(client, seen, stop) for _ in range(streams)]
        calls += [_session(client, seen, stop, f"robot-{n}") for n in range(sessions)]
        await asyncio.gather(*calls)


async def _session(client: AsyncClient, seen: Traffic, stop: threading.Event, name: str) -> None:
    """A robot: a frame at a time, in another session once it is told to go away."""
    while not stop.is_set():
        try:
            async with client.session([QueryTask("How many?")], name=name) as session:
                await _frames(session, seen, stop)
        except LegatoError as error:
            seen.session_failures.append(f"{error.code} {error.reason} {error}")


async def _frames(session: AsyncSession, seen: Traffic, stop: threading.Event) -> None:
    going = False
    while not going and not stop.is_set():
        await session.send(_IMAGE)
        async for answer in session:
            if isinstance(answer, GoAway):
                going = True
                seen.moved += 1
            elif isinstance(answer, FrameResult):
                _ = answer.result
                seen.frames += 1
                break
            elif isinstance(answer, FrameDropped):
                assert going, f"dropped: {answer.reason}"
                break


async def _unary(client: AsyncClient, seen: Traffic, stop: threading.Event) -> None:
    while not stop.is_set():
        start = time.monotonic()
        try:
            await client.query(None, "How many?")
            seen.answered += 1
        except LegatoError as error:
            seen.failures.append(f"{error.code} {error.reason} {error}")
        seen.slowest = max(seen.slowest, time.monotonic() - start)


async def _stream(client: AsyncClient, seen: Traffic, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            told = ""
            async for event in client.generate(None, _LONG):
                if isinstance(event, TextDelta):
                    told += event.text
                elif isinstance(event, Finished):
                    assert isinstance(event.result, QueryResult)
                    assert told == event.result.answer, "a word was lost or doubled"
                    seen.resumed += event.result.info.resumptions
            seen.answers.add(told)
            seen.finished += 1
        except LegatoError as error:
            seen.stream_failures.append(f"{error.code} {error.reason} {error}")
