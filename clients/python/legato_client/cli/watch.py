"""`legato watch`: a camera or a video, live."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from legato_client import Detection, LegatoError, PointedObject, Result
from legato_client._proto import skills
from legato_client._types.results import Mark
from legato_client.cli import arguments, forward, settings
from legato_client.cli.show import show_notice
from legato_client.cli.terminal import Terminal, rich_table
from legato_client.stream.feed import AnsweredFrame, Feed, FeedSettings
from legato_client.stream.frames import CapturedFrame, FrameCounters, Totals, summary

if TYPE_CHECKING:
    from rich.live import Live

    from legato_client.stream.camera import Camera
    from legato_client.stream.outputs import Drawings, Receiver

_LINE_PERIOD = 10.0  # seconds
_MAX_ROWS = 12
_HEADS = ("task", "found", "where", "confidence", "track")
_FRAME_ROWS = 5  # rows of the table's frame and of the connection's lines


@dataclasses.dataclass
class LiveView:
    """A table and, in a large terminal, the image; elsewhere a line every ten seconds.

    `take` is for any thread, the rest for the one that made it.
    """

    terminal: Terminal
    counters: FrameCounters
    source: str
    drawings: Drawings
    live: Live | None
    _latest: AnsweredFrame | None = None
    _printed_at: float = dataclasses.field(default_factory=time.monotonic)

    def take(self, answered: AnsweredFrame) -> None:
        self._latest = answered

    def refresh(self) -> None:
        if self.live is not None:
            self.live.update(self._image_and_table(self.live.console.size), refresh=True)
        elif time.monotonic() - self._printed_at >= _LINE_PERIOD:
            self._printed_at = time.monotonic()
            self.terminal.line(state_line(self.counters))

    def _image_and_table(self, size: tuple[int, int]) -> Any:
        from rich.console import Group
        from rich.text import Text

        from legato_client.cli.half_blocks import HalfBlocks, fits

        columns, lines = size
        latest = self._latest
        rows = rows_of(latest) if latest else []
        parts: list[Any] = []
        left = lines - min(len(rows), _MAX_ROWS) - _FRAME_ROWS - 3
        if latest is not None and fits(columns, left):
            shown = self.drawings.of(latest)
            with contextlib.suppress(OSError, ValueError):  # the answer counts, not the image
                image = shown.frame.image()
                parts.append(HalfBlocks(image, shown.marks, columns, left, shown.faint))
        parts.append(rich_table(_HEADS, rows[:_MAX_ROWS]))
        if len(rows) > _MAX_ROWS:
            parts.append(Text(f"and {len(rows) - _MAX_ROWS} more"))
        parts.append(Text(f"{self.source}: {state_line(self.counters)}"))
        return Group(*parts)


def server_notices(terminal: Terminal, server: str) -> Callable[[str], None]:
    """Return a function that reports a lost and a regained server, once each."""
    lost_at: list[float] = []

    def report(state: str) -> None:
        if state.startswith("lost") and not lost_at:
            lost_at.append(time.monotonic())
            terminal.notice(f"waiting for the server at {server}: {state}")
        elif state == "connected" and lost_at:
            away = time.monotonic() - lost_at.pop()
            terminal.notice(f"the server at {server} is back after {away:.1f} s")

    return report


def state_line(counters: FrameCounters) -> str:
    totals = counters.totals()
    age = "-" if counters.last_age is None else f"{counters.last_age * 1e3:.0f} ms"
    return (
        f"source {counters.source}, server {counters.server} · "
        f"{counters.rate('taken'):.1f} frames/s, {counters.rate('answered'):.1f} answers/s · "
        f"age {age} · {_left_out(totals)} left out, {totals.lost} lost"
        + (f" · {totals.age_limit_problem}" if totals.age_limit_problem else "")
    )


def _left_out(totals: Totals) -> int:
    return totals.replaced + totals.refused + totals.unreadable + sum(totals.dropped.values())


def rows_of(answered: AnsweredFrame) -> list[tuple[str, ...]]:
    """Return a row for each object, answer and failed task."""
    size = (answered.image.width, answered.image.height) if answered.image else (1, 1)
    return [
        (name, *cells)
        for name, outcome in answered.outcomes.items()
        for cells in _cells(outcome, size)
    ]


def _cells(outcome: Result | LegatoError, size: tuple[int, int]) -> list[tuple[str, ...]]:
    match outcome:
        case LegatoError():
            return [(f"failed: {outcome}", "", "", "")]
        case _ if skills.of(outcome).places:
            return [_mark_cells(mark, size) for mark in outcome.marks]
        case _:
            return [(outcome.text, "", "", "")]


def _mark_cells(mark: Mark, size: tuple[int, int]) -> tuple[str, ...]:
    if isinstance(mark, PointedObject):
        place = "{}, {}".format(*mark.to_pixels(*size))
    else:
        place = "{}, {} to {}, {}".format(*mark.box.to_pixels(*size))
    confidence = "" if mark.confidence is None else f"{mark.confidence:.2f}"
    return mark.label, place, confidence, mark.track_id if isinstance(mark, Detection) else ""


_PATIENCE = 60.0  # seconds
_REFRESH = 0.1  # seconds


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "watch",
        help="ask about a camera or a video, live",
        description="Ask about the newest frame of a camera, a stream or a video, again and "
        "again, and show the results. Lost cameras and servers are retried.",
        example="legato watch /dev/video0 --task detect:cup --track --output found.jsonl",
    )
    add = parser.add_argument
    add(
        "source",
        metavar="FILE|/dev/videoN|URL",
        help="video file, camera, or URL of RTSP or another stream that FFmpeg opens",
    )
    arguments.add_task_options(parser)
    add("--output", action="append", default=[], metavar="FILE.mp4|FILE.jsonl|-",
        help="also write an annotated video, or lines of JSON; - is standard output; may be "
        "repeated")  # fmt: skip
    add("--every-frame", action="store_true",
        help="ask about every frame, however late; default: about the newest")  # fmt: skip
    add("--max-age", type=arguments.positive, metavar="SECONDS",
        help="drop frames that get older than this, default: none")  # fmt: skip
    add("--speed", type=arguments.positive, default=1.0, metavar="FACTOR",
        help="play a file FACTOR times as fast as its own pace, default %(default)g")  # fmt: skip
    add("--seconds", type=arguments.positive, metavar="SECONDS",
        help="end after this time, default: at the end of the source")  # fmt: skip
    add("--retry-for", type=arguments.positive, default=_PATIENCE, metavar="SECONDS",
        help="time for which a lost source or server is retried, default %(default)g")  # fmt: skip
    group = parser.add_argument_group("frames")
    group.add_argument("--size", metavar="WxH", help="frame size to ask a device for, in pixels")
    group.add_argument("--fps", type=arguments.positive, metavar="FPS",
                       help="frames per second to ask a device for")  # fmt: skip
    group.add_argument("--max-side", type=arguments.at_least_one, metavar="PIXELS",
                       help="longest side of a sent frame; larger ones are scaled down, "
                       "default: none is")  # fmt: skip
    group.add_argument("--jpeg", type=arguments.quality, metavar="QUALITY",
                       help="send JPEG of this quality, 1 to 95, "
                       "default: pixels without loss")  # fmt: skip
    parser.add_argument("--track", action="store_true",
                        help="follow detected objects from frame to frame")  # fmt: skip
    parser.set_defaults(run=run)


@settings.reporting(ValueError)
def run(args: argparse.Namespace, terminal: Terminal) -> None:
    forward.require("videos", "video", "av", "PIL")
    from legato_client.stream import outputs
    from legato_client.stream.camera import Camera, FrameEncoding, parse_source

    asked = arguments.tasks_of(args)
    source = parse_source(args.source, size=args.size, fps=args.fps)
    if "-" in args.output:
        terminal = terminal.on_standard_error()
    report = server_notices(terminal, args.server)
    notices = (lambda _state: None) if terminal.can_draw else report  # the view shows the state
    counters = FrameCounters(args.max_age, notices)
    drawings = outputs.Drawings()
    with (
        arguments.connect(args) as client,
        contextlib.ExitStack() as stack,
        terminal.live(transient=True) as live,
    ):
        view = LiveView(terminal, counters, source.shown, drawings, live)
        receivers: list[Receiver] = []
        for name in args.output:
            output = outputs.open_output(
                name, source.shown, args.every_frame, _standard_output, drawings
            )
            stack.callback(output.close)  # may raise OSError, too
            receivers.append(output)
        show_notice(terminal, client)

        def deliver(answered: AnsweredFrame) -> None:
            view.take(answered)
            for receiver in receivers:
                receiver.take(answered)

        feed_settings = FeedSettings(
            asked, args.every_frame, args.max_age, args.model, args.adapter, "watch", args.track
        )
        feed = Feed(client, feed_settings, deliver, counters, patience=args.retry_for, waits=False)
        drawings.now = feed.now

        def offer(frame: CapturedFrame) -> None:
            if args.track and not args.every_frame:
                drawings.newest = frame
            feed.offer(frame)

        camera = Camera(
            source,
            offer,
            counters,
            encoding=FrameEncoding(args.max_side, args.jpeg),
            rate=args.speed,
            patience=args.retry_for,
        )
        problem = _watch(feed, camera, args.seconds, view.refresh)
    totals = counters.totals()
    not_drawn = sum(each.num_dropped for each in receivers if isinstance(each, outputs.VideoOutput))
    for line in summary(totals):
        terminal.line(line)
    if not_drawn:
        terminal.line(f"{not_drawn} answered frames are not in the video: drawing is slower")
    terminal.document({"model": feed.model, **totals.document(), "not_drawn": not_drawn})
    if problem is not None:
        raise problem


def _watch(
    feed: Feed, camera: Camera, seconds: float | None, refresh: Callable[[], None]
) -> Exception | None:
    """Read and send frames in two threads until either ends both; return what went wrong.

    SIGINT and SIGTERM end normally.
    """
    problems: list[Exception] = []
    ended = threading.Event()

    def send() -> None:
        try:
            feed.run()
        except (LegatoError, OSError) as error:
            problems.insert(0, error)
        finally:
            camera.stop()
            ended.set()

    def take() -> None:
        try:
            camera.run()
        except (OSError, ValueError, ModuleNotFoundError) as error:
            problems.append(error)
        finally:
            feed.finish()

    end = None if seconds is None else time.monotonic() + seconds
    threads = [
        threading.Thread(target=work, name=f"legato-{name}", daemon=True)
        for name, work in (("send", send), ("camera", take))
    ]
    for thread in threads:
        thread.start()
    with settings.calling(ended.set):
        while not ended.wait(_REFRESH):
            refresh()
            if end is not None and time.monotonic() >= end:
                camera.stop()
                feed.finish()
                end = None
    camera.stop()
    feed.stop()
    for thread in threads:
        thread.join(_PATIENCE)
    return next(iter(problems), None)


def _standard_output() -> IO[bytes]:
    """Duplicate standard output, so that the copy may be closed."""
    return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
