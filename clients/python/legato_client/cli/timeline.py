"""`legato trace --server`: the timeline of a running server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from legato_client._values.admin import DecodeSteps, TimelineSpan
from legato_client.cli import arguments, chrome_trace
from legato_client.cli.terminal import Terminal

FLAG = "--server"


def is_remote(words: Sequence[str]) -> bool:
    """Whether a running server is meant, not a run of its own."""
    return any(word == FLAG or word.startswith(f"{FLAG}=") for word in words)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    spans: list[TimelineSpan] = []
    steps: DecodeSteps | None = None
    with arguments.connect(args, as_operator=True) as client:
        for update in client.watch_timeline(args.duration):
            spans += update.spans
            steps = update.decode_steps or steps
    args.output.write_text(json.dumps(chrome_trace.trace(spans)))
    launches = len({(span.engine, span.launch) for span in spans})
    terminal.line(f"{launches} launches in {args.output}")
    if steps is not None:
        terminal.line(
            f"gain over blocking: {steps.predicted_gain:+.1%} predicted, "
            f"{steps.observed_gain:+.1%} observed"
        )
    terminal.document(
        {
            "launches": launches,
            "output": str(args.output),
            "predicted_gain": None if steps is None else steps.predicted_gain,
            "observed_gain": None if steps is None else steps.observed_gain,
        }
    )


def make_parser() -> arguments.Parser:
    parser = arguments.Parser(prog=f"legato trace {FLAG}", description=__doc__)
    arguments.add_server_options(parser)
    parser.add_argument(
        "--duration", type=arguments.positive, default=5.0, metavar="SECONDS", help="to watch"
    )
    parser.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE")
    parser.set_defaults(run=run)
    return parser
