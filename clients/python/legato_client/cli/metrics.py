"""`legato metrics`."""

from __future__ import annotations

import argparse
from typing import Any

from legato_client.cli import arguments
from legato_client.cli.terminal import Terminal


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "metrics",
        help="print the server's metrics, as Prometheus reads them",
        description="Print the server's metrics, as Prometheus reads them. For operators of the "
        "server.",
        example="legato metrics --match legato_frames",
    )
    arguments.add_server_options(parser)
    parser.add_argument(
        "--match", default="", metavar="TEXT", help="print only lines with this text"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    with arguments.connect(args, as_operator=True) as client:
        text = client.metrics()
    lines = [line for line in text.splitlines() if args.match in line]
    terminal.write("".join(f"{line}\n" for line in lines))
    terminal.document({"metrics": lines})
