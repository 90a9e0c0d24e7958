"""Options of `legato bench`, `legato trace` and `legato replay`; read without torch."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable

KINDS = ("query", "caption", "detect", "json")
TABLES = ("full", "photon")
DTYPES = ("auto", "f32", "bf16")


Kind = Callable[..., argparse.ArgumentParser]


def bench_parser(kind: Kind = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = kind(
        allow_abbrev=False,
        prog="legato bench",
        description="Measure the gain from pipelining: the same requests at pipeline depth 1 "
        "(blocking) and 2.",
    )
    add_model_arguments(parser)
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add(
        "--streams",
        default=[1, 8],
        type=_numbers,
        metavar="N,N",
        help="numbers of concurrent requests, as 1,8,32",
    )
    add("--length", default=110, type=int, metavar="TOKENS", help="tokens per request")
    add(
        "--context",
        default=0,
        type=int,
        metavar="TOKENS",
        help="position of the first token; 0: that of the task",
    )
    add("--repeats", default=3, type=int, metavar="N", help="number of timed runs per depth")
    add(
        "--compare-tasks",
        action="store_true",
        help="measure query, detect and json at the same context, whatever --task says",
    )
    add("--table", default="full", choices=TABLES, help="form of the tables")
    add("--json", action="store_true", help="print figures as JSON instead of tables")
    return parser


def trace_parser(kind: Kind = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = kind(
        allow_abbrev=False,
        prog="legato trace",
        description="Record a timeline of a short run.",
    )
    parser.add_argument(
        "--output",
        default=pathlib.Path("trace.json"),
        type=pathlib.Path,
        metavar="FILE",
        help="file to write, for Perfetto or chrome://tracing",
    )
    add_model_arguments(parser)
    add = parser.add_argument_group("run").add_argument
    add("--streams", default=4, type=int, metavar="N", help="number of concurrent requests")
    add("--length", default=32, type=int, metavar="TOKENS", help="tokens per request")
    add("--depth", default=2, type=int, choices=(1, 2), help="pipeline depth")
    return parser


def replay_parser(kind: Kind = argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = kind(
        allow_abbrev=False,
        prog="legato replay",
        description="Run the launches of a crash bundle once more: requests of the recorded "
        "shapes, with made-up contents, arrive at the same launches as before, in a process of "
        "their own.",
    )
    parser.add_argument("bundle", type=pathlib.Path, help="folder, or its bundle.json")
    add_model_arguments(parser)
    parser.add_argument(
        "--no-failpoints", action="store_true", help="do not set the recorded failpoints"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    add("--model", default="legato-tiny", metavar="NAME", help="model to run")
    add(
        "--weights",
        default="",
        metavar="PATH",
        help="weights to load: a folder, or a .safetensors, .pt or .gguf file",
    )
    add("--tokenizer", default="", metavar="FILE", help="tokenizer.json to use")
    add("--random-weights", action="store_true", help="seeded random weights")
    add(
        "--max-context",
        default=0,
        type=int,
        metavar="TOKENS",
        help="maximum tokens of prompt and output together; 0: the model's own",
    )
    add("--dtype", default="auto", choices=DTYPES, help="number format of weights and activations")
    add(
        "--draft",
        default="",
        metavar="FILE|NAME:FOLDER|lookup",
        help="proposer of draft tokens, default: none",
    )
    add(
        "--threads",
        default=0,
        type=int,
        metavar="N",
        help="number of CPU threads; 0: one for each core",
    )
    add("--task", default="query", choices=KINDS, help="kind of the requests")
    add("--no-cuda-graphs", action="store_true", help="launch kernels one by one, without graphs")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
