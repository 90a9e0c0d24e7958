"""Options of `legato pull` and `legato models`."""

from __future__ import annotations

import argparse

from legato_engine.hub.catalog import MODELS


def pull_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="legato pull",
        description="Fetch the weights of a model from Hugging Face, or from HF_ENDPOINT, so that "
        "`legato serve --model NAME` finds them. A pull that was cut off goes on where it ended.",
        allow_abbrev=False,
    )
    parser.add_argument("model", choices=sorted(MODELS), metavar="NAME", help=", ".join(MODELS))
    _add_folder(parser)
    return parser


def models_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="legato models",
        description="The models that can be pulled: which are here, from where, and which fit.",
        allow_abbrev=False,
    )
    _add_folder(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    return parser


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        default="",
        metavar="FOLDER",
        help="where pulled models are kept, default ~/.local/share/legato/models",
    )
