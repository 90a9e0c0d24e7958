"""`legato compat`: a Legato server for the clients of a hand-written gRPC service."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato_client.cli import arguments, forward, http
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal

if TYPE_CHECKING:
    from legato_client.compat import ForeignService

_NEEDS = ("jmespath", "grpc_tools")
_LISTEN = "127.0.0.1:50052"


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "compat",
        help="offer a server to clients of a hand-written gRPC service",
        description="Answer the calls of a .proto of your own with a Legato server, until SIGINT "
        "or SIGTERM. A mapping file in TOML says which skill a method is, and which field of its "
        "messages is what.",
        example="legato compat robot.toml --server gpu-box:50051",
    )
    parser.add_argument("mapping", type=Path, help="mapping file, which names the .proto")
    parser.add_argument(
        "--allow-path",
        action="append",
        default=[],
        metavar="FOLDER",
        help="read images below it, where requests name them by path; may be repeated; none "
        "without it",
    )
    http.add_options(parser, "compat", listen=_LISTEN, aliases=False, protocol="gRPC")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    forward.require("`legato compat`", "compat", *_NEEDS)
    from legato_client import compat
    from legato_client._images.sources import AllowedFolders

    with arguments.readable_options():  # a mistake in the mapping is a ValueError
        service = compat.ForeignService.read(args.mapping)
        folders = AllowedFolders(args.allow_path)
    if service.reads_paths and not args.allow_path:
        problem = f"{args.mapping}: an image_form is path, so name a folder with --allow-path"
        raise CommandError(problem, ExitCode.USAGE)
    listen = http.listen_of(args)
    key, chain = listen.tls_key, listen.tls_cert
    certificate = (Path(key).read_bytes(), Path(chain).read_bytes()) if key else None
    connect = http.connector(args, terminal, compat.token, lend=not listen.require_token)

    async def serve() -> None:
        async with connect() as client:
            server = compat.CompatServer(
                service,
                client,
                timeout=args.timeout,
                folders=folders,
                require_token=bool(listen.require_token),
            )
            try:
                port = await server.start(listen.address, certificate)
            except RuntimeError:
                raise CommandError(f"cannot listen on {listen.address}") from None
            stopped = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            address = f"{listen.address.rpartition(':')[0]}:{port}"
            _announce(address, args.server, service, terminal)
            await stopped.wait()
            await server.stop()

    asyncio.run(serve())


def _announce(address: str, server: str, service: ForeignService, terminal: Terminal) -> None:
    name = service.descriptor.full_name
    terminal.line(f"{address} answers {name}, asks the Legato server {server}; Ctrl-C stops")
    if service.unmapped:
        terminal.line(f"UNIMPLEMENTED, as not mapped: {', '.join(service.unmapped)}")
    methods = [each.descriptor.name for each in service.methods]
    terminal.document(
        {"address": address, "service": name, "methods": methods, "unmapped": service.unmapped}
    )
    sys.stdout.flush()
