"""`legato demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from legato_client import Client, Options, Result
from legato_client._transport.channel import DEFAULT_TIMEOUT
from legato_client.cli import arguments, forward, show, tasks
from legato_client.cli.local_server import LocalServer
from legato_client.cli.script import ASKED, Script, sample_script, script_for
from legato_client.cli.terminal import Terminal


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="start a server, ask it about an image, draw the answers, stop it"
    )
    parser.add_argument(
        "--output", type=arguments.picture, default=Path("demo.png"), metavar="FILE"
    )
    parser.add_argument("--image", type=Path, help="default: the sample of the tiny model")
    for skill in ASKED:
        metavar = "NOUN" if skill.places else skill.subject.upper()
        parser.add_argument(
            f"--{skill.name}", action="append", metavar=metavar, help="may be repeated"
        )
    parser.add_argument(
        "--start-timeout", type=float, default=300.0, metavar="SECONDS", help="default %(default)g"
    )
    parser.add_argument(
        "serve_options", nargs="*", metavar="-- OPTION", help="options of `legato serve`"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    forward.require_linux("demo")
    forward.require_engine("demo")
    script = _script(args)
    image = script.read_image()
    with LocalServer(args.serve_options) as server:
        with terminal.progress("starting the server") as update:
            server.wait_until_serving(args.start_timeout, update)
        terminal.line(f"serving on {server.target}, looking at {script.image}")
        results = _perform(server.target, script, image, terminal)
    tasks.save(args.output, image, *results)
    terminal.line()
    terminal.line(f"saved {args.output}, and the server stopped with exit code 0")


def _script(args: argparse.Namespace) -> Script:
    script = script_for(args.image) if args.image else sample_script()
    return script.with_changes(**{skill.name: getattr(args, skill.name) for skill in ASKED})


def _perform(target: str, script: Script, image: bytes, terminal: Terminal) -> list[Result]:
    results: list[Result] = []
    with Client(target, stream_timeout=DEFAULT_TIMEOUT) as client:
        for title, task in script.tasks():
            terminal.line()
            terminal.heading(title)
            watch = show.EventPrinter(terminal).show
            results.append(tasks.ask(client, image, task, Options(), watch))
    return results
