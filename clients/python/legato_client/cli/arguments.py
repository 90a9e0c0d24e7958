"""Options that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from legato_client import Client, Options, Sampling
from legato_client._grpc.channel import DEFAULT_TARGET, DEFAULT_TIMEOUT, full_target
from legato_client._grpc.settings import Security, read_security
from legato_client._types.tasks import Task
from legato_client.batch import tasks
from legato_client.cli.settings import HELP, CommandError, ExitCode


def admin_target(server: str) -> str:
    """Return AdminService's address: this user's socket, else `server` (HOST:PORT) itself.

    A server makes its socket in a folder that only its user can enter; sockets in other folders
    may be anyone's.
    """
    host, _, port = server.rpartition(":")
    if host.strip("[]") in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::"):
        for folder in _folders():
            path = folder / f"admin-{port}.sock"
            if _is_own(folder) and _is_served(path):
                return f"unix:{path}"
    return server


def _folders() -> list[Path]:
    """List the folders the server chooses from, in its order."""
    user = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}")
    return [runtime / "legato", Path(f"/tmp/legato-{user}")]


def _is_served(path: Path) -> bool:
    """Return whether the socket is served: a killed server leaves its socket behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _is_own(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


# ---------------------------------------------------------------- arguments

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
"""Suffixes of image files that can be written."""


class Parser(argparse.ArgumentParser):
    """Parser that documents the exit codes and reports errors like every other failure."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(epilog=HELP, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting, so that `--json` holds for usage errors too."""
        raise CommandError(f"{message} (see {self.prog} --help)", ExitCode.USAGE)


def add_server_options(
    parser: argparse.ArgumentParser, *, timeout: float = DEFAULT_TIMEOUT
) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--server",
        metavar="HOST:PORT",
        type=server,
        default=DEFAULT_TARGET,
        help="default: %(default)s",
    )
    add_security_options(group)
    group.add_argument(
        "--timeout",
        type=positive,
        default=timeout,
        metavar="SECONDS",
        help="deadline of a call, default %(default)g",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document, errors too")


def add_security_options(group: Any) -> None:
    group.add_argument(
        "--tls", action="store_true", help="encrypt; implied by --ca and --cert, needed for a token"
    )
    group.add_argument(
        "--ca", metavar="PEM", help="authorities of the server's certificate, default: gRPC's own"
    )
    group.add_argument("--cert", metavar="PEM", help="this client's certificate")
    group.add_argument("--key", metavar="PEM", help="the private key of --cert")
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="a file with the token; default: the environment variable LEGATO_TOKEN",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults are the server's)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=count, metavar="K")
    group.add_argument("--max-tokens", type=count, metavar="N")
    group.add_argument("--seed", type=count)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT")
    group.add_argument("--model", default="", help="a served model, default: the server's")
    group.add_argument("--adapter", default="", metavar="NAME", help="a fine-tune of the server's")


def connect(args: argparse.Namespace, *, as_operator: bool = False) -> Client:
    """Connect to the server; `as_operator` without a credential: to the operator's own socket.

    Raises CommandError for security options that make no connection.
    """
    target = args.server
    if as_operator and not (args.token_file or args.cert):
        target = admin_target(target)
    with readable_options():
        return Client(
            target,
            timeout=args.timeout,
            stream_timeout=args.timeout,
            tls=args.tls or None,
            ca=args.ca,
            cert=args.cert,
            key=args.key,
            token=args.token_file,
        )


def security_of(args: argparse.Namespace) -> Security:
    """Build the security settings. Raises as `connect`."""
    with readable_options():
        return read_security(
            args.server,
            tls=args.tls or None,
            ca=args.ca,
            cert=args.cert,
            key=args.key,
            token=args.token_file,
        )


@contextlib.contextmanager
def readable_options() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}"
        raise CommandError(problem, ExitCode.USAGE) from None
    except ValueError as error:
        raise CommandError(str(error), ExitCode.USAGE) from None


def add_task_options(parser: argparse.ArgumentParser, *, places: bool = False) -> None:
    """Add task, sampling and server options; with `places` only tasks with boxes or points.

    `tasks_of` reads it.
    """
    parser.add_argument(
        "--task",
        action="append",
        required=True,
        type=task_name,
        metavar="TASK",
        help=f"{tasks.usage(places=places)}; may be repeated",
    )
    parser.add_argument("--max-objects", type=count, metavar="N", help="at most N of each task")
    add_min_confidence(parser)
    add_sampling_options(parser)
    add_server_options(parser)


def tasks_of(args: argparse.Namespace) -> dict[str, Task]:
    """Return the tasks of `add_task_options` by the texts that name them.

    Raises:
        ValueError: two are the same, or one does not take an option that is given.
    """
    return tasks.parse_all(args.task, sampling_of(args), args.max_objects, args.min_confidence)


def sampling_of(args: argparse.Namespace) -> Sampling:
    return Sampling(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_tokens,
        seed=args.seed,
        stop=tuple(args.stop),
    )


def options_of(args: argparse.Namespace) -> Options:
    return Options(model=args.model, adapter=args.adapter)


def server(text: str) -> str:
    """Parse HOST:PORT, or another gRPC target."""
    try:
        return full_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def image(text: str) -> Path:
    """Parse the name of an image file, whose suffix selects the format."""
    path = Path(text)
    if path.suffix.lower() not in IMAGES:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(IMAGES)}, not {text!r}")
    return path


def count(text: str) -> int:
    """Parse a number that the contract carries unsigned."""
    if (value := _whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, and is {value}")
    return value


def quality(text: str) -> int:
    """Parse a JPEG quality; above 95 files grow without looking better."""
    if not 1 <= (value := _whole(text)) <= 95:
        raise argparse.ArgumentTypeError(f"must be 1 to 95, and is {value}")
    return value


def task_name(text: str) -> str:
    """Parse a task's short form."""
    try:
        tasks.parse(text, Sampling(), None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def positive(text: str) -> float:
    if not (value := _number(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, and is {value:g}")
    return value


def share(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be 0 to 1, and is {value:g}")
    return value


def add_min_confidence(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--min-confidence",
        type=share,
        metavar="C",
        help="minimum confidence of objects, 0 to 1",
    )


def at_least_one(text: str) -> int:
    if (value := _whole(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, and is {value}")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # argparse would name the function that reads it
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
