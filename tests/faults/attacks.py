"""Attacks on a server while others use it: `make attack`.

Four processes run one attack after the other. Meanwhile health checks and queries of another caller
are timed, and the memory of the service is watched. Fails when a P95 exceeds thrice the quiet one
before it by more than 2 ms, when calls of others fail, or when memory grows by 200 MiB.

Attackers are on machines of their own, so their work must not delay the server. Where the user may
set real-time priorities (root), server and timed caller have one, which also excludes other work of
the machine. Elsewhere the attackers have what is idle of the processors (SCHED_IDLE), on a busy
machine too little for an attack. The attack "idle connections" does nothing: what others notice of
it is the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from legato.v1 import image_pb2, inference_pb2, inference_pb2_grpc, session_pb2

from tests.deploy.mesh import Envoy
from tests.e2e.server import INFERENCE, Server
from tests.service.access.credentials import Token, write

ATTACKERS = 4
MAX_RATIO = 3.0
SLACK = 0.002  # seconds: of a quiet P95 of 1 to 2 ms
MAX_GROWTH = 200 * 1024 * 1024
_PAUSE = 0.01  # seconds between two calls that are timed
_SIZE = 16 * 1024 * 1024 - 64
_QUERY = "/legato.v1.InferenceService/Query"
_BOGUS = (("authorization", "Bearer legato_nobody_" + "x" * 43),)


# ---------------------------------------------------------------- attacks: whole messages


def field(number: int, body: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*digits, value))


def _empties(number: int) -> bytes:
    return field(number, b"") * (_SIZE // len(field(number, b"")))


def _late_session() -> list[bytes]:
    opening = session_pb2.SessionRequest(open=session_pb2.SessionOpen())
    frame = session_pb2.SessionRequest()
    frame.frame.stamp.capture_time.seconds = 2**62
    return [opening.SerializeToString(), frame.SerializeToString()]


MESSAGES: dict[str, tuple[str, Callable[[], list[bytes]]]] = {
    "empty parts": (_QUERY, lambda: [field(8, _empties(2))]),
    "empty messages": (_QUERY, lambda: [_empties(8)]),
    "empty references": (_QUERY, lambda: [_empties(4)]),
    "empty tasks": ("/legato.v1.InferenceService/RunTasks", lambda: [_empties(2)]),
    "unknown fields": (_QUERY, lambda: [_empties(15)]),
    "repeated scalars": (_QUERY, lambda: [field(5, b"\x18\x01" * (_SIZE // 2))]),
    "a long frame_id": (_QUERY, lambda: [field(7, field(1, b"x" * _SIZE))]),
    "a long question": (_QUERY, lambda: [field(2, b"x" * _SIZE)]),
    "most fields allowed": (_QUERY, lambda: [field(8, field(2, b"\x0a\x00") * 63) * 127]),
    "a large GetServerInfo": ("/legato.v1.ServerService/GetServerInfo", lambda: [_empties(15)]),
    "a large health check": ("/grpc.health.v1.Health/Check", lambda: [field(1, b"x" * _SIZE)]),
    "a late capture_time": ("/legato.v1.SessionService/Session", _late_session),
    "empty standing tasks": (
        "/legato.v1.SessionService/Session",
        lambda: [field(1, _empties(4)[: _SIZE - 8])],
    ),
}


# ---------------------------------------------------------------- attacks: HTTP/2

_DATA, _HEADERS, RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS = 1, 4


class Http2:
    """A connection that sends what it wants to, within the windows of flow control."""

    def __init__(self, address: str, source: str = "", authorization: str = "") -> None:
        """Connect from the host `source`, which a proxy on this one can tell from others."""
        self._metadata = (("authorization", authorization),) if authorization else ()
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 10, (source, 0))
        self._socket.settimeout(5)
        self._initial = 65_535
        self._max_frame = 16_384
        self.window = 65_535
        self.windows: dict[int, int] = {}
        self._next = 1
        self._held: list[bytes] | None = None  # frames to send at once
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.send(_SETTINGS, 0, 0, b"")

    def send(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        """Send a frame."""
        head = struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream)
        if self._held is None:
            self._socket.sendall(head + body)
        else:
            self._held.append(head + body)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Send the frames of the block in one go at its end, however little time there is."""
        held: list[bytes] = []
        self._held = held
        yield
        self._held = None
        self._socket.sendall(b"".join(held))

    def open(self, path: str, metadata: Sequence[tuple[str, str]] = ()) -> int:
        """Begin a call."""
        stream, self._next = self._next, self._next + 2
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "x"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *(metadata or self._metadata),
        ]
        block = b"".join(
            b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
            for name, value in headers
        )
        self.windows[stream] = self._initial
        self.send(_HEADERS, _END_HEADERS, stream, block)
        return stream

    def push(self, stream: int, data: bytes | memoryview) -> int:
        """Send as much of `data` as the windows allow; return how many bytes went."""
        room = min(self.window, self.windows.get(stream, 0), self._max_frame)
        body = bytes(data[: max(room, 0)])
        if body:
            self.send(_DATA, 0, stream, body)
            self.window -= len(body)
            self.windows[stream] -= len(body)
        return len(body)

    def read(self) -> None:
        """Take a frame.

        Raises:
            OSError: the connection has ended, or is silent.
        """
        head = self._exactly(9)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        body = self._exactly(size)
        if kind == _WINDOW:
            (more,) = struct.unpack(">I", body)
            if stream:
                self.windows[stream] = self.windows.get(stream, 0) + more
            else:
                self.window += more
        elif kind == _SETTINGS and not flags & 1:
            self._take_settings(body)
        elif kind == _PING and not flags & 1:
            self.send(_PING, 1, 0, body)
        elif kind == RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self.windows.pop(stream, None)
        elif kind == _GOAWAY:
            raise ConnectionResetError

    def _take_settings(self, body: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", body):
            if name == 4:
                for each in self.windows:
                    self.windows[each] += value - self._initial
                self._initial = value
            elif name == 5:
                self._max_frame = min(value, 1 << 18)
        self.send(_SETTINGS, 1, 0, b"")

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise ConnectionResetError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Close it, also while another thread waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _connected(
    address: str, source: str, authorization: str, attack: Callable[[Http2], None]
) -> None:
    while True:
        with contextlib.suppress(OSError):
            connection = Http2(address, source, authorization)
            try:
                connection.read()
                attack(connection)
            finally:
                connection.close()
        time.sleep(0.05)


def _whole(method: str, messages: Sequence[bytes]) -> Callable[[Http2], None]:
    """Send these messages again and again, a call after the other."""
    sent = memoryview(b"".join(struct.pack(">BI", 0, len(each)) + each for each in messages))

    def attack(connection: Http2) -> None:
        while True:
            stream, left = connection.open(method), sent
            while stream in connection.windows and left:
                went = connection.push(stream, left)
                left = left[went:]
                if not went:
                    connection.read()
            if not left:
                connection.send(_DATA, _END_STREAM, stream, b"")
            while stream in connection.windows:
                with contextlib.suppress(TimeoutError):
                    connection.read()

    return attack


def _incomplete(
    size: int,
    metadata: Sequence[tuple[str, str]] = (),
    *,
    calls: int = 16,
    path: str = _QUERY,
    first: bytes = b"",
) -> Callable[[Http2], None]:
    """Calls of one connection, each with a message of `size` bytes that lacks its last byte.

    `first` is the message of a stream before it.
    """
    prefix = struct.pack(">BI", 0, len(first)) + first if first else b""

    def attack(connection: Http2) -> None:
        message = memoryview(prefix + struct.pack(">BI", 0, size) + bytes(size - 1))
        sent: dict[int, int] = {}  # bytes, by stream
        while True:
            while len(sent) < calls:
                sent[connection.open(path, metadata)] = 0
            went = 0
            for stream in list(sent):
                if stream not in connection.windows:
                    del sent[stream]
                    continue
                more = connection.push(stream, message[sent[stream] :])
                sent[stream] += more
                went += more
            if went == 0 or any(stream not in connection.windows for stream in sent):
                with contextlib.suppress(TimeoutError):
                    connection.read()

    return attack


def _resets(connection: Http2) -> None:
    """Thousands of calls that are reset as soon as they begin."""
    with connection.at_once():
        for _ in range(2500):
            stream = connection.open(_QUERY)
            connection.send(RST_STREAM, 0, stream, struct.pack(">I", 8))
            del connection.windows[stream]
        connection.send(_PING, 0, 0, bytes(8))
    connection.read()
    time.sleep(2)


def _idle_connections(address: str) -> None:
    """A hundred connections that say nothing, or half of what they have to."""
    while True:
        kept = []
        with contextlib.suppress(OSError):
            host, _, port = address.rpartition(":")
            for number in range(100):
                kept.append(socket.create_connection((host, int(port)), 10))
                if number % 2:
                    kept[-1].sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            time.sleep(5)
        for each in kept:
            each.close()


CONNECTIONS: dict[str, Callable[[Http2], None]] = {
    "incomplete messages of 33 MB": _incomplete(33_000_000),
    "incomplete messages of 16 MiB": _incomplete(16 * 1024 * 1024),
    "the same without a credential": _incomplete(16 * 1024 * 1024, _BOGUS),
    "the same in all calls of a connection": _incomplete(16 * 1024 * 1024, calls=256),
    "incomplete chunks of uploads": _incomplete(
        16 * 1024 * 1024,
        path="/legato.v1.ImageService/PutImage",
        first=image_pb2.PutImageRequest(header=image_pb2.PutImageHeader()).SerializeToString(),
    ),
    "incomplete frames of sessions": _incomplete(
        16 * 1024 * 1024,
        path="/legato.v1.SessionService/Session",
        first=session_pb2.SessionRequest(open=session_pb2.SessionOpen()).SerializeToString(),
    ),
    "resets": _resets,
}
_IDLE = "idle connections"
ATTACKS = (*MESSAGES, *CONNECTIONS, _IDLE)


def attack(name: str, address: str, source: str, authorization: str) -> None:
    """Attack from the host `source` for ever."""
    stand_back()
    if name == _IDLE:
        _idle_connections(address)
    elif name in MESSAGES:
        method, make = MESSAGES[name]
        _connected(address, source, authorization, _whole(method, make()))
    _connected(address, source, authorization, CONNECTIONS[name])


# ---------------------------------------------------------------- what others notice


class Figures(NamedTuple):
    """What other callers and the host saw for a while."""

    health_p95: float  # seconds
    query_p95: float
    calls: int
    failures: int
    growth: int  # bytes


def _timed(call: Callable[[], Any], until: float, times: list[float]) -> int:
    failures = 0
    while time.monotonic() < until:
        begin = time.monotonic()
        try:
            call()
        except grpc.RpcError:
            failures += 1
        times.append(time.monotonic() - begin)
        time.sleep(_PAUSE)
    return failures


def watch(address: str, pid: int, seconds: float, metadata: Any = ()) -> Figures:
    """Time calls of a caller of its own, and watch the memory of the process."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    before = peak = _resident(pid)
    health: list[float] = []
    queries: list[float] = []
    failures = [0, 0]
    with grpc.insecure_channel(address, options=options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        check = stub.Check
        ask: Any = inference_pb2_grpc.InferenceServiceStub(channel).Query
        question = inference_pb2.QueryRequest(question="hello")
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        until = time.monotonic() + seconds

        def checking() -> None:
            failures[0] = _timed(lambda: check(request, timeout=10), until, health)

        def asking() -> None:
            call = lambda: ask(question, timeout=10, metadata=metadata)  # noqa: E731
            failures[1] = _timed(call, until, queries)

        threads = [threading.Thread(target=each) for each in (checking, asking)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, _resident(pid))
            time.sleep(0.02)
    return Figures(
        sorted(health)[len(health) * 95 // 100],
        sorted(queries)[len(queries) * 95 // 100],
        len(health) + len(queries),
        sum(failures),
        peak - before,
    )


def stand_out() -> None:
    """Give this process and its children a real-time priority, where that is allowed."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def stand_back() -> None:
    """Keep this process, an attacker, from delaying the others."""
    is_first = os.sched_getscheduler(0) == os.SCHED_RR
    os.sched_setscheduler(0, os.SCHED_OTHER if is_first else os.SCHED_IDLE, os.sched_param(0))


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def attackers(
    address: str, name: str, count: int = ATTACKERS, authorization: str = ""
) -> Iterator[None]:
    """Run the attack in processes of its own for the length of the block."""
    command = [sys.executable, "-m", "tests.faults.attacks", "--attack", name, address]
    running = [
        subprocess.Popen(
            [*command, f"127.0.0.{number + 2}", authorization], stderr=subprocess.DEVNULL
        )
        for number in range(count)
    ]
    try:
        time.sleep(1.0)  # to import, and to make the messages
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
        for process in running:
            process.wait()


class Attacked(NamedTuple):
    """The figures of an attack, and of the quiet time right before it."""

    quiet: Figures
    figures: Figures

    @property
    def ratios(self) -> tuple[float, float]:
        """Those of the P95 of health checks and of queries."""
        now, then = self.figures, self.quiet
        return now.health_p95 / then.health_p95, now.query_p95 / then.query_p95


def run(
    address: str,
    pid: int,
    names: Sequence[str],
    seconds: float,
    metadata: Any = (),
    authorization: str = "",
) -> dict[str, Attacked]:
    """The figures of each attack."""
    found = {}
    watch(address, pid, 1.0, metadata)
    for name in names:
        quiet = watch(address, pid, seconds, metadata)
        with attackers(address, name, authorization=authorization):
            found[name] = Attacked(quiet, watch(address, pid, seconds, metadata))
        time.sleep(0.5)
    return found


def problems(attacked: dict[str, Attacked]) -> list[str]:
    """What other callers must not notice."""
    found = []
    for name, (quiet, each) in attacked.items():
        for what, now, then in (
            ("health", each.health_p95, quiet.health_p95),
            ("Query", each.query_p95, quiet.query_p95),
        ):
            if now > MAX_RATIO * then + SLACK:
                found.append(f"{name}: {what} takes {now / then:.1f} times its quiet P95")
        found += harm(name, each)
    return found


def harm(name: str, figures: Figures) -> list[str]:
    """What no attack may do on a machine of any speed."""
    found = []
    if figures.growth > MAX_GROWTH:
        found.append(f"{name}: memory grows by {figures.growth / 2**20:.0f} MiB")
    if figures.failures:
        found.append(f"{name}: {figures.failures} of {figures.calls} calls of others failed")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="attacks", description=__doc__)
    parser.add_argument("--seconds", default=5.0, type=float, help="of each attack")
    parser.add_argument("--only", action="append", choices=ATTACKS, help="this attack")
    parser.add_argument("--model", default="null")
    parser.add_argument("--tokens", action="store_true", help="the server asks for credentials")
    parser.add_argument("--envoy", action="store_true", help="through the shipped Envoy")
    parser.add_argument("--accepted", action="store_true", help="attackers have a credential")
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.attack:
        attack(*arguments.attack)
    stand_out()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ["--model", arguments.model]
        metadata: Sequence[tuple[str, str]] = ()
        authorization = ""
        if arguments.tokens or arguments.accepted:
            token, attacker = Token("a", ["infer"]), Token("b", ["infer", "upload"], "attackers")
            options += ["--tokens", write(folder / "tokens.toml", token, attacker)]
            metadata = token.metadata
            authorization = attacker.metadata[0][1] if arguments.accepted else ""
        server = stack.enter_context(Server(folder, *options))
        address = server.address
        if arguments.envoy:
            (folder / "envoy").mkdir()
            envoy = stack.enter_context(Envoy(folder / "envoy", server.address))
            address = envoy.address
        names = arguments.only or ATTACKS
        attacked = run(
            address, server.process.pid, names, arguments.seconds, metadata, authorization
        )
    lines = [f"{'':32s} health P95      Query P95       calls  failed  memory"]
    for name, each in attacked.items():
        figures, (health, query) = each.figures, each.ratios
        lines.append(
            f"{name:32s} {figures.health_p95 * 1e3:6.1f} ms {health:4.1f}x"
            f" {figures.query_p95 * 1e3:6.1f} ms {query:4.1f}x"
            f" {figures.calls:6d} {figures.failures:6d} {figures.growth / 2**20:+6.0f} MiB"
        )
    found = problems(attacked)
    lines += [f"PROBLEM {problem}" for problem in found]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
