"""Options that several benchmarks share: lists with commas between, sizes of equal requests."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def positive(text: str) -> int:
    """Parse a number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("there must be at least 1")
    return number


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Make an option's type that takes these names only."""

    def parse(text: str) -> tuple[str, ...]:
        given = names(text)
        if not set(given) <= set(known):
            raise argparse.ArgumentTypeError(f"there are {', '.join(known)}")
        return given

    return parse


def add_equal_answers(parser: argparse.ArgumentParser) -> None:
    """Add the options of requests that are equal: answers of one length, prompts of another.

    The default context is one after which all paths and repeats make the same tokens.
    """
    parser.add_argument("--length", default=256, type=int, help="tokens of an answer")
    parser.add_argument(
        "--context",
        default=440,
        type=int,
        help="position of the first token; on a GPU above 448 tokens differ with what is cached",
    )
    parser.add_argument("--repeats", default=3, type=positive, help="timed runs of each path")
