"""The files of legato-tiny: its configuration, tokenizer, weights, draft and MODEL_CARD.md."""

from __future__ import annotations

import pathlib

__all__ = ["path"]


def path() -> pathlib.Path:
    """Return the folder that holds the model's files."""
    return pathlib.Path(__file__).resolve().parent
