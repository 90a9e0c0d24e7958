"""Options of benchmarks whose requests are equal: answers of one length, prompts of another."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """The default context is one after which all paths and repeats make the same tokens."""
    parser.add_argument("--length", default=256, type=int, help="tokens of an answer")
    parser.add_argument(
        "--context",
        default=440,
        type=int,
        help="position of the first token; on a GPU above 448 tokens differ with what is cached",
    )
    parser.add_argument("--repeats", default=3, type=int, help="timed runs of each path")
