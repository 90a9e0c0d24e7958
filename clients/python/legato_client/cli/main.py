"""The `legato` command line."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from legato_client import LegatoError
from legato_client.cli import forward, settings
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names of files need not be text
    # The commands report by themselves what the library would log.
    logging.getLogger("legato_client.session").addHandler(logging.NullHandler())
    words = list(sys.argv[1:] if argv is None else argv)
    terminal = Terminal(json_output="--json" in words)
    try:
        try:
            _run(words, terminal)
        finally:
            sys.stdout.flush()  # a reader that left is noticed here, not at the process's end
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
    """Run a command; a server's command does not import the others, which takes time."""
    if not words or words[0] not in forward.MODULES:
        from legato_client.cli import commands

        _report_unknown_variables(terminal)
        command, parser = commands.find(commands.make_parser(), words)
        if commands.below(parser):
            parser.parse_args(words[len(command) :])  # help, the version, or an error
        else:
            _run_here(command, parser, words[len(command) :], terminal)
    elif words[0] == "trace":
        _run_trace(words[1:], terminal)
    else:
        _run_forward(words[0], words[1:], terminal)


def _run_trace(words: Sequence[str], terminal: Terminal) -> None:
    from legato_client.cli import commands, trace

    if {"-h", "--help"} & {*words} and (parser := commands.installed("trace")):
        settings.add_options(parser)
        parser.parse_args(["--help"])
    if trace.is_remote(words):
        parser = trace.make_parser()
        settings.add_options(parser)
        _run_here(("trace",), parser, words, terminal)
    else:
        trace.check_local(words)
        _run_forward("trace", words, terminal)


def _report_unknown_variables(terminal: Terminal, *parsers: argparse.ArgumentParser) -> None:
    """Report variables that set nothing; the other commands are loaded if these do not know them.

    Options of a server that is not installed are unknown.
    """
    known = {f"{settings.PREFIX}SERVER"} | settings.variables_of(parsers)
    if settings.variables_in_force() <= known:
        return
    from legato_client.cli import commands

    complete = all(commands.installed(name) for name in forward.MODULES)
    variables = settings.variables_of(commands.leaves(commands.make_parser(complete=True)))
    for problem in settings.unknown_variables(variables, complete=complete):
        terminal.notice(f"legato: warning: {problem}")


def _run_here(
    command: tuple[str, ...],
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    terminal: Terminal,
) -> None:
    """Run a command of this program, else that of a server, which has no `run`."""
    resolved, sources = settings.resolve(command, parser, words, _tables)
    args = parser.parse_args(resolved)
    terminal.json_output = getattr(args, "json", False)
    if args.print_config:
        rows = list(settings.rows(parser, args, sources))
        for line in settings.lines(command, rows):
            terminal.line(line)
        terminal.document(
            {name: {"value": value, "source": source} for name, value, source in rows}
        )
    elif hasattr(args, "run"):
        args.run(args, terminal)
    else:
        ours = argparse.ArgumentParser(prog="legato", add_help=False, allow_abbrev=False)
        settings.add_options(ours)
        forward.run(command[0], ours.parse_known_args(resolved)[1])


def _run_forward(name: str, words: Sequence[str], terminal: Terminal) -> None:
    """Run a server's command; wrong options fail before its libraries are loaded."""
    parser = forward.parser_of(name)
    _report_unknown_variables(terminal, parser)
    settings.add_options(parser)
    _run_here((name,), parser, words, terminal)


def _tables() -> frozenset[str]:
    """Return the tables that a settings file may have: one for each command."""
    from legato_client.cli import commands

    return frozenset(commands.below(commands.make_parser()))
