"""Print envoy.yaml with other addresses and paths: python deploy/envoy/render.py --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TEMPLATE = Path(__file__).with_name("envoy.yaml")
_LISTEN = "address: 0.0.0.0, port_value: 50051"
_ADMIN = "address: 127.0.0.1, port_value: 9901"
_ENDPOINTS = "/etc/envoy/legato/endpoints"
_DESCRIPTOR = "/etc/envoy/legato/descriptor.binpb"


def render(listen: str, admin: str, endpoints: Path, descriptor: Path) -> str:
    """`listen` and `admin` are HOST:PORT, `endpoints` the folder of endpoints.json."""
    text = TEMPLATE.read_text("utf-8")
    for old, new in (
        (_LISTEN, _address(listen)),
        (_ADMIN, _address(admin)),
        (_ENDPOINTS, str(endpoints)),
        (_DESCRIPTOR, str(descriptor)),
    ):
        assert old in text, f"{TEMPLATE.name} lacks {old}"
        text = text.replace(old, new)
    return text


def _address(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f'address: "{host.strip("[]")}", port_value: {int(port)}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="0.0.0.0:50051", help="HOST:PORT for clients")
    parser.add_argument("--admin", default="127.0.0.1:9901", help="HOST:PORT of Envoy's own pages")
    parser.add_argument("--endpoints", type=Path, default=Path(_ENDPOINTS), help="a folder")
    parser.add_argument("--descriptor", type=Path, default=Path(_DESCRIPTOR), help="a file")
    arguments = parser.parse_args()
    text = render(arguments.listen, arguments.admin, arguments.endpoints, arguments.descriptor)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
