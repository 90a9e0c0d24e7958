"""`legato mcp`: a Legato server as tools for programs that speak the Model Context Protocol."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from legato_client.cli import arguments, forward, http
from legato_client.cli.terminal import Terminal

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from legato_client.web.listen import Listen
    from legato_client.web.mcp_server import ImageSources
    from legato_client.web.server import Backend

_NEEDS = (*http.NEEDS, "mcp", "httpx2", "PIL")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "mcp",
        help="offer a server's skills as tools of the Model Context Protocol",
        description="Offer detect, point, segment, caption and query as tools: to the program that "
        "starts this command, over standard input and output; with --listen to others, over "
        "streamable HTTP at /mcp, until SIGINT or SIGTERM.",
        example="legato mcp --server gpu-box:50051 --allow-path photos/",
    )
    group = parser.add_argument_group("images")
    group.add_argument(
        "--allow-path",
        action="append",
        default=[],
        metavar="FOLDER",
        help="read images below it, instead of below the working directory; may be repeated",
    )
    group.add_argument(
        "--allow-url",
        action="append",
        default=[],
        metavar="URL",
        help="fetch images below it, such as https://cameras.example/yard/; may be repeated; none "
        "without it",
    )
    http.add_options(parser, "mcp", listen="", aliases=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    forward.require("`legato mcp`", "mcp", *_NEEDS)
    from legato_client.web import mcp_server

    with arguments.readable_options():
        sources = mcp_server.ImageSources(args.allow_path or ["."], args.allow_url)
    if args.listen:
        http.run(args, terminal, lambda *backend: _routes(sources, *backend))
        return
    # Standard output belongs to the protocol.
    backend = http.backend_of(args, terminal.on_standard_error(), lend=True)
    asyncio.run(mcp_server.ToolServer(backend, sources).serve_standard_input())


def _routes(sources: ImageSources, backend: Backend, listen: Listen) -> Sequence[BaseRoute]:
    from legato_client.web import mcp_server, openapi

    tools = mcp_server.ToolServer(backend, sources)
    return [*openapi.about_routes(), mcp_server.route(tools, backend, listen)]
