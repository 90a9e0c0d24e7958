"""Settings of a command from flags, environment and file; exit codes and signals."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import enum
import os
import signal
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from legato_client import _errors


class ExitCode(enum.IntEnum):
    """Exit codes of `legato`."""

    OK = 0
    OTHER = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4
    DEADLINE = 5
    BUSY = 6
    INTERRUPTED = 130


HELP = (
    "exit codes: 0 ok, 1 other failure, 2 usage or invalid argument, 3 not found, "
    "4 server unavailable or engine lost, 5 deadline exceeded, 6 busy, 130 interrupted"
)


class CommandError(Exception):
    """The message is for the user."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.OTHER) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def closest(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return the suggestion to append to an error, or an empty text."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


@contextlib.contextmanager
def reporting(*usage: type[Exception]) -> Iterator[None]:
    """Turn errors of files and of wrong `usage` into command errors."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of standard output left
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CommandError(f"{where}{error.strerror or error}") from None
    except usage as error:
        raise CommandError(str(error), ExitCode.USAGE) from None


_EXIT_CODES = (
    (_errors.InvalidArgument, ExitCode.USAGE),
    (_errors.NotFound, ExitCode.NOT_FOUND),
    (_errors.Unavailable, ExitCode.UNAVAILABLE),
    (_errors.DeadlineExceeded, ExitCode.DEADLINE),
    (_errors.Busy, ExitCode.BUSY),
)


def exit_code_of(error: _errors.LegatoError) -> ExitCode:
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), ExitCode.OTHER)


@contextlib.contextmanager
def calling(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `stop`, which must not wait. For the main thread."""
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- settings

# Precedence of options: flag, environment, settings file.
#
# Options of the two lower layers become words in front of those that were typed, so that the parser
# of the command checks them as it checks flags.

PREFIX = "LEGATO_"
CLIENT_TABLE = "client"
CLIENT_OPTIONS = ("server", "tls", "ca", "cert", "key", "token-file", "timeout", "json")
"""Options of the table `[client]`, which applies to every command that has them."""

_OWN = ("config", "print-config")
_TRUTH = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False, "false": False, "no": False, "off": False
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "settings", "an option is taken from its flag, else LEGATO_NAME_OF_THE_OPTION, else a file"
    )
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="options in a table named as the command; LEGATO_CONFIG names it too",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="print each option with where it came from, in the form of such a file, and end",
    )


OTHER_VARIABLES = ("CONFIG", "TOKEN", "FAILPOINTS", "KERNEL_CACHE", "KERNEL_PTX")
"""Names after the prefix of variables that are no option's."""
_RESERVED = f"{PREFIX}TEST"  # of the tests


def variables_in_force() -> set[str]:
    """Return the variables that start with LEGATO_, but for those that are no option's."""
    others = {PREFIX + each for each in OTHER_VARIABLES}
    named = {name for name in os.environ if name.startswith(PREFIX)} - others
    return {name for name in named if not name.startswith(_RESERVED)}


def unknown_variables(known: Collection[str], *, complete: bool) -> list[str]:
    """Describe the variables in force that set nothing.

    Unless `known` is `complete`, only those that resemble a known one.
    """
    options = sorted(name.removeprefix(PREFIX) for name in known)
    found = {
        name: closest(name.removeprefix(PREFIX), options, 0.6 if complete else 0.8)
        for name in sorted(variables_in_force() - {*known})
    }
    return [
        f"{name} is no setting of any command{near.replace('mean ', f'mean {PREFIX}')}"
        for name, near in found.items()
        if near or complete
    ]


def variables_of(parsers: Iterable[argparse.ArgumentParser]) -> set[str]:
    return {variable(name) for parser in parsers for name in options_of(parser)}


def variable(name: str) -> str:
    """Return the environment variable of an option, which is named without its dashes."""
    return PREFIX + name.upper().replace("-", "_")


