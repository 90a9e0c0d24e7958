"""Commands of the server's packages, started by module name, not imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

from legato_client.cli.exits import CommandError

MODULES = {
    "serve": ("legato_service", "start a server"),
    "bench": ("legato_engine.bench", "measure this machine's engine"),
    "trace": ("legato_engine.bench.trace", "record the engine's timeline"),
    "replay": ("legato_engine.bench.replay", "run the launches of a crash bundle again"),
}
_ENGINE_NEEDS = ("legato_service", "legato_engine", "torch", "grpc_health", "msgspec")


def command_line(command: str, arguments: Sequence[str]) -> list[str]:
    require_engine(command)
    module, _ = MODULES[command]
    if importlib.util.find_spec(module) is None:
        raise CommandError(f"this version has no `legato {command}` (no module {module})")
    return [sys.executable, "-m", module, *arguments]


def run(command: str, arguments: Sequence[str]) -> None:
    """Become that program: signals and the exit code are its own."""
    program = command_line(command, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program[0], program)


def require_engine(command: str) -> None:
    """Raise CommandError unless the server's dependencies are installed."""
    missing = [name for name in _ENGINE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"`legato {command}` needs the server, which is not installed "
            f'(missing: {", ".join(missing)}): pip install "legato[engine]"'
        )
