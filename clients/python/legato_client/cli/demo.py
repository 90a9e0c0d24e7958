"""`legato demo`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import grpc

from legato_client import CaptionLength, CaptionTask, Client, Options, Result, Sampling, Task
from legato_client._grpc.channel import DEFAULT_TIMEOUT
from legato_client._proto import skills
from legato_client.cli import arguments, ask, forward, show
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal

SUBJECT_SKILLS = tuple(skill for skill in skills.SKILLS if skill is not skills.CAPTION)
"""Skills that take a subject."""


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """An image and the questions about it; empty text leaves a part out."""

    image: Path
    caption_length: CaptionLength | Literal[""] = "normal"
    subjects: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Subjects of each other skill."""

    def with_changes(self, **given: list[str] | str | None) -> Script:
        """Replace fields of the tasks; None keeps a field."""
        changes = {name: _subjects(each) for name, each in given.items() if each is not None}
        return dataclasses.replace(self, subjects={**self.subjects, **changes})

    def tasks(self) -> Iterator[tuple[str, Task]]:
        if self.caption_length:
            yield "caption", CaptionTask(self.caption_length)
        for skill in SUBJECT_SKILLS:
            for subject in self.subjects.get(skill.name, ()):
                yield f"{skill.name} {subject}", skill.make(subject, Sampling())


def script_for(image: Path) -> Script:
    """Return the script of a `.json` file next to the image, else a caption."""
    beside = image.with_suffix(".json")
    if not beside.is_file():
        return Script(image)
    try:
        said = json.loads(beside.read_text(encoding="utf-8"))
        return Script(
            image,
            caption_length=said.get("caption_length", ""),
            subjects={skill.name: _subjects(said.get(skill.name, ())) for skill in SUBJECT_SKILLS},
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise CommandError(f"{beside} is not a demo script: {error}") from error


def _subjects(given: Iterable[str] | str) -> tuple[str, ...]:
    """Split a text into subjects; an empty subject is skipped."""
    return tuple(filter(None, (given,) if isinstance(given, str) else given))


def sample_script() -> Script:
    """Read the script of the image that comes with the tiny model."""
    try:
        samples = Path(importlib.import_module("legato_tiny").path()) / "samples"
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the sample image comes with legato-tiny: {forward.hint('engine')}, "
            "or name an image with --image"
        ) from error
    return script_for(samples / "scene.jpg")


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
        self.program: Sequence[str] = (sys.executable, "-m", "legato_client.cli", "serve")
        self._options = options
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the block
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "asked for the process of a server that was not started"
        return self._process.pid

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*self.program, "--listen", self.target, *self._options],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
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


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="start a server, ask it about an image, draw the answers, stop it",
        description="Start a server, ask it about an image, draw the answers, and stop it.",
        example="legato demo --image street.jpg --detect bus",
    )
    parser.add_argument(
        "--output",
        type=arguments.image,
        default=Path("demo.png"),
        metavar="FILE",
        help="annotated image to write",
    )
    parser.add_argument(
        "--image",
        type=Path,
        metavar="FILE",
        help="image to ask about, default: the sample of the tiny model",
    )
    for skill in SUBJECT_SKILLS:
        metavar = "NOUN" if skill.places else skill.subject.upper()
        parser.add_argument(
            f"--{skill.name}",
            action="append",
            metavar=metavar,
            help=f"{skill.help}; may be repeated",
        )
    parser.add_argument(
        "--start-timeout",
        type=arguments.positive,
        default=300.0,
        metavar="SECONDS",
        help="time in which the server must be ready, default %(default)g",
    )
    parser.add_argument(
        "serve_options", nargs="*", metavar="-- OPTION", help="options of `legato serve`"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    forward.require_engine("demo")
    ask.check_output(args.output)
    script = script_for(args.image) if args.image else sample_script()
    script = script.with_changes(
        **{skill.name: getattr(args, skill.name) for skill in SUBJECT_SKILLS}
    )
    with arguments.readable_options():
        image = script.image.read_bytes()
    with LocalServer(args.serve_options) as server:
        with terminal.progress("starting the server") as update:
            server.wait_until_serving(args.start_timeout, update)
        terminal.line(f"serving on {server.target}, looking at {script.image}")
        results = _perform(server.target, script, image, terminal)
    ask.save(args.output, image, *results)
    terminal.line()
    terminal.line(f"saved {args.output}, and the server stopped with exit code 0")


def _perform(target: str, script: Script, image: bytes, terminal: Terminal) -> list[Result]:
    results: list[Result] = []
    with Client(target, stream_timeout=DEFAULT_TIMEOUT) as client:
        for title, task in script.tasks():
            terminal.line()
            terminal.heading(title)
            watch = show.EventPrinter(terminal).show
            results.append(ask.ask(client, image, task, Options(), watch))
        show.show_notice(terminal, client)
    return results
