"""`legato http`, and the options and the process of the commands that serve other interfaces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from legato_client import AsyncClient, Client, LegatoError, Unauthenticated
from legato_client._grpc.settings import BearerToken, check_target, is_local, source_of
from legato_client.cli import arguments, forward
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal
from legato_client.web.listen import DEFAULT, Listen

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.routing import BaseRoute

    from legato_client.web.server import Backend

NEEDS = ("msgspec", "starlette", "uvicorn", "websockets")
"""Packages of the extra `web`."""

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
    parser.set_defaults(run=run_http)


def run_http(args: argparse.Namespace, terminal: Terminal) -> None:
    run(args, terminal, lambda *_: _routes())


def _routes() -> Sequence[BaseRoute]:
    from legato_client.web import openapi

    return openapi.routes()


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


def run(
    args: argparse.Namespace,
    terminal: Terminal,
    make_routes: Callable[[Backend, Listen], Sequence[BaseRoute]],
    *,
    make_middleware: Callable[[], Sequence[Middleware]] = tuple,
) -> None:
    """Serve these routes until SIGINT or SIGTERM; the functions may import what `web` brings.

    The middleware is around everything else.

    Raises:
        CommandError: the extra is not installed, or an option is wrong.
    """
    forward.require(f"`legato {args.command}`", "web", *NEEDS)
    from legato_client.web import server

    listen = listen_of(args)
    backend = backend_of(args, terminal, lend=not listen.require_token)
    app = server.make_app(make_routes(backend, listen), backend, listen, make_middleware())

    def ready(url: str) -> None:
        terminal.line(f"{url} asks the Legato server {args.server}; Ctrl-C stops")
        terminal.document({"url": url, "server": args.server})
        sys.stdout.flush()

    try:
        http_server = server.HttpServer(app, listen, ready)
    except OSError as error:
        problem = f"cannot listen on {listen.address}: {error.strerror or error}"
        raise CommandError(problem) from None
    http_server.serve_forever()


def backend_of(args: argparse.Namespace, terminal: Terminal, *, lend: bool) -> Backend:
    """Return the Legato server as callers reach it; `lend` is as in `connector`.

    Raises:
        CommandError: an option of the connection is wrong.
        LegatoError: as `connector` raises.
    """
    from legato_client.web import server

    aliases = _aliases(args.alias)
    connect = connector(args, terminal, server.token, lend=lend)
    with arguments.readable_options():
        return server.Backend.of(connect, args.timeout, aliases)


def listen_of(args: argparse.Namespace) -> Listen:
    """Return the address and its protection, checked.

    Raises:
        CommandError: an option is wrong, or the server behind takes calls without a token although
            they are required.
    """
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

    `lend`: a caller without a token calls with that of this process, if it has one.

    Raises:
        CommandError: an option of the connection is wrong.
        LegatoError: this process' token cannot be read, or would leave this host unencrypted.
    """
    with arguments.readable_options():
        own = source_of(args.token_file) if lend else None
        encrypted = bool(args.tls or args.ca or args.cert)
        if not (encrypted or is_local(args.server)):
            if own is not None:
                check_target(args.server)
            terminal.line(f"no token is passed on: {args.server} is reached without TLS")
            return lambda: _connect(args, "")
    return lambda: _connect(args, lambda: token_of_caller() or (own.read() if own else ""))


def _connect(args: argparse.Namespace, token: BearerToken) -> AsyncClient:
    return AsyncClient(
        args.server,
        timeout=args.timeout,
        stream_timeout=args.timeout,
        token=token,
        **arguments.tls_of(args),
    )


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
