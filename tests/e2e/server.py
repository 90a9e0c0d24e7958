"""A real server: a service process that runs a real engine process."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, session_pb2_grpc
from legato_engine import failpoints
from legato_engine.shm import blob_folder

from tests.fork_server.popen import NAME
from tests.service.harness import Refusal, read_refusal

INFERENCE = "legato.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
TWO_HEARTBEATS = 0.5  # seconds; what is told after them was measured within them


PATIENCE = 170.0
"""Seconds, less than a test's own: its timeout does not end the thread that waits."""


SLOWLY = {failpoints.VARIABLE: "engine.launch=sleep(0.015)"}
"""Variables of a server whose long answers take seconds on any machine, and no more work."""

RANDOM = ("--model", "random-tiny")
"""Options of a server whose answers mean nothing, a third of the work of legato-tiny's."""


def until(condition: Callable[[], object]) -> None:
    """Return once `condition` holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"it did not come true within {PATIENCE:g} s"
        time.sleep(0.01)


class ServerLog:
    """Log of a server's processes. Each writes its lines some time after what they tell of."""

    process: subprocess.Popen[bytes]

    def __init__(self, path: Path) -> None:
        self._log = path

    def log(self) -> str:
        return self._log.read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its whole log lines of this name so far; lines of other programs' are passed over."""
        whole, _, _ = self._log.read_bytes().rpartition(b"\n")
        lines = [line for line in whole.splitlines() if line.startswith(b"{")]
        return [event for line in lines if (event := json.loads(line)).get("event") == name]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """The lines of this name; waits until there are `count`."""
        until(lambda: len(self.events(name)) >= count)
        return self.events(name)

    def wait_for_address(self) -> str:
        """Where it listens; an error with its log if it ends before it is ready."""
        until(lambda: self.events("ready") or self.process.poll() is not None)
        assert self.process.poll() is None, self.log()
        return str(self.wait_for("ready")[0]["address"])

    def worker_pids(self, count: int = 1) -> list[int]:
        """The process ids of its workers, ended ones included; waits for `count` of them."""
        return [int(each["pid"]) for each in self.wait_for("worker_ready", count)]


