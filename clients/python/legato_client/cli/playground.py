"""`legato playground`: a page to try a Legato server with."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from legato_client.cli import http
from legato_client.cli.arguments import admin_target
from legato_client.cli.terminal import Terminal
from legato_client.web.listen import Listen

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.routing import BaseRoute

_LISTEN = "127.0.0.1:8090"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "playground",
        help="try a server in a browser",
        description="Serve one page that asks a Legato server about images, clips and a webcam, "
        "until SIGINT or SIGTERM. Whoever can reach the page asks with the credential of this "
        "process, which the page never sees.",
        example="legato playground --server gpu-box:50051",
    )
    http.add_options(parser, "playground", listen=_LISTEN, offer_require_token=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    http.run(args, terminal, lambda *_: _routes(args), make_middleware=_middleware)


def _routes(args: argparse.Namespace) -> Sequence[BaseRoute]:
    from legato_client._grpc import settings
    from legato_client.web.playground.routes import routes
    from legato_client.web.playground.snippets import Connection

    connection = Connection(
        target=args.server,
        encrypted=bool(args.tls or args.ca or args.cert),
        authorities=bool(args.ca),
        certificate=bool(args.cert),
        token=settings.source_of(args.token_file) is not None,
    )
    return routes(connection, _operator(args))


def _operator(args: argparse.Namespace) -> Callable[[], str] | None:
    """Return where to reach the operator's calls: only a page for this host may make them."""
    if not Listen(args.listen).is_local:
        return None
    if args.token_file or args.cert:
        return lambda: ""

    def target() -> str:
        found = admin_target(args.server)
        return "" if found == args.server else found

    return target


def _middleware() -> Sequence[Middleware]:
    from starlette.middleware import Middleware

    from legato_client.web.playground.routes import Guard

    return [Middleware(Guard)]