def resolve(
    command: Sequence[str],
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    tables: Callable[[], frozenset[str]],
) -> tuple[list[str], dict[str, str]]:
    """Add what the environment and the file say to the `words` typed after the command's name.

    Returns all words, and the sources of the options that are set. `tables` returns those that a
    file may have.
    """
    options = options_of(parser)
    sources = dict.fromkeys(_given(options, words), "flag")
    lower: list[str] = []
    for layer in (_environment(options), _file(command, options, _config(words), tables)):
        found = {
            name: entry
            for name, entry in layer.items()
            if not sources.keys() & {name, *_rivals(parser, options, name)}
        }
        for name, (value, source) in found.items():
            lower += _words(options[name], name, value, source)
            sources[name] = source
    return [*lower, *words], sources


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options that can be set, by name."""
    named = {
        string.removeprefix("--"): action
        for action in parser._actions
        if action.dest != "help" and action.help != argparse.SUPPRESS
        for string in action.option_strings[:1]
        if string.startswith("--")
    }
    return {name: action for name, action in named.items() if name not in _OWN}


def lines(command: Sequence[str], rows: Iterable[tuple[str, Any, str]]) -> Iterator[str]:
    """Return the lines of an equivalent settings file."""
    yield f"[{'.'.join(command)}]"
    for name, value, source in rows:
        if value is None:
            yield f"# {name} is not set"
        else:
            yield f"{name} = {_toml(value)}  # {source}"


def rows(
    parser: argparse.ArgumentParser, args: argparse.Namespace, sources: Mapping[str, str]
) -> Iterator[tuple[str, Any, str]]:
    """Return each option with its value and the value's source."""
    for name, action in options_of(parser).items():
        value = getattr(args, action.dest, None)
        if _is_switch(action) and not isinstance(action, argparse.BooleanOptionalAction):
            value = value == action.const
        elif isinstance(value, (list, tuple)) and not _is_list(action):
            value = ",".join(map(str, value))
        elif isinstance(value, Path):
            value = str(value)
        yield name, value, sources.get(name, "default")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    escaped = "".join(
        f"\\u{ord(c):04x}" if ord(c) < 0x20 or ord(c) == 0x7F else c
        for c in str(value).replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def _given(options: Mapping[str, argparse.Action], words: Sequence[str]) -> set[str]:
    strings = {string: name for name, action in options.items() for string in action.option_strings}
    typed = list(words)
    end = typed.index("--") if "--" in typed else len(typed)
    return {strings[head] for word in typed[:end] if (head := word.partition("=")[0]) in strings}


def _rivals(
    parser: argparse.ArgumentParser, options: Mapping[str, argparse.Action], name: str
) -> set[str]:
    """Return the options that exclude this one: a higher layer's value silences it."""
    action = options[name]
    groups = [each._group_actions for each in parser._mutually_exclusive_groups]
    rivals = [other for group in groups if action in group for other in group]
    return {each for each, other in options.items() if other in rivals} - {name}


Layer = dict[str, tuple[Any, str]]


def _environment(options: Mapping[str, argparse.Action]) -> Layer:
    """Read the environment; an empty variable counts as unset."""
    layer: Layer = {}
    for name, action in options.items():
        source = variable(name)
        if text := os.environ.get(source):
            layer[name] = (_array(text, source) if _is_list(action) else text, source)
    return layer


def _array(text: str, source: str) -> list[Any]:
    """Format one value, or several as a TOML array."""
    if not text.startswith("["):
        return [text]
    try:
        return list(tomllib.loads(f"values = {text}")["values"])
    except tomllib.TOMLDecodeError as error:
        raise CommandError(f"{source} is no array of TOML: {error}", ExitCode.USAGE) from None


def _config(words: Sequence[str]) -> Path | None:
    """Return the named file; the parser reports a `--config` without a value."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config", nargs="?")
    end = words.index("--") if "--" in words else len(words)
    named = finder.parse_known_args(list(words[:end]))[0].config or os.environ.get(
        f"{PREFIX}CONFIG"
    )
    return Path(named) if named else None


def _file(
    command: Sequence[str],
    options: Mapping[str, argparse.Action],
    path: Path | None,
    tables: Callable[[], frozenset[str]],
) -> Layer:
    if path is None:
        return {}
    content = _read(path)
    if unknown := content.keys() - tables() - {CLIENT_TABLE}:
        near = closest(min(unknown), sorted(tables()))
        _refuse(path, f"no command is called {min(unknown)!r}{near}")
    client = content.get(CLIENT_TABLE, {})
    own: Any = content
    for word in command:
        own = own.get(word, {}) if isinstance(own, dict) else own
    for table, known in ((client, CLIENT_OPTIONS), (own, tuple(options))):
        where = CLIENT_TABLE if table is client else ".".join(command)
        if not isinstance(table, dict):
            _refuse(path, f"{where} must be a table")
        if wrong := table.keys() - {*known}:
            near = closest(min(wrong), known)
            _refuse(path, f"[{where}] has no option {min(wrong)!r}{near}")
    shared = {name: value for name, value in client.items() if name in options}
    return {name: (value, str(path)) for name, value in {**shared, **own}.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", ExitCode.USAGE) from None
    except ValueError as error:
        raise CommandError(f"{path} is not TOML: {error}", ExitCode.USAGE) from None


def _refuse(source: object, problem: str) -> None:
    raise CommandError(f"{source}: {problem}", ExitCode.USAGE)


def _words(action: argparse.Action, name: str, value: Any, source: str) -> list[str]:
    """Return the equivalent command-line words, checked so that an error names its source."""
    if _is_switch(action):
        truth = value if isinstance(value, bool) else _TRUTH.get(str(value).lower())
        if truth is None:
            _refuse(source, f"{name} is true or false, not {value!r}")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [action.option_strings[0] if truth else action.option_strings[1]]
        return [action.option_strings[0]] if truth else []
    if isinstance(value, list) and _is_list(action):
        return [_word(action, name, each, source) for each in value]
    word = _word(action, name, value, source)
    return [] if value == action.default else [word]


def _word(action: argparse.Action, name: str, value: Any, source: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        _refuse(source, f"{name} takes one value, not {value!r}")
    try:
        read: Any = action.type(str(value)) if callable(action.type) else str(value)
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        # Only the first kind has a message for people.
        known = isinstance(error, argparse.ArgumentTypeError)
        raise CommandError(
            f"{source}: {name}: {error if known else f'not {value!r}'}", ExitCode.USAGE
        ) from None
    if action.choices is not None and read not in action.choices:
        _refuse(source, f"{name} is one of {', '.join(map(str, action.choices))}, not {value!r}")
    return f"--{name}={value}"


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)
