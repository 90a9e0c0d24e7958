"""`legato trace --server`: the timeline of a running server."""

from __future__ import annotations

import argparse
import collections
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from legato_client._types.server import DecodeSteps, TimelineSpan, TimelineUpdate
from legato_client.cli import arguments, forward
from legato_client.cli.settings import CommandError, ExitCode
from legato_client.cli.terminal import Terminal, printable

LANES = (
    "cpu plan",
    "cpu launch",
    "cpu wait",
    "cpu commit",
    "cpu finalize",
    "device compute",
    "device copy",
    "device idle",
    "slot 0",
    "slot 1",
)
"""Lanes from the top; those of newer servers follow."""

_ARROW = {
    ("cpu launch", "launch"): "s",
    ("device compute", "forward"): "t",
    ("cpu commit", "commit"): "f",
}
"""Spans at which a launch's arrow starts, passes and ends."""

_COUNTS = ("launch", "kind", "rows", "riding", "zombies")
_SECOND = 1e6  # microseconds
_LAUNCHES = 1 << 40  # more than an engine makes: keeps the arrows of engines apart


def trace(spans: Iterable[TimelineSpan]) -> dict[str, Any]:
    """Return the document that `legato trace` writes; each engine is a process."""
    lanes = {name: number for number, name in enumerate(LANES)}
    engines = {0}
    events = []
    for span in spans:
        engines.add(span.engine)
        lane = lanes.setdefault(span.lane, len(lanes))
        at = {"pid": 1 + span.engine, "tid": lane, "ts": span.start * _SECOND}
        name, args = f"{span.name} {span.launch}", {each: getattr(span, each) for each in _COUNTS}
        complete = {"ph": "X", "name": name, "cat": span.kind, "dur": span.duration * _SECOND}
        events.append({**at, **complete, "args": args})
        if phase := _ARROW.get((span.lane, span.name)):
            number = span.launch + span.engine * _LAUNCHES
            about = {"name": "launch", "cat": "launch", "id": number}
            events.append({**at, "ph": phase, "bp": "e", **about})
    named = [
        _named("thread_name", engine, name, tid=lane)
        for engine in sorted(engines)
        for name, lane in lanes.items()
    ]
    if len(engines) > 1:
        named += [_named("process_name", each, f"engine-{each}") for each in sorted(engines)]
    return {"traceEvents": named + events, "displayTimeUnit": "ms"}


def _named(kind: str, engine: int, name: str, **more: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 1 + engine, **more, "name": kind, "args": {"name": name}}


_WIDTH = 32  # characters of a bar
_SLOT = (("forward", "█"), ("sample", "▓"), ("copy", "▒"), ("commit", "░"))
_DEVICE = (("forward", "█"), ("sample", "▓"), ("idle", "·"))
_HOST = (("plan", "█"), ("launch", "▓"), ("finalize", "▒"), ("commit", "░"))


class SlotView:
    """Sum of updates; `lines` returns its text and resets it, empty without updates."""

    def __init__(self) -> None:
        self._engines: dict[int, _Engine] = {}
        self._has_new = False

    def add(self, update: TimelineUpdate) -> None:
        if update.spans:
            self._engines.setdefault(update.engine, _Engine()).add(update)
            self._has_new = True

    def lines(self) -> list[str]:
        found: list[str] = []
        if not self._has_new:
            return found
        self._has_new = False
        for number, engine in sorted(self._engines.items()):
            found += engine.lines(f"engine {number} " if len(self._engines) > 1 else "")
        return found


