"""`legato http`, `mcp` and `playground`: other interfaces of a Legato server."""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from legato_client import AsyncClient, Client, LegatoError, Unauthenticated
from legato_client._grpc.settings import check_target, is_local, source_of
from legato_client.cli import arguments, forward
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal
from legato_client.web.listen import DEFAULT, Listen

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.routing import BaseRoute

    from legato_client.web.server import Backend

_NEEDS = ("msgspec", "starlette", "uvicorn", "websockets")
_MCP_NEEDS = (*_NEEDS, "mcp", "httpx2", "PIL")

_LONGEST = 600.0  # seconds; what OpenAI's clients wait by default
_CHECK_TIMEOUT = 10.0  # seconds


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "http",
        help="offer a server to clients of OpenAI's and Moondream's HTTP interfaces",
        description="Answer OpenAI's chat completions and responses and Moondream's own endpoint "
        "with a Legato server, until SIGINT or SIGTERM.",
        example="legato http --server gpu-box:50051 --listen 127.0.0.1:8091",
    )
    add_options(parser, "http")
    parser.set_defaults(run=_run_http)
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
    add_options(parser, "mcp", listen="", aliases=False)
    parser.set_defaults(run=_run_mcp)
    parser = commands.add_parser(
        "playground",
        help="try a server in a browser",
        description="Serve one page that asks a Legato server about images, clips and a webcam, "
        "until SIGINT or SIGTERM. Whoever can reach the page asks with the credential of this "
        "process, which the page never sees.",
        example="legato playground --server gpu-box:50051",
    )
    add_options(parser, "playground", listen="127.0.0.1:8090", offer_require_token=False)
    parser.set_defaults(run=_run_playground)


def _run_http(args: argparse.Namespace, terminal: Terminal) -> None:
    def make_routes(_backend: Backend, _listen: Listen) -> Sequence[BaseRoute]:
        from legato_client.web import openapi

        return openapi.routes()

    _run(args, terminal, make_routes)


def _run_mcp(args: argparse.Namespace, terminal: Terminal) -> None:
    forward.require("`legato mcp`", "mcp", *_MCP_NEEDS)
    from legato_client.web import mcp_server, openapi

    def make_routes(backend: Backend, listen: Listen) -> Sequence[BaseRoute]:
        tools = mcp_server.ToolServer(backend, sources)
        return [*openapi.about_routes(), mcp_server.route(tools, backend, listen)]

    with arguments.readable_options():
        sources = mcp_server.ImageSources(args.allow_path or ["."], args.allow_url)
    if args.listen:
        _run(args, terminal, make_routes)
        return
    # Standard output belongs to the protocol.
    backend = _backend_of(args, terminal.on_standard_error(), lend=True)
    asyncio.run(mcp_server.ToolServer(backend, sources).serve_standard_input())


def _run_playground(args: argparse.Namespace, terminal: Terminal) -> None:
    def make_routes(_backend: Backend, listen: Listen) -> Sequence[BaseRoute]:
        from legato_client.web.playground.routes import routes
        from legato_client.web.playground.snippets import Connection

        connection = Connection(
            target=args.server,
            encrypted=bool(args.tls or args.ca or args.cert),
            authorities=bool(args.ca),
            certificate=bool(args.cert),
            token=source_of(args.token_file) is not None,
        )
        # Only a page for this host may make the operator's calls.
        return routes(connection, operator_target if listen.is_local else None)

    def operator_target() -> str:
        if args.token_file or args.cert:
            return ""
        found = arguments.admin_target(args.server)
        return "" if found == args.server else found

    def make_middleware() -> Sequence[Middleware]:
        from starlette.middleware import Middleware

        from legato_client.web.playground.routes import Guard

        return [Middleware(Guard)]

    _run(args, terminal, make_routes, make_middleware=make_middleware)