class Server(ServerLog):
    """`python -m legato_service` on a free loopback port, for the length of a `with` block.

    Entering waits until it serves. Leaving stops it like an operator would, unless the test did.
    `environment` has variables to add. It pipelines, as on a GPU: the harder case, which is not
    the default on a CPU.
    Another `program` than the service takes the same options.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        program: Sequence[str] = ("-m", "legato_service"),
        environment: Mapping[str, str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`credentials` are those of the test's own channel, to a server with TLS."""
        super().__init__(folder / "server.log")
        self._options = options
        self._program = program
        self._environment = {**ENVIRONMENT, **(environment or {})}
        self._credentials = credentials
        self.address = ""

    def __enter__(self) -> Server:
        command = [sys.executable, *self._program, "--listen", "127.0.0.1:0"]
        command += ["--admin-listen", "same"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--threads", "1", "--pipeline-depth", "2", *self._options],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        self.address = self.wait_for_address()
        # No retry policy: the tests see the first answer of the server, whatever it is.
        if self._credentials is None:
            self.channel = grpc.insecure_channel(self.address)
        else:
            self.channel = grpc.secure_channel(self.address, self._credentials)
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.sessions: Any = session_pb2_grpc.SessionServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)
        until(self.is_serving)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.channel.close()
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()

    # ------------------------------------------------------------ what it says

    def is_serving(self) -> bool:
        """What its health says."""
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        return bool(self.health.Check(request).status == SERVING)

    def watch(self) -> Iterator[health_pb2.HealthCheckResponse]:
        """Every change of its health."""
        watch: Iterator[health_pb2.HealthCheckResponse] = self.health.Watch(
            health_pb2.HealthCheckRequest(service=INFERENCE)
        )
        return watch

    def load(self) -> admin_pb2.GetLoadResponse:
        """What the engine held at its last heartbeat."""
        request = admin_pb2.GetLoadRequest()
        load: admin_pb2.GetLoadResponse
        try:
            load = self._admin.GetLoad(request)
        except grpc.RpcError:  # a connection that was idle for long may break at its first call
            load = self._admin.GetLoad(request)
        return load

    def holds(self, *, running: int, waiting: int) -> bool:
        """Whether the engine's last heartbeat said so."""
        load = self.load()
        return (load.running, load.waiting) == (running, waiting)

    def settle(self) -> None:
        """Return once the engine holds nothing: no request, no page, no launch, no image.

        A launch in flight would move the step, so two looks at an idle engine with the same step,
        apart by more than a heartbeat, show that there is none.
        """
        while True:
            until(lambda: self._is_idle(self.load()))
            step = self.load().engine_step
            time.sleep(TWO_HEARTBEATS)
            load = self.load()
            if self._is_idle(load) and load.engine_step == step:
                break
        until(lambda: not self.blobs())

    @staticmethod
    def _is_idle(load: admin_pb2.GetLoadResponse) -> bool:
        return load.running + load.waiting + load.sessions == 0 and load.kv_used_ratio == 0

    # ------------------------------------------------------------ what it is made of

    @property
    def engine_pid(self) -> int:
        """The process id of its only engine; waits for one that is being started."""
        (pid,) = self.engine_pids
        return pid

    @property
    def engine_pids(self) -> list[int]:
        """Those of its engines; waits until there is one."""
        while not (found := self._engines()):
            time.sleep(0.01)
        return found

    def _engines(self) -> list[int]:
        return [pid for pid in children(self.process.pid) if _is_engine(pid)]

    def child_pids(self) -> list[int]:
        """Its engine and its workers."""
        return children(self.process.pid)

    def blobs(self) -> list[Path]:
        """Images on their way to the engine."""
        return list(blob_folder().glob(f"legato-{self.process.pid}-*"))

    def kill_engine(self) -> int:
        """SIGKILL to the engine; its process id."""
        pid = self.engine_pid
        os.kill(pid, signal.SIGKILL)
        return pid


def failure_of(read: Callable[[], object]) -> Refusal:
    """The failure of a call that must fail; `read` waits for its end."""
    try:
        read()
    except grpc.RpcError as error:
        return read_refusal(error)
    raise AssertionError("the call succeeded")


def exists(pid: int) -> bool:
    """Whether a process runs, zombies aside."""
    return _stat(pid).get("state", "Z") != "Z"


def own_bytes(pid: int) -> int:
    """Memory that a process has written to; pages of files come and go as the kernel likes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(size) for name, size, _ in (line.split() for line in rollup)}
    return (sizes["Anonymous:"] + sizes["Swap:"]) * 1024


def open_files(pid: int) -> collections.Counter[str]:
    """The kinds of a process's open files, with how many there are of each."""
    kinds: collections.Counter[str] = collections.Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds[os.readlink(link).partition(":")[0]] += 1
        except FileNotFoundError:
            continue  # closed meanwhile
    return kinds


def policies(pid: int) -> set[int]:
    """How the kernel schedules the threads of a process."""
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return {os.sched_getscheduler(thread) for thread in threads}


def children(pid: int) -> list[int]:
    """The process ids of a process's own children, but for the one that forks others for it."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    stats = {child: _stat(child) for child in found}
    return [
        child
        for child, stat in stats.items()
        if stat.get("parent") == str(pid) and stat["state"] != "Z" and stat["name"] != NAME
    ]


def _is_engine(pid: int) -> bool:
    try:
        return b"legato_engine.core.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _stat(pid: int) -> dict[str, str]:
    """Name, state and parent of a process, empty when there is none."""
    try:
        begin, rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
    except OSError:
        return {}
    fields = rest.split()
    return {"name": begin.partition("(")[2], "state": fields[0], "parent": fields[1]}
