"""`legato token`."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import secrets
import sys
from typing import Any

from legato_client.cli import arguments
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal

SCOPES = ("infer", "upload", "shared_images", "admin")
_SECRET_BYTES = 32
_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "token",
        help="make credentials for a server's --tokens file",
        description="Make credentials for a server's --tokens file.",
        example="legato token new --tenant lab >> tokens.toml",
    )
    kinds = parser.add_subparsers(dest="token_command", required=True, metavar="COMMAND")
    new = kinds.add_parser(
        "new",
        help="a new token or certificate record",
        description="Print a record for the file of --tokens on standard output, and the token, "
        "which is not kept anywhere, on standard error. Needs no server.",
        example="legato token new --tenant lab --days 90 >> tokens.toml",
    )
    new.add_argument(
        "--tenant", default="", metavar="NAME", help="owner of the requests and images"
    )
    new.add_argument(
        "--scopes",
        default="infer,upload",
        metavar="SCOPE,SCOPE",
        help=f"rights of the credential, from {','.join(SCOPES)}",
    )
    new.add_argument(
        "--id", default="", metavar="NAME", help="name in logs and in the file, default: random"
    )
    new.add_argument(
        "--san",
        action="append",
        default=[],
        metavar="NAME",
        help="URI or DNS name of a client certificate: a record of it, without a token; may be "
        "repeated",
    )
    new.add_argument(
        "--days", type=arguments.days, metavar="DAYS", help="days until it expires, default: never"
    )
    new.add_argument(
        "--json", action="store_true", help="print token and record as one JSON document"
    )
    new.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    scopes = [scope for scope in args.scopes.split(",") if scope]
    name = args.id or secrets.token_hex(4)
    _check(name, args.tenant, scopes)
    secret = "" if args.san else secrets.token_urlsafe(_SECRET_BYTES)
    token = f"legato_{name}_{secret}" if secret else ""
    record = _record(name, args.tenant, scopes, secret, args.san, args.days)
    if args.json:
        terminal.document({"token": token, "record": record})
        return
    sys.stdout.write(record)
    if token:
        sys.stdout.flush()
        sys.stderr.write(f"{token}\n")


def _check(name: str, tenant: str, scopes: list[str]) -> None:
    problem = ""
    if not scopes or not set(scopes) <= set(SCOPES):
        problem = f"--scopes takes some of {','.join(SCOPES)}"
    elif _ID.fullmatch(name) is None:
        problem = "--id takes 1 to 64 of A-Z a-z 0-9 -"
    elif tenant and _TENANT.fullmatch(tenant) is None:
        problem = "--tenant takes 1 to 64 of A-Z a-z 0-9 . _ : -"
    elif not tenant and scopes != ["admin"]:
        problem = "--tenant is needed for scopes other than admin"
    if problem:
        raise CommandError(f"{problem} (see legato token new --help)", ExitCode.USAGE)


def _record(
    name: str, tenant: str, scopes: list[str], secret: str, san: list[str], days: float | None
) -> str:
    """Format a credential as TOML, whose strings may be JSON's."""
    sha256 = secret and hashlib.sha256(secret.encode()).hexdigest()
    fields = {"id": name, "tenant": tenant, "scopes": scopes, "sha256": sha256, "san": san}
    given = {field: value for field, value in fields.items() if value}
    lines = [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in given.items()]
    if days is not None:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        lines.append(f"expires = {end.strftime('%Y-%m-%dT%H:%M:%SZ')}")
    return "\n".join(("[[credential]]", *lines, "", ""))