class _Engine:
    def __init__(self) -> None:
        self._started = 0.0
        self._depth = 0
        self._steps: DecodeSteps | None = None
        self._lost = 0
        self._note = ""
        self._begin = 0.0  # start of the summed window, in the server's seconds
        self._end = 0.0
        self._times = collections.defaultdict[tuple[str, str], float](float)  # by lane and name
        self._latest: dict[str, TimelineSpan] = {}  # by lane

    def add(self, update: TimelineUpdate) -> None:
        if self._started not in (0.0, update.engine_started):
            self._note = ", started again"
        self._started, self._depth = update.engine_started, update.pipeline_depth
        self._steps = update.decode_steps or self._steps
        self._lost += update.lost_launches
        slots = {s.launch: s.lane for s in update.spans if s.lane.startswith("slot ")}
        for span in update.spans:
            self._begin = min(self._begin or span.start, span.start)
            self._end = max(self._end, span.start + span.duration)
            lane = span.lane.partition(" ")[0]
            self._times[lane, span.name] += span.duration
            if lane != "slot":
                self._times[slots.get(span.launch, ""), span.name] += span.duration
            self._latest[span.lane] = span

    def lines(self, prefix: str) -> Iterator[str]:
        seconds = max(self._end - self._begin, 1e-9)
        for slot in ("slot 0", "slot 1") if self._depth else ():
            held = self._latest.get(slot)
            what = f"{held.kind} {held.launch}, {held.rows} rows" if held else "free"
            yield self._line(prefix + slot, slot, _SLOT, seconds, what)
        if self._depth:
            yield self._line(prefix + "device", "device", _DEVICE, seconds, self._gains())
        lost = f"{self._lost} launches lost" if self._lost else ""
        yield self._line(prefix + "host", "cpu", _HOST, seconds, lost + self._note)
        self._times.clear()
        self._begin = self._end

    def _line(
        self, label: str, lane: str, parts: tuple[tuple[str, str], ...], seconds: float, text: str
    ) -> str:
        shares = [(mark, name, self._times[lane, name] / seconds) for name, mark in parts]
        bar = "".join(mark * round(share * _WIDTH) for mark, _, share in shares)[:_WIDTH]
        figures = " ".join(f"{mark} {name} {share:4.0%}" for mark, name, share in shares)
        return f"{label:16} |{bar:{_WIDTH}}| {figures}  {text}".rstrip()

    def _gains(self) -> str:
        steps = self._steps
        if steps is None:
            return ""
        step = f"step {steps.step_ms:.2f} ms, depth {self._depth}"
        if self._depth == 1:
            return step
        gains = f"{steps.predicted_gain:+.1%} predicted, {steps.observed_gain:+.1%} observed"
        return f"{step}, gain {gains}"


# ---------------------------------------------------------------- timeline

_DURATION = 5.0  # seconds of a file
_REFRESH = 0.5  # seconds between updates of the display
_LONGEST = 7 * 86400.0  # seconds
FLAG = "--server"
_DESCRIPTION = (
    f"Record a timeline of launches. With {FLAG} it is that of a running server, which an operator "
    "may watch; without it, that of a short run of an engine on this machine."
)


def is_remote(words: Sequence[str]) -> bool:
    return any(word == FLAG or word.startswith(f"{FLAG}=") for word in words)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    if args.follow:
        _follow(args, terminal)
    else:
        _record(args, terminal)


def _follow(args: argparse.Namespace, terminal: Terminal) -> None:
    view, due = SlotView(), time.monotonic() + _REFRESH
    with arguments.connect(args, as_operator=True) as client, terminal.live() as live:

        def refresh() -> None:
            if lines := view.lines():
                text = "\n".join(lines)
                if live is None:
                    terminal.line(text)
                else:
                    from rich.text import Text

                    live.update(Text(printable(text), no_wrap=True), refresh=True)
                terminal.document({"lines": lines})

        for update in client.watch_timeline(args.seconds, timeout=_LONGEST):
            view.add(update)
            if time.monotonic() >= due:
                refresh()
                due = time.monotonic() + _REFRESH
        refresh()


def _record(args: argparse.Namespace, terminal: Terminal) -> None:
    spans: list[TimelineSpan] = []
    steps: DecodeSteps | None = None
    with arguments.connect(args, as_operator=True) as client:
        for update in client.watch_timeline(args.seconds or _DURATION):
            spans += update.spans
            steps = update.decode_steps or steps
    args.output.write_text(json.dumps(trace(spans)))
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


_REMOTE_OPTIONS = ("--follow", "--seconds")


def check_local(words: Sequence[str]) -> None:
    """Raise CommandError for an option that only a running server's timeline has."""
    for word in words:
        if (name := word.partition("=")[0]) in _REMOTE_OPTIONS:
            raise CommandError(f"{name} needs {FLAG}: it is for a running server", ExitCode.USAGE)


def make_parser(local: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Build the parser for a running server, or add its options to that of a run here."""
    parser = local
    if parser is None:
        example = forward.MODULES["trace"].example
        parser = arguments.Parser(prog="legato trace", example=example)
        parser.add_argument(
            "--output",
            type=Path,
            default=Path("trace.json"),
            metavar="FILE",
            help="file to write, for Perfetto or chrome://tracing",
        )
    parser.description = _DESCRIPTION
    parser.set_defaults(run=run)
    group = parser.add_argument_group("a running server (with --server)")
    group.add_argument(
        "--seconds",
        type=arguments.positive,
        metavar="SECONDS",
        help=f"how long to watch, default {_DURATION:g}; with --follow until it is interrupted",
    )
    group.add_argument(
        "--follow",
        action="store_true",
        help="show slots, device and host live instead of writing a file",
    )
    arguments.add_server_options(parser)
    return parser
