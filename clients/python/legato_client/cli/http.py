"""`legato http`: a Legato server for clients that speak HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from legato_client.cli import web
from legato_client.cli.terminal import Terminal

if TYPE_CHECKING:
    from starlette.routing import BaseRoute


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "http",
        help="offer a server to clients of OpenAI's and Moondream's HTTP interfaces",
        description="Answer OpenAI's chat completions and responses and Moondream's own endpoint "
        "with a Legato server, until SIGINT or SIGTERM.",
        example="legato http --server gpu-box:50051 --listen 127.0.0.1:8091",
    )
    web.add_options(parser, "http")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    web.run(args, terminal, lambda *_: _routes())


def _routes() -> Sequence[BaseRoute]:
    from legato_client.web import openapi

    return openapi.routes()
