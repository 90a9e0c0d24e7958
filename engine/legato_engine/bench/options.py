"""Options of `legato bench`, `legato trace` and `legato replay`; read without torch."""

from __future__ import annotations

import argparse
import pathlib

KINDS = ("query", "caption", "detect", "json")
TABLES = ("full", "photon")


def bench_parser() -> argparse.ArgumentParser:
    parser = _parser("bench", "The gain from pipelining: requests at depth 1 (blocking) and 2.")
    add_model_arguments(parser)
    parser.add_argument("--streams", default=[1, 8], type=_numbers, help="e.g. 1,8,32")
    parser.add_argument("--length", default=110, type=int, help="tokens per request")
    parser.add_argument(
        "--context", default=0, type=int, help="position of the first token; 0: as the task has it"
    )
    parser.add_argument("--repeats", default=3, type=int, help="timed runs per depth")
    parser.add_argument(
        "--compare-tasks",
        action="store_true",
        help="query, detect and json at the same context, whatever --task says",
    )
    parser.add_argument("--table", default="full", choices=TABLES)
    parser.add_argument("--json", action="store_true", help="figures instead of tables")
    return parser


def trace_parser() -> argparse.ArgumentParser:
    parser = _parser("trace", "A timeline of a short run.")
    add_model_arguments(parser)
    parser.add_argument("--output", default=pathlib.Path("trace.json"), type=pathlib.Path)
    parser.add_argument("--streams", default=4, type=int)
    parser.add_argument("--length", default=32, type=int, help="tokens per request")
    parser.add_argument("--depth", default=2, type=int, choices=(1, 2))
    return parser


def replay_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "replay",
        "The launches of a crash bundle, once more: requests of the recorded shapes, with made-up "
        "contents, arrive at the same launches as before, in a process of their own.",
    )
    parser.add_argument("bundle", type=pathlib.Path, help="folder, or its bundle.json")
    add_model_arguments(parser)
    parser.add_argument(
        "--no-failpoints", action="store_true", help="do not set the failpoints that were set"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--model", default="legato-tiny")
    parser.add_argument("--weights", default="")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--max-context", default=0, type=int, help="positions; 0: the model's own")
    parser.add_argument("--dtype", default="auto", help="auto, f32, bf16")
    parser.add_argument("--draft", default="", help="FILE, NAME:FOLDER or lookup")
    parser.add_argument("--threads", default=0, type=int, help="CPU cores; 0: all")
    parser.add_argument("--task", default="query", choices=KINDS)
    parser.add_argument("--no-cuda-graphs", action="store_true")


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return a parser without abbreviations: other settings depend on the options typed."""
    return argparse.ArgumentParser(
        prog=f"legato {command}", description=description, allow_abbrev=False
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
