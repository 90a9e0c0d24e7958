"""The `legato` command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from legato_client import LegatoError
from legato_client.cli import commands, forward, settings, timeline
from legato_client.cli.exits import CommandError, ExitCode
from legato_client.cli.terminal import Terminal


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    terminal = Terminal(json_output="--json" in words)
    try:
        _run(words, terminal)
    except (LegatoError, CommandError) as error:
        return terminal.fail(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader left; the flush at exit must have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OTHER
    return ExitCode.OK


def _run(words: Sequence[str], terminal: Terminal) -> None:
    tree = commands.make_parser()
    command, parser = commands.find(tree, words)
    rest = words[len(command) :]
    if not command or command[-1] not in forward.MODULES:
        _run_here(tree, command, parser, rest, terminal)
    elif command == ("trace",) and timeline.is_remote(rest):
        parser = timeline.make_parser()
        settings.add_options(parser)
        _run_here(tree, command, parser, rest, terminal)
    else:
        _run_forward(tree, command, rest, terminal)


def _run_here(
    tree: argparse.ArgumentParser,
    command: tuple[str, ...],
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    terminal: Terminal,
) -> None:
    if commands.has_commands(parser):
        parser.parse_args(words)  # help, the version, or an error
        return
    resolved = settings.resolve(command, parser, words, commands.tables(tree))
    args = parser.parse_args(resolved.words)
    terminal.json_output = getattr(args, "json", False)
    if args.print_config:
        _print_config(command, parser, args, resolved, terminal)
    else:
        args.run(args, terminal)


def _run_forward(
    tree: argparse.ArgumentParser,
    command: tuple[str, ...],
    words: Sequence[str],
    terminal: Terminal,
) -> None:
    """Wrong options end here, before the program and its libraries are loaded."""
    name = command[-1]
    parser = forward.parser_of(name)
    settings.add_options(parser)
    resolved = settings.resolve(command, parser, words, commands.tables(tree))
    own, theirs = _own_options(resolved.words)
    args = parser.parse_args(resolved.words)
    if own.print_config:
        _print_config(command, parser, args, resolved, terminal)
    else:
        forward.run(name, theirs)


def _own_options(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    own = argparse.ArgumentParser(prog="legato", add_help=False, allow_abbrev=False)
    settings.add_options(own)
    return own.parse_known_args(words)


def _print_config(
    command: tuple[str, ...],
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    resolved: settings.Resolved,
    terminal: Terminal,
) -> None:
    for line in settings.lines(command, parser, args, resolved):
        terminal.line(line)
    rows = settings.rows(parser, args, resolved)
    terminal.document({name: {"value": value, "source": source} for name, value, source in rows})
