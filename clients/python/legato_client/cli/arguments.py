"""Options that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from legato_client import Client, InvalidArgument, Options, ResponseFormat, Sampling
from legato_client._grpc.channel import DEFAULT_TARGET, DEFAULT_TIMEOUT, full_target
from legato_client._grpc.settings import Security, read_security
from legato_client._types.tasks import Task
from legato_client.batch import images, tasks
from legato_client.cli.settings import HELP, CommandError, ExitCode, closest


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


IMAGES = (".png", ".jpg", ".jpeg", ".webp")
"""Suffixes of image files that can be written."""


_MAX_USAGE_LINES = 4
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


def read_image(name: str) -> bytes:
    """Read a JPEG, PNG or WebP file, or standard input for "-"."""
    with readable_options():
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    if not (data.startswith(_MAGIC) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")):
        video = images.is_video(name)
        hint = ": it seems to be a video; use `legato run` or `legato watch`" if video else ""
        where = "standard input" if name == "-" else name
        raise CommandError(f"{where} is no JPEG, PNG or WebP image{hint}", ExitCode.USAGE)
    return data


class HelpFormatter(argparse.HelpFormatter):
    """Help that keeps line breaks and names defaults."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        lines = text.splitlines()
        return "\n".join(
            f"{indent}{line}" if line.startswith(" ") else fill(line, width, indent)
            for line in lines
        )

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_shown = default not in (None, "", argparse.SUPPRESS) and not isinstance(default, bool)
        if not action.option_strings or "default" in text or not is_shown or default == []:
            return text
        if isinstance(default, list | tuple):
            return f"{text}; default {','.join(map(str, default))}"
        return f"{text}; default %(default)s"

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        text = super()._format_usage(usage, actions, groups, prefix)
        if text.count("\n") <= _MAX_USAGE_LINES:
            return text
        needed = [each for each in actions if each.required or not each.option_strings]
        shorter = super()._format_usage(usage, needed, [], prefix)
        return shorter.replace(self._prog, f"{self._prog} [options]", 1)

    def _format_action(self, action: argparse.Action) -> str:
        groups: Sequence[CommandGroup] = getattr(action, "groups", ())
        if not groups or not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        by_name = {each.dest: each for each in action._get_subactions()}
        text = ""
        for group in groups:
            text += f"\n{group.title}: {group.purpose}\n"
            rows = [by_name[name] for name in group.commands if name in by_name]
            text += "".join(super(HelpFormatter, self)._format_action(row) for row in rows)
            text += f"{'':{self._current_indent + 2}}$ {group.example}\n"
        return text


@dataclasses.dataclass(frozen=True, slots=True)
class CommandGroup:
    """Commands that are listed together."""

    title: str
    purpose: str
    example: str
    commands: tuple[str, ...]


class Parser(argparse.ArgumentParser):
    """Parser that documents the exit codes and reports errors like every other failure.

    The errors suggest the closest known word. `example` is a command line for the help.
    """

    def __init__(self, *, example: str = "", exit_codes: str = HELP, **settings: Any) -> None:
        self.example = example
        shown = f"example:\n  $ {example}\n\n" if example else ""
        defaults = {"formatter_class": HelpFormatter, "epilog": shown + exit_codes}
        super().__init__(**{**defaults, **settings, "allow_abbrev": False})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take options also between positional words; suggest the closest one for an unknown one.

        The options are parsed first, then what they leave. argparse's own `parse_intermixed_args`
        takes words after "--" for options.
        """
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        whole = self._actions
        positional = [each for each in whole if not each.option_strings]
        steps = [(whole, words)]
        shows_help = bool({"-h", "--help"} & {*words[:end]})
        if not (shows_help or any(each.nargs == argparse.PARSER for each in positional)):
            options = [each for each in whole if each.option_strings]
            steps = [(options, words[:end]), (positional, words[end:])]
        unknown: list[str] = []
        try:
            for self._actions, some in steps:
                namespace, unknown = self.parse_known_args([*unknown, *some], namespace)
        finally:
            self._actions = whole
        if unknown:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            near = closest(unknown[0].partition("=")[0], known)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return namespace

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        hint = closest(str(value), list(map(str, action.choices)))
        if isinstance(action, argparse._SubParsersAction):
            raise argparse.ArgumentError(None, f"there is no command {value!r}{hint}")
        known = ", ".join(map(str, action.choices))
        raise argparse.ArgumentError(action, f"must be one of {known}, not {value!r}{hint}")

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
        help="address of the server",
    )
    group.add_argument(
        "--tls",
        action="store_true",
        help="encrypt the connection; implied by --ca and --cert, needed for a token",
    )
    group.add_argument(
        "--ca",
        metavar="PEM",
        help="file with the authorities of the server's certificate, default: gRPC's own",
    )
    group.add_argument("--cert", metavar="PEM", help="file with this client's certificate")
    group.add_argument("--key", metavar="PEM", help="file with the private key of --cert")
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token, default: the environment variable LEGATO_TOKEN",
    )
    group.add_argument(
        "--timeout",
        type=positive,
        default=timeout,
        metavar="SECONDS",
        help="deadline of a call in seconds, default %(default)g",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, errors too")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults are the server's)")
    group.add_argument(
        "--temperature",
        type=not_negative,
        metavar="T",
        help="randomness of the answer, 0 or more; 0 always takes the likeliest token",
    )
    group.add_argument(
        "--top-p",
        type=above_zero_share,
        metavar="P",
        help="sample among the likeliest tokens with this total probability, above 0 up to 1",
    )
    group.add_argument(
        "--top-k",
        type=count,
        metavar="N",
        help="sample among the N likeliest tokens; 0: among all",
    )
    group.add_argument(
        "--max-tokens", type=at_least_one, metavar="N", help="maximum length of an answer in tokens"
    )
    group.add_argument(
        "--seed", type=count, metavar="N", help="number that makes sampling repeatable"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be repeated",
    )
    group.add_argument(
        "--model", default="", metavar="NAME", help="served model to ask, default: the server's own"
    )
    group.add_argument("--adapter", default="", metavar="NAME", help="fine-tune of the server's")


def connect(args: argparse.Namespace, *, as_operator: bool = False) -> Client:
    """Connect to the server; `as_operator` without a credential: to the operator's own socket."""
    target = args.server
    if as_operator and not (args.token_file or args.cert):
        target = admin_target(target)
    with readable_options():
        return Client(
            target,
            timeout=args.timeout,
            stream_timeout=args.timeout,
            token=args.token_file,
            **tls_of(args),
        )


