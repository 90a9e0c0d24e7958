"""Attacks on the HTTP listeners: what each does, and what others notice of four at once.

`python -m tests.faults.http_attacks` starts a server of the null engine with tokens, and `legato
http` before it; then asks as a caller does, in quiet and beside each attack, and prints the times
and how far the memory of `legato http` grew. With names it runs these attacks only. Priorities are
those of `tests.faults.attacks`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import http.client
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.deploy.mesh import Envoy
from tests.e2e.server import ENVIRONMENT, Server
from tests.faults.attacks import stand_back, stand_out
from tests.service.access.credentials import Token, write

ATTACKERS = 4
MIB = 1024 * 1024
PATHS = ("/v1/chat/completions", "/v1/query")
ROBOT = Token("robot", ["infer"])
_PATIENCE = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class Target:
    """Where an attacker sends what, with which token."""

    host: str
    port: int
    token: str = "of-nobody"

    def head(self, path: str, length: int | None = None, method: str = "POST") -> bytes:
        """The head of a request for JSON."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}"]
        lines += ["Content-Type: application/json", f"Authorization: Bearer {self.token}"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode()


Attack = Callable[[Target], Coroutine[Any, Any, None]]


async def _talk(target: Target, *pieces: bytes, pause: float = 0.0, stay: float = 0.0) -> None:
    """Send these bytes, wait for an answer or the end for `stay` seconds, leave."""
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            async with asyncio.timeout(stay or _PATIENCE):
                await reader.read(MIB if stay == 0.0 else -1)
        finally:
            writer.transport.abort()


async def _together(attack: Coroutine[Any, Any, None], *more: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(attack, *more)


def _chat(field: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "hello"}], ' + field + b"}"


async def ignored_fields(target: Target) -> None:
    """20 MiB of empty lists in a field without effect."""
    body = _chat(b'"metadata": [' + b"[]," * (20 * MIB // 3) + b"1]")
    await _talk(target, target.head(PATHS[0], len(body)), body)


async def wide_text(target: Target) -> None:
    """20 MiB of text with one character that makes four bytes of each."""
    body = _chat(b'"user": "' + "\U0001f600".encode() + b"a" * 20 * MIB + b'"')
    await _talk(target, target.head(PATHS[0], len(body)), body)


async def small_strings(target: Target) -> None:
    """20 MiB of short strings in a list whose length is checked when it is there."""
    body = _chat(b'"stop": [' + b'"a",' * (5 * MIB) + b'"a"]')
    await _talk(target, target.head(PATHS[0], len(body)), body)


async def large_pictures(target: Target) -> None:
    """Pictures of 30 MiB that no decoder takes."""
    picture = base64.b64encode(bytes(30 * MIB))
    body = b'{"question": "?", "image_url": "data:image/jpeg;base64,' + picture + b'"}'
    await _talk(target, target.head(PATHS[1], len(body)), body)


async def announced_bodies(target: Target) -> None:
    """Eight bodies of 43 MiB that do not come."""
    announced = target.head(PATHS[0], 43 * MIB)
    await _together(*(_talk(target, announced, stay=5.0) for _ in range(8)))


async def half_bodies(target: Target) -> None:
    """Eight bodies that stop after 5 MiB."""
    begun = target.head(PATHS[0], 43 * MIB), _chat(b'"user": "')[:-1] + b"a" * 5 * MIB
    await _together(*(_talk(target, *begun, stay=5.0) for _ in range(8)))


async def half_heads(target: Target) -> None:
    """Three hundred connections that never end their heads."""
    half = target.head(PATHS[0])[:-4]
    await _together(*(_talk(target, half, stay=5.0) for _ in range(300)))


async def trickled_heads(target: Target) -> None:
    """A hundred connections whose heads come byte by byte."""
    pieces = [bytes((byte,)) for byte in target.head(PATHS[0])[:-4]]
    await _together(*(_talk(target, *pieces, pause=0.5) for _ in range(100)))


async def unread_answers(target: Target) -> None:
    """Fifty connections that ask for more than they read."""
    asked = target.head("/openapi.json", method="GET") * 200
    await _together(*(_talk(target, asked, stay=5.0) for _ in range(50)))


async def bogus_tokens(target: Target) -> None:
    """Small requests of callers that the server does not know, as fast as they can be sent."""
    body = _chat(b'"user": "x"')
    await _together(
        *(_talk(target, target.head(PATHS[0], len(body)), body, pause=0.01) for _ in range(10))
    )


ATTACKS: dict[str, Attack] = {
    each.__name__: each
    for each in (
        ignored_fields,
        wide_text,
        small_strings,
        large_pictures,
        announced_bodies,
        half_bodies,
        half_heads,
        trickled_heads,
        unread_answers,
        bogus_tokens,
    )
}


def _attack(name: str, target: Target, ready: Any) -> None:
    async def forever() -> None:
        ready.release()
        while True:
            await ATTACKS[name](target)

    stand_back()
    asyncio.run(forever())


@contextlib.contextmanager
def attacking(name: str, targets: Sequence[Target]) -> Iterator[None]:
    """One attacker for each target, in a process of its own, for the length of the block."""
    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    attackers = [context.Process(target=_attack, args=(name, each, ready)) for each in targets]
    for each in attackers:
        each.start()
    try:
        for _ in attackers:
            assert ready.acquire(timeout=_PATIENCE)
        yield
    finally:
        for each in attackers:
            each.terminate()
        for each in attackers:
            each.join()


@contextlib.contextmanager
def legato_http(server: str, *options: str, command: str = "http") -> Iterator[tuple[Target, int]]:
    """`legato http`, or another `command`, before a server; its address and process id."""
    words = [sys.executable, "-m", "legato_client.cli", command, "--json", "--server", server]
    with subprocess.Popen(
        [*words, "--listen", "127.0.0.1:0", *options], stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(json.loads(process.stdout.readline())["url"])
            yield Target(address.hostname or "", address.port or 0), process.pid
        finally:
            process.terminate()
            process.wait(_PATIENCE)


class Memory:
    """How far the resident memory of a process has grown from here, at most, in bytes."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._status = self._folder / "status"
        self._before = self._read("VmRSS")
        self.forget()

    def forget(self) -> None:
        """Forget the peak, not from where it has grown."""
        (self._folder / "clear_refs").write_text("5")

    @property
    def growth(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        lines = self._status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def ask(target: Target, path: str, body: bytes = b"") -> int:
    """The status of an answer, over a connection of its own."""
    with contextlib.closing(
        http.client.HTTPConnection(target.host, target.port, timeout=_PATIENCE)
    ) as connection:
        headers = {"content-type": "application/json", "authorization": f"Bearer {target.token}"}
        connection.request("POST" if body else "GET", path, body or None, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


@dataclasses.dataclass
class Times:
    """Seconds that others waited for their answers, and how many got none."""

    healthz: list[float] = dataclasses.field(default_factory=list)
    query: list[float] = dataclasses.field(default_factory=list)
    failures: int = 0

    def line(self) -> str:
        """The 95th percentiles, in milliseconds."""
        health, query = (sorted(each)[int(len(each) * 0.95)] for each in (self.healthz, self.query))
        asked = len(self.healthz) + len(self.query)
        return (
            f"healthz {health * 1e3:7.1f} ms, query {query * 1e3:7.1f} ms, "
            f"{self.failures} of {asked} failed"
        )


def measure(target: Target, seconds: float) -> Times:
    """Ask for the health and for an answer, in turn."""
    body = json.dumps({"question": "why?", "settings": {"max_tokens": 1}}).encode()
    times, end = Times(), time.monotonic() + seconds
    while time.monotonic() < end:
        for kept, path, sent in ((times.healthz, "/healthz", b""), (times.query, PATHS[1], body)):
            begun = time.monotonic()
            try:
                times.failures += ask(target, path, sent) != http.HTTPStatus.OK
            except (OSError, http.client.HTTPException):
                times.failures += 1
            kept.append(time.monotonic() - begun)
        time.sleep(0.01)
    return times


def _say(name: str, line: str) -> None:
    sys.stdout.write(f"{name:25} {line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print a line in quiet, and one for each attack with tokens that are refused and accepted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("attacks", nargs="*", metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--command", choices=["http", "playground"], default="http")
    parser.add_argument("--envoy", action="store_true", help="the shipped Envoy before the server")
    args = parser.parse_args()
    stand_out()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.toml"
        write(tokens, ROBOT)
        with contextlib.ExitStack() as stack:
            options = ("--model", "null", "--tokens", str(tokens))
            address = stack.enter_context(Server(Path(folder), *options)).address
            if args.envoy:
                (Path(folder) / "envoy").mkdir()
                address = stack.enter_context(Envoy(Path(folder) / "envoy", address)).address
            http_server = legato_http(address, command=args.command)
            stranger, pid = stack.enter_context(http_server)
            caller = dataclasses.replace(stranger, token=ROBOT.text)
            measure(caller, 2.0)
            memory = Memory(pid)
            _say("quiet", measure(caller, args.seconds).line())
            for name in args.attacks or ATTACKS:
                for kind, attacker in (("refused", stranger), ("accepted", caller)):
                    memory.forget()
                    with attacking(name, [attacker] * ATTACKERS):
                        times = measure(caller, args.seconds)
                    growth = f"+{memory.growth / MIB:.0f} MiB"
                    _say(f"{name} {kind}", f"{times.line()}, {growth}")
                    time.sleep(1.0)
            _say("quiet", measure(caller, args.seconds).line())


if __name__ == "__main__":
    main()
