"""Options that are lists, with commas between."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """An option's type that takes these alone."""

    def parse(text: str) -> tuple[str, ...]:
        given = names(text)
        if not set(given) <= set(known):
            raise argparse.ArgumentTypeError(f"there are {', '.join(known)}")
        return given

    return parse