def add_options(
    parser: argparse.ArgumentParser,
    command: str,
    *,
    listen: str = DEFAULT,
    offer_require_token: bool = True,
    aliases: bool = True,
    protocol: str = "HTTP",
) -> None:
    """Add options of the process and of its connection to the server.

    `offer_require_token` is False for a page, which sends no token, `aliases` where requests name
    no model.
    """
    parser.set_defaults(command=command)
    group = parser.add_argument_group(protocol)
    group.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=listen,
        help=f"address to listen on, {f'default {listen}' if listen else 'default: none'}; port 0 "
        "takes a free port",
    )
    group.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    group.add_argument("--tls-key", metavar="FILE", help="private key of --tls-cert, PEM")
    parser.set_defaults(require_token=None)
    if offer_require_token:
        group.add_argument(
            "--require-token",
            action="store_true",
            default=False,
            help="refuse requests without a token of their own, which the Legato server checks",
        )
    group.add_argument(
        "--allow-remote",
        action="store_true",
        help="listen beyond loopback without TLS"
        + (" or without --require-token" if offer_require_token else ""),
    )
    parser.set_defaults(alias=[])
    if aliases:
        group.add_argument(
            "--alias",
            action="append",
            metavar="NAME=MODEL",
            help="further name of a model, for clients that insist on one; NAME= is the default "
            "model; may be repeated",
        )
    arguments.add_server_options(parser, timeout=_LONGEST)


def _run(
    args: argparse.Namespace,
    terminal: Terminal,
    make_routes: Callable[[Backend, Listen], Sequence[BaseRoute]],
    *,
    make_middleware: Callable[[], Sequence[Middleware]] = tuple,
) -> None:
    """Serve these routes until SIGINT or SIGTERM; the functions may import what `web` brings.

    The middleware is around everything else.
    """
    forward.require(f"`legato {args.command}`", "web", *_NEEDS)
    from legato_client.web import server

    listen = listen_of(args)
    backend = _backend_of(args, terminal, lend=not listen.require_token)
    routes = make_routes(backend, listen)

    def ready(url: str) -> None:
        terminal.line(f"{url} asks the Legato server {args.server}; Ctrl-C stops")
        terminal.document({"url": url, "server": args.server})
        sys.stdout.flush()

    try:
        http_server = server.HttpServer(routes, backend, listen, ready, make_middleware())
    except OSError as error:
        problem = f"cannot listen on {listen.address}: {error.strerror or error}"
        raise CommandError(problem) from None
    http_server.serve_forever()


def _backend_of(args: argparse.Namespace, terminal: Terminal, *, lend: bool) -> Backend:
    """Return the Legato server as callers reach it; `lend` is as in `connector`."""
    from legato_client.web import server

    aliases = _aliases(args.alias)
    connect = connector(args, terminal, server.token, lend=lend)
    with arguments.readable_options():
        return server.Backend.of(connect, args.timeout, aliases)


def listen_of(args: argparse.Namespace) -> Listen:
    listen = Listen(
        address=args.listen,
        allow_remote=args.allow_remote,
        require_token=args.require_token,
        tls_cert=args.tls_cert or "",
        tls_key=args.tls_key or "",
    )
    with arguments.readable_options():
        listen.check()
    if listen.require_token:
        _check_that_tokens_matter(args)
    return listen


def _aliases(given: Sequence[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for name, separator, model in pairs:
        if not (name and separator):
            raise CommandError(f"--alias takes NAME=MODEL, not {name + model!r}", ExitCode.USAGE)
    return {name: model for name, _, model in pairs}


def connector(
    args: argparse.Namespace, terminal: Terminal, token_of_caller: Callable[[], str], *, lend: bool
) -> Callable[[], AsyncClient]:
    """Return a function that makes a client for all requests, which call with their own tokens.

    `lend`: a caller without a token calls with that of this process, if it has one, which must not
    leave this host unencrypted.
    """
    connect = functools.partial(
        AsyncClient,
        args.server,
        timeout=args.timeout,
        stream_timeout=args.timeout,
        **arguments.tls_of(args),
    )
    with arguments.readable_options():
        own = source_of(args.token_file) if lend else None
        encrypted = bool(args.tls or args.ca or args.cert)
        if not (encrypted or is_local(args.server)):
            if own is not None:
                check_target(args.server)
            terminal.line(f"no token is passed on: {args.server} is reached without TLS")
            return lambda: connect(token="")
    return lambda: connect(token=lambda: token_of_caller() or (own.read() if own else ""))


def _check_that_tokens_matter(args: argparse.Namespace) -> None:
    """Refuse to require tokens for a server that has no credentials and takes any token."""
    with (
        arguments.readable_options(),
        Client(args.server, timeout=_CHECK_TIMEOUT, token="", **arguments.tls_of(args)) as client,
    ):
        try:
            client.server_info()
        except Unauthenticated:
            return
        except LegatoError as error:
            raise CommandError(
                f"cannot tell whether {args.server} checks tokens: {error}", ExitCode.UNAVAILABLE
            ) from None
    raise CommandError(
        f"--require-token: {args.server} takes calls without a token", ExitCode.USAGE
    )
