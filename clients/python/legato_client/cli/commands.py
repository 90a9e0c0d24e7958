"""The parser of `legato` and of each of its commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from legato_client._version import version
from legato_client.cli import (
    arguments,
    ask,
    bag,
    calibrate,
    chat,
    completion,
    demo,
    forward,
    http,
    info,
    load,
    mcp,
    metrics,
    playground,
    ros2,
    run,
    settings,
    status,
    token,
    trace,
    watch,
)
from legato_client.cli.settings import CommandError

_OWN = (
    demo, ask, run, calibrate, watch, bag, ros2, chat, info, metrics, status, load, token, http,
    mcp, playground, completion,
)  # fmt: skip


def make_parser(*, complete: bool = False) -> arguments.Parser:
    """Build the parser; `complete` adds the options of installed server commands."""
    parser = arguments.Parser(
        prog="legato",
        description="Ask a Legato vision-language server about images, or run one.",
    )
    parser.add_argument("--version", action="version", version=f"legato {version()}")
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _OWN:
        module.add_command(commands)
    commands.choices["completion"].set_defaults(whole=lambda: make_parser(complete=True))
    for name, program in forward.MODULES.items():
        parents = _installed(name) if complete else []
        commands.add_parser(name, help=program.purpose, parents=parents, add_help=not parents)
    commands.choices["trace"].epilog = f"with {trace.FLAG}: the timeline of a running server"
    for leaf in _leaves(parser):
        settings.add_options(leaf)
    return parser


def find(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[tuple[str, ...], argparse.ArgumentParser]:
    """Find the command that the first words name, and its parser."""
    command: list[str] = []
    for word in words:
        below = _below(parser)
        if word not in below:
            break
        parser = below[word]
        command.append(word)
    return tuple(command), parser


def has_commands(parser: argparse.ArgumentParser) -> bool:
    """Return whether the command is missing or unknown."""
    return bool(_below(parser))


def tables(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Return the settings file's tables: one for each command."""
    return frozenset(_below(parser))


def _installed(name: str) -> list[argparse.ArgumentParser]:
    try:
        return [forward.parser_of(name)]
    except CommandError:
        return []


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    kind = argparse._SubParsersAction
    groups = [action.choices for action in parser._actions if isinstance(action, kind)]
    return {name: each for group in groups for name, each in group.items()}


def _leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = _below(parser)
    return [leaf for each in below.values() for leaf in _leaves(each)] if below else [parser]
