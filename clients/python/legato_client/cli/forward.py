"""Commands of the server's packages, run by module name, and install hints."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import legato_client
from legato_client.cli.arguments import Parser
from legato_client.cli.settings import HELP, CommandError


def hint(extra: str) -> str:
    """Return the install command; a clone installs its own folders."""
    root = _clone()
    if root is None:
        return f'pip install "legato[{extra}]"'
    typed = "." if root == Path.cwd() else root
    if extra == "engine":
        return f"pip install -e {typed} -e {typed}/engine/tiny -e {typed}/service"
    return f'pip install -e "{typed}[{extra}]"'


def require(what: str, extra: str, *modules: str) -> None:
    """Raise CommandError, before any work, unless the modules of an extra are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(_DISTRIBUTIONS.get(name, name) for name in missing)
        verb = "need" if what.endswith("s") else "needs"
        raise CommandError(f"{what} {verb} {names}: {hint(extra)}")


_DISTRIBUTIONS = {
    "PIL": "Pillow",
    "av": "PyAV",
    "grpc_tools": "grpcio-tools",
    "mcap_ros2": "mcap-ros2-support",
}


def _clone() -> Path | None:
    root = Path(legato_client.__file__).resolve().parents[3]
    return root if (root / "service" / "pyproject.toml").is_file() else None


# ---------------------------------------------------------------- forward

# Server commands are started by module name, not imported.


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardedProgram:
    """A module that is run, and its parser as MODULE:FUNCTION.

    `replaces` this process: signals and the exit code are the program's own.
    """

    module: str
    parser: str
    purpose: str
    example: str = ""
    exit_codes: str = HELP
    replaces: bool = False


MODULES = {
    "serve": ForwardedProgram(
        "legato_service",
        "legato_service.arguments:make_parser",
        "start a server",
        "legato serve --model moondream2 --listen 0.0.0.0:50051 --tokens tokens.toml "
        "--tls-cert server.pem --tls-key server.key",
        "exit codes: 0 stopped by a signal or an operator, 1 serving never began (address in use, "
        "unreadable file), 2 wrong option, 78 the model cannot be served with these options, "
        "128 + N ended by signal N while draining",
        replaces=True,
    ),
    "pull": ForwardedProgram(
        "legato_engine.hub.download",
        "legato_engine.hub.store:pull_parser",
        "download a model's weights",
        "legato pull moondream2",
    ),
    "quantize": ForwardedProgram(
        "legato_engine.models.quantise",
        "legato_engine.hub.store:quantize_parser",
        "write a model's weights in 8 or 4 bits",
        "legato quantize --model moondream2 --weight-dtype int8 --output moondream2.safetensors",
    ),
    "models": ForwardedProgram(
        "legato_engine.hub.listing",
        "legato_engine.hub.store:models_parser",
        "list models: available, downloaded, and which fit this machine",
        "legato models --json",
    ),
    "bench": ForwardedProgram(
        "legato_engine.bench.command",
        "legato_engine.bench.options:bench_parser",
        "measure this machine's engine",
        "legato bench --device cuda --streams 1,8,32",
    ),
    "trace": ForwardedProgram(
        "legato_engine.bench.trace",
        "legato_engine.bench.options:trace_parser",
        "record the timeline of a running server, or of a short run here",
        "legato trace --server gpu-box:50051 --seconds 10 --output trace.json",
    ),
    "replay": ForwardedProgram(
        "legato_engine.bench.replay",
        "legato_engine.bench.options:replay_parser",
        "run the launches of a crash bundle again",
        "legato replay /tmp/legato-crashes-1000/BUNDLE",
    ),
}
_PORTABLE_COMMANDS = ("models", "pull")
"""Commands that start no engine."""

_ENGINE_NEEDS = ("legato_service", "legato_engine", "torch", "grpc_health", "msgspec")


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the command's parser. Raises CommandError unless the installed server has it."""
    require_engine(command)
    module, _, function = MODULES[command].parser.partition(":")
    try:
        make: Callable[[Callable[..., argparse.ArgumentParser]], argparse.ArgumentParser] = getattr(
            importlib.import_module(module), function
        )
    except (ModuleNotFoundError, AttributeError):
        raise CommandError(f"this version has no `legato {command}` (no {module})") from None
    program = MODULES[command]
    return make(functools.partial(Parser, example=program.example, exit_codes=program.exit_codes))


def run(command: str, arguments: Sequence[str]) -> None:
    """Run that program, which ends with SystemExit."""
    program = MODULES[command]
    sys.stdout.flush()
    sys.stderr.flush()
    if program.replaces:
        os.execv(sys.executable, [sys.executable, "-m", program.module, *arguments])
    else:
        sys.argv[1:] = arguments
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)


def require_engine(command: str) -> None:
    """Raise CommandError where the server or its dependencies cannot run or are missing."""
    if sys.platform != "linux" and command not in _PORTABLE_COMMANDS:
        raise CommandError(
            f"`legato {command}` needs Linux (eventfd, memfd_create, sched_getaffinity), and this "
            f"is {sys.platform}: start it in a Linux machine or container; the client works here, "
            "with --server HOST:PORT"
        )
    missing = [name for name in _ENGINE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(
            f"`legato {command}` needs the server, which is not installed "
            f"(missing: {', '.join(missing)}): {hint('engine')}"
        )
