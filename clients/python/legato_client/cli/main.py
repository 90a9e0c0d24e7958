"""The `legato` command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from legato_client import LegatoError
from legato_client._version import version
from legato_client.cli import (
    arguments,
    demo,
    forward,
    info,
    load,
    metrics,
    status,
    tasks,
    timeline,
    token,
)
from legato_client.cli.exits import CommandError, ExitCode
from legato_client.cli.terminal import Terminal


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    terminal = Terminal(json_output="--json" in words)
    try:
        if words[:1] == ["bench"] and load.FLAG in words:
            load.main(words[1:], terminal)
        elif words[:1] == ["trace"] and timeline.is_remote(words):
            timeline.main(words[1:], terminal)
        elif words and words[0] in forward.MODULES:
            forward.run(words[0], words[1:])
        else:
            args = _parser().parse_args(words)
            args.run(args, terminal)
    except (LegatoError, CommandError) as error:
        return terminal.fail(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader left; the flush at exit must have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OTHER
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser(
        prog="legato",
        description="Ask a Legato vision-language server about images, or run one.",
    )
    parser.add_argument("--version", action="version", version=f"legato {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo.add_command(commands)
    tasks.add_commands(commands)
    info.add_command(commands)
    metrics.add_command(commands)
    status.add_command(commands)
    token.add_command(commands)
    for name, (module, purpose) in forward.MODULES.items():
        commands.add_parser(name, help=f"{purpose} (options: those of python -m {module})")
    commands.add_parser(f"bench {load.FLAG}", help="load on a running server")
    commands.add_parser(f"trace {timeline.FLAG}", help="timeline of a running server")
    return parser
