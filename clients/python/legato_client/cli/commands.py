"""The parser of `legato` and of each of its commands."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from legato_client._version import version
from legato_client.cli import (
    arguments,
    ask,
    bag,
    calibrate,
    chat,
    compat,
    demo,
    forward,
    http,
    info,
    load,
    ros2,
    run,
    settings,
    token,
    trace,
    watch,
)
from legato_client.cli.settings import CommandError
from legato_client.cli.terminal import Terminal

_OWN = (
    demo, ask, run, calibrate, watch, bag, ros2, chat, info, load, token, http,
    compat,
)  # fmt: skip


GROUPS = (
    arguments.CommandGroup(
        "ask",
        "questions about one image",
        'legato detect street.jpg "traffic light" --output found.png',
        ("detect", "point", "segment", "caption", "query", "chat"),
    ),
    arguments.CommandGroup(
        "batches and cameras",
        "the same tasks on many images, videos, cameras and ROS 2 topics",
        "legato watch rtsp://camera.local/live --task detect:person --track",
        ("run", "watch", "bag", "ros2"),
    ),
    arguments.CommandGroup(
        "server",
        "start a server, and interfaces of a running one",
        "legato serve --model moondream2 --listen 127.0.0.1:50051",
        ("serve", "playground", "http", "mcp", "compat", "demo"),
    ),
    arguments.CommandGroup(
        "weights",
        "models on this machine, and what their confidences are worth",
        "legato pull moondream2",
        ("models", "pull", "quantize", "calibrate"),
    ),
    arguments.CommandGroup(
        "operations",
        "the state of this machine and of a server, and its credentials",
        "legato info --server gpu-box:50051",
        ("info", "status", "metrics", "token", "completion"),
    ),
    arguments.CommandGroup(
        "debugging",
        "load, measurements and timelines",
        "legato trace --server gpu-box:50051 --seconds 10",
        ("load", "bench", "trace", "replay"),
    ),
)


def make_parser(*, complete: bool = False) -> arguments.Parser:
    """Build the parser; `complete` adds the options of installed server commands."""
    parser = arguments.Parser(
        prog="legato",
        description="Ask a Legato vision-language server about images, or run one. "
        "`legato COMMAND --help` has the options of a command.",
    )
    parser.add_argument(
        "--version", action="version", version=f"legato {version()}", help="print the version"
    )
    commands: Any = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    commands.groups = GROUPS
    for module in _OWN:
        module.add_command(commands)
    _add_completion(commands)
    for name, program in forward.MODULES.items():
        parents = [each] if complete and (each := installed(name)) else []
        commands.add_parser(
            name,
            help=program.purpose,
            description=parents[0].description if parents else None,
            example=program.example,
            exit_codes=program.exit_codes,
            parents=parents,
            add_help=not parents,
        )
    for leaf in leaves(parser):
        settings.add_options(leaf)
    return parser


def find(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[tuple[str, ...], argparse.ArgumentParser]:
    """Find the command that the first words name, and its parser."""
    command: list[str] = []
    for word in words:
        subcommands = below(parser)
        if word not in subcommands:
            break
        parser = subcommands[word]
        command.append(word)
    return tuple(command), parser


def installed(name: str) -> argparse.ArgumentParser | None:
    """Return a server command's parser, without settings, if its packages are installed.

    The timeline of a running server needs none of them.
    """
    try:
        parser = forward.parser_of(name)
    except CommandError:
        parser = None
    return trace.make_parser(parser) if name == "trace" else parser


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's own commands, by name."""
    kind = argparse._SubParsersAction
    groups = [action.choices for action in parser._actions if isinstance(action, kind)]
    return {name: each for group in groups for name, each in group.items()}


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = below(parser)
    return [leaf for each in found.values() for leaf in leaves(each)] if found else [parser]


def _add_completion(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the completion of this command for a shell",
        description="Print a script that completes commands and options.\n"
        '  bash  put `eval "$(legato completion bash)"` into ~/.bashrc\n'
        "  zsh   write it to a file _legato in a folder of $fpath\n"
        "  fish  write it to ~/.config/fish/completions/legato.fish",
        example='eval "$(legato completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to complete in")
    parser.set_defaults(run=_complete)


def _complete(args: argparse.Namespace, _terminal: Terminal) -> None:
    forward.require("completion", "cli", "shtab")
    shtab: Any = importlib.import_module("shtab")
    parser = make_parser(complete=True)
    sys.stdout.write(f"{shtab.complete(parser, args.shell)}\n")
