"""`legato status` and `legato metrics`, for operators of the server."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from legato_client.cli import arguments
from legato_client.cli.terminal import Terminal


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "status",
        help="show the load of the server and of each engine",
        description="Show the load of the server and of each engine. For operators of the server.",
        example="legato status --server gpu-box:50051 --json",
    )
    arguments.add_server_options(parser)
    parser.set_defaults(run=run_status)
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
    parser.set_defaults(run=run_metrics)


def run_status(args: argparse.Namespace, terminal: Terminal) -> None:
    with arguments.connect(args, as_operator=True) as client:
        load = client.load()
    terminal.heading(f"{args.server}: {load.engine_state}, {load.sessions} sessions")
    terminal.table(
        ("engine", "device", "state", "running", "waiting", "wait", "KV cache", "restarts"),
        [
            (
                str(number),
                each.device,
                each.state,
                str(each.running),
                str(each.waiting),
                "-" if each.estimated_wait is None else f"{each.estimated_wait:.3g} s",
                f"{each.kv_used_ratio:.0%}",
                str(each.restarts),
            )
            for number, each in enumerate(load.engines)
        ],
    )
    terminal.document({"load": dataclasses.asdict(load)})


def run_metrics(args: argparse.Namespace, terminal: Terminal) -> None:
    with arguments.connect(args, as_operator=True) as client:
        text = client.metrics()
    lines = [line for line in text.splitlines() if args.match in line]
    terminal.write("".join(f"{line}\n" for line in lines))
    terminal.document({"metrics": lines})
