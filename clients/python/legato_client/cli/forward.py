"""Commands of the server's packages, run by module name, and install hints."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import legato_client
from legato_client.cli.settings import CommandError

_PARTS = {
    "cli": ('"{root}[cli]"',),
    "mcp": ('"{root}[mcp]"',),
    "web": ('"{root}[web]"',),
    "dds": ('"{root}[dds]"',),
    "ros": ('"{root}[ros]"',),
    "video": ('"{root}[video]"',),
    "engine": ("{root}", "{root}/engine/tiny", "{root}/service"),
}
"""Packages to install from a clone for each extra of a wheel."""


def hint(extra: str) -> str:
    """Return the install command; a clone installs its own folders."""
    root = _clone()
    if root is None:
        return f'pip install "legato[{extra}]"'
    parts = (part.format(root=_typed(root)) for part in _PARTS[extra])
    return " ".join(("pip install", *(f"-e {part}" for part in parts)))


def _clone() -> Path | None:
    root = Path(legato_client.__file__).resolve().parents[3]
    return root if (root / "service" / "pyproject.toml").is_file() else None


def _typed(root: Path) -> str:
    """Shorten a path relative to the working folder."""
    return "." if root == Path.cwd() else str(root)


# ---------------------------------------------------------------- forward

# Server commands are started by module name, not imported.


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A module that is run, and its parser as MODULE:FUNCTION."""

    module: str
    parser: str
    purpose: str


MODULES = {
    "serve": Program("legato_service", "legato_service.arguments:make_parser", "start a server"),
    "pull": Program(
        "legato_engine.hub.download",
        "legato_engine.hub.store:pull_parser",
        "fetch a model's weights",
    ),
    "models": Program(
        "legato_engine.hub.listing",
        "legato_engine.hub.store:models_parser",
        "what can be pulled, what is here, and what fits",
    ),
    "bench": Program(
        "legato_engine.bench",
        "legato_engine.bench.options:bench_parser",
        "measure this machine's engine",
    ),
    "trace": Program(
        "legato_engine.bench.trace",
        "legato_engine.bench.options:trace_parser",
        "record the engine's timeline",
    ),
    "replay": Program(
        "legato_engine.bench.replay",
        "legato_engine.bench.options:replay_parser",
        "run the launches of a crash bundle again",
    ),
}
_LINUX_FUNCTIONS = ("eventfd", "memfd_create", "sched_getaffinity")
"""Functions of `os` that a server and its engine call."""

_PORTABLE_COMMANDS = ("models", "pull")
"""Commands that start no engine."""

_ENGINE_NEEDS = ("legato_service", "legato_engine", "torch", "grpc_health", "msgspec")


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the command's parser. Raises CommandError unless the installed server has it."""
    if command not in _PORTABLE_COMMANDS:
        require_linux(command)
    require_engine(command)
    module, _, function = MODULES[command].parser.partition(":")
    try:
        make: Callable[[], argparse.ArgumentParser] = getattr(
            importlib.import_module(module), function
        )
    except (ModuleNotFoundError, AttributeError):
        raise CommandError(f"this version has no `legato {command}` (no {module})") from None
    return make()


def run(command: str, arguments: Sequence[str]) -> None:
    """Become that program: signals and the exit code are its own."""
    program = [sys.executable, "-m", MODULES[command].module, *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program[0], program)


def require_linux(command: str) -> None:
    """Raise CommandError on a system without what a server calls."""
    if sys.platform != "linux":
        raise CommandError(
            f"`legato {command}` needs Linux ({', '.join(_LINUX_FUNCTIONS)}), and this is "
            f"{sys.platform}: start it in a Linux machine or container; the client works here, "
            "with --server HOST:PORT"
        )


def require_engine(command: str) -> None:
    """Raise CommandError unless the server's dependencies are installed."""
    missing = [name for name in _ENGINE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"`legato {command}` needs the server, which is not installed "
            f"(missing: {', '.join(missing)}): {hint('engine')}"
        )