def tls_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"tls": args.tls or None, "ca": args.ca, "cert": args.cert, "key": args.key}


def security_of(args: argparse.Namespace) -> Security:
    with readable_options():
        return read_security(args.server, token=args.token_file, **tls_of(args))


@contextlib.contextmanager
def readable_options() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot read {error.filename}: {error.strerror}"
        raise CommandError(problem, ExitCode.USAGE) from None
    except ValueError as error:
        raise CommandError(str(error), ExitCode.USAGE) from None


@contextlib.contextmanager
def naming_options(args: argparse.Namespace, images: Sequence[str] = ()) -> Iterator[None]:
    """Let the server's complaints name an image's file or the option, not the contract's field."""
    try:
        yield
    except InvalidArgument as error:
        for violation in error.field_violations[:1]:
            name = violation.field.rpartition(".")[2]
            of_image = re.match(r"(?:task\.query\.)?image(?:s\[(\d+)\])?(?!\w)", violation.field)
            if of_image and images:
                error.message = f"{images[int(of_image[1] or 0)]}: {violation.description}"
            elif name in vars(args):
                error.message = f"--{name.replace('_', '-')}: {violation.description}"
        raise


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
        help=f"what to ask: {tasks.usage(places=places)}; may be repeated",
    )
    add_object_options(parser)
    add_sampling_options(parser)
    add_server_options(parser)


def tasks_of(args: argparse.Namespace) -> dict[str, Task]:
    """Return the tasks of `add_task_options` by the texts that name them.

    Raises ValueError if two are the same, or one does not take an option that is given.
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


def task_name(text: str) -> str:
    try:
        tasks.parse(text, Sampling(), None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def text(given: str) -> str:
    """Parse what a model is asked, which is not blank."""
    if not given.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return given


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """Add the texts that an answer may be, of which one may be given."""
    formats = parser.add_mutually_exclusive_group()
    for option, metavar, read, what in (
        ("--json-schema", "FILE", _content, "answer in JSON of the schema in this file"),
        ("--choices", "A,B,...", _split, "answer with one of these texts"),
        ("--regex", "REGEX", str, "answer with a match of this expression, in Rust's syntax"),
        ("--grammar", "FILE", _content, "answer as the GBNF or Lark grammar in this file"),
    ):
        kind = functools.partial(_format, option.removeprefix("--").replace("-", "_"), read)
        formats.add_argument(option, dest="response_format", metavar=metavar, type=kind, help=what)


def _format(field: str, read: Callable[[str], Any], given: str) -> ResponseFormat:
    return ResponseFormat(**{field: read(given)})


def _split(given: str) -> tuple[str, ...]:
    return tuple(given.split(","))


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise argparse.ArgumentTypeError(f"cannot read {path}: {reason}") from None


def add_object_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-objects", type=at_least_one, metavar="N", help="maximum number of objects of a task"
    )
    parser.add_argument(
        "--min-confidence",
        type=share,
        metavar="C",
        help="minimum confidence of objects, 0 to 1",
    )


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


NumberT = TypeVar("NumberT", int, float)


def _checked(
    read: Callable[[str], NumberT], holds: Callable[[NumberT], bool], rule: str
) -> Callable[[str], NumberT]:
    """Return a parser of numbers of which `holds` is true; `rule` says so."""

    def parse(text: str) -> NumberT:
        if not holds(value := read(text)):
            raise argparse.ArgumentTypeError(f"{rule}, and is {value:g}")
        return value

    return parse


count = _checked(_whole, lambda value: value >= 0, "must not be negative")
at_least_one = _checked(_whole, lambda value: value >= 1, "must be at least 1")
quality = _checked(_whole, lambda value: 1 <= value <= 95, "must be 1 to 95")
"""Quality of a JPEG: above 95 files grow without looking better."""
positive = _checked(_number, lambda value: value > 0, "must be above 0")
share = _checked(_number, lambda value: 0 <= value <= 1, "must be 0 to 1")
not_negative = _checked(_number, lambda value: 0 <= value < math.inf, "must be 0 or more")
above_zero_share = _checked(_number, lambda value: 0 < value <= 1, "must be above 0 and at most 1")
days = _checked(_number, lambda value: 0 < value <= 36500, "must be above 0 and at most 36500")
rate = _checked(_number, lambda value: 0 < value < math.inf, "must be above 0")
