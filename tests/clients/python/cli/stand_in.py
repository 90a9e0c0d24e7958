"""A package that `legato serve` takes for the service."""

from __future__ import annotations

from pathlib import Path

_OPTIONS = """
import argparse

def make_parser(kind=argparse.ArgumentParser):
    parser = kind(prog="legato serve", allow_abbrev=False)
    for name in ("--listen", "--device", "--port"):
        parser.add_argument(name)
    return parser
"""


def stand_in_service(folder: Path, program: str) -> None:
    """Write the package into `folder`; `python -m legato_service` runs `program`."""
    package = folder / "legato_service"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "arguments.py").write_text(_OPTIONS)
    (package / "__main__.py").write_text(program)
