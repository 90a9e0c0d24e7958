"""`legato trace --server`: the timeline of a running server."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from legato_client._values.admin import DecodeSteps, TimelineSpan
from legato_client.cli import arguments, chrome_trace
from legato_client.cli.slot_view import SlotView
from legato_client.cli.terminal import Terminal

_DURATION = 5.0  # seconds of a file
_REFRESH = 0.5  # seconds between two looks at the slots
_LONGEST = 7 * 86400.0  # seconds
FLAG = "--server"


def is_remote(words: Sequence[str]) -> bool:
    """Whether a running server is meant, not a run of its own."""
    return any(word == FLAG or word.startswith(f"{FLAG}=") for word in words)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    if args.follow:
        _follow(args, terminal)
    else:
        _record(args, terminal)


def _follow(args: argparse.Namespace, terminal: Terminal) -> None:
    view, due = SlotView(), time.monotonic() + _REFRESH
    with arguments.connect(args, as_operator=True) as client, terminal.live() as show:

        def look() -> None:
            if lines := view.lines():
                show("\n".join(lines))
                terminal.document({"lines": lines})

        for update in client.watch_timeline(args.duration, timeout=_LONGEST):
            view.add(update)
            if time.monotonic() >= due:
                look()
                due = time.monotonic() + _REFRESH
        look()


def _record(args: argparse.Namespace, terminal: Terminal) -> None:
    spans: list[TimelineSpan] = []
    steps: DecodeSteps | None = None
    with arguments.connect(args, as_operator=True) as client:
        for update in client.watch_timeline(args.duration or _DURATION):
            spans += update.spans
            steps = update.decode_steps or steps
    args.output.write_text(json.dumps(chrome_trace.trace(spans)))
    launches = len({(span.engine, span.launch) for span in spans})
    idle = "" if launches else ": nothing ran meanwhile"
    terminal.line(f"{launches} launches in {args.output}{idle}")
    if steps is not None and launches:
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
        "--duration",
        type=arguments.positive,
        metavar="SECONDS",
        help=f"to watch: {_DURATION:g} by default, with --follow until it is interrupted",
    )
    parser.add_argument(
        "--follow", action="store_true", help="show slots, device and host instead of a file"
    )
    parser.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE")
    parser.set_defaults(run=run)
    return parser
