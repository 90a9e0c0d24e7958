"""Print envoy.yaml with other addresses and paths, and with TLS: render.py --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

TEMPLATE = Path(__file__).with_name("envoy.yaml")
_LISTEN = "address: 0.0.0.0, port_value: 50051"
_ADMIN = "address: 127.0.0.1, port_value: 9901"
_FILES = {
    "endpoints": "/etc/envoy/legato/endpoints",
    "descriptor": "/etc/envoy/legato/descriptor.binpb",
    "tls_cert": "/etc/envoy/legato/tls/server.crt",
    "tls_key": "/etc/envoy/legato/tls/server.key",
    "client_ca": "/etc/envoy/legato/tls/clients.crt",
    "upstream_ca": "/etc/envoy/legato/tls/servers.crt",
    "upstream_cert": "/etc/envoy/legato/tls/envoy.crt",
    "upstream_key": "/etc/envoy/legato/tls/envoy.key",
}
_MARKS = {  # lines of envoy.yaml that count only with this file
    "tls_cert": "#tls-before ",
    "client_ca": "#client-ca ",
    "upstream_ca": "#tls-behind ",
    "upstream_cert": "#upstream-cert ",
}
_NAME = "legato.internal"


def render(listen: str, admin: str, files: Mapping[str, Path], upstream_name: str = _NAME) -> str:
    """`listen` and `admin` are HOST:PORT; `files` are by the names of options, `_` for `-`.

    Raises:
        ValueError: files do not belong together.
    """
    _check(files)
    text = TEMPLATE.read_text("utf-8")
    for name, mark in _MARKS.items():
        if name in files:
            assert mark in text, f"{TEMPLATE.name} lacks {mark}"
            text = text.replace(mark, "")
    wanted = {_LISTEN: _address(listen), _ADMIN: _address(admin), _NAME: upstream_name}
    wanted |= {_FILES[name]: str(path) for name, path in files.items()}
    for old, new in wanted.items():
        assert old in text, f"{TEMPLATE.name} lacks {old}"
        text = text.replace(old, new)
    return text


def _check(files: Mapping[str, Path]) -> None:
    for name, other in (
        ("tls_cert", "tls_key"),
        ("tls_key", "tls_cert"),
        ("client_ca", "tls_cert"),
        ("upstream_cert", "upstream_key"),
        ("upstream_key", "upstream_cert"),
        ("upstream_cert", "upstream_ca"),
    ):
        if name in files and other not in files:
            raise ValueError(f"{_option(name)} needs {_option(other)}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _address(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f'address: "{host.strip("[]")}", port_value: {int(port)}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="0.0.0.0:50051", help="HOST:PORT for clients")
    parser.add_argument("--admin", default="127.0.0.1:9901", help="HOST:PORT of Envoy's own pages")
    helps = {
        "endpoints": "the folder of endpoints.json",
        "descriptor": "descriptor.binpb",
        "tls_cert": "TLS for clients: certificates, PEM",
        "tls_key": "the private key of --tls-cert",
        "client_ca": "who signs the certificates that clients then need",
        "upstream_ca": "TLS to servers: who signs their certificates",
        "upstream_cert": "Envoy's own certificate for servers that ask for one",
        "upstream_key": "the private key of --upstream-cert",
    }
    for name, text in helps.items():
        parser.add_argument(_option(name), type=Path, metavar="PATH", help=text)
    parser.add_argument(
        "--upstream-name", default=_NAME, help=f"DNS name in servers' certificates ({_NAME})"
    )
    given = vars(parser.parse_args())
    files = {name: given[name] for name in _FILES if given[name] is not None}
    try:
        text = render(given["listen"], given["admin"], files, given["upstream_name"])
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
