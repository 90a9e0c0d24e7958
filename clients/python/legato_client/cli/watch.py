"""`legato watch`: a camera or a video, live."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from legato_client import LegatoError
from legato_client.cli import arguments, install, signals
from legato_client.cli.exits import CommandError, ExitCode, of_file
from legato_client.cli.terminal import Terminal
from legato_client.live.feed import Asked, Feed
from legato_client.live.figures import Figures, summary
from legato_client.live.lane import Answered

if TYPE_CHECKING:
    from legato_client.live.camera import Camera
    from legato_client.live.outputs import Receiver

_PATIENCE = 60.0  # seconds
_REFRESH = 0.1  # seconds


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "watch",
        help="ask about a camera or a video, live",
        description="Ask about the newest picture of a camera, a stream or a video, again and "
        "again, and show what is found. Lost cameras and servers are looked for again.",
    )
    add = parser.add_argument
    add(
        "source", metavar="FILE|/dev/videoN|URL", help="a URL of RTSP, or another that FFmpeg opens"
    )
    arguments.add_task_options(parser)
    add("--output", action="append", default=[], metavar="FILE.mp4|FILE.jsonl|-",
        help="also a video of drawings, or lines of JSON; - is standard output; may be "
        "repeated")  # fmt: skip
    add("--every-frame", action="store_true",
        help="ask about every picture, however late; default: about the newest")  # fmt: skip
    add("--max-age", type=arguments.positive, metavar="SECONDS",
        help="drop pictures that grow older, default: none")  # fmt: skip
    add("--rate", type=arguments.positive, default=1.0, metavar="R",
        help="play a file R times as fast as its own pace, default %(default)g")  # fmt: skip
    add("--seconds", type=arguments.positive, metavar="S", help="end after S seconds")
    add("--retry-for", type=arguments.positive, default=_PATIENCE, metavar="SECONDS",
        help="look for a lost source or server for so long, default %(default)g")  # fmt: skip
    group = parser.add_argument_group("pictures")
    group.add_argument("--size", metavar="WxH", help="of a device's pictures")
    group.add_argument("--fps", type=arguments.positive, metavar="F", help="of a device")
    group.add_argument("--max-side", type=arguments.at_least_one, metavar="PIXELS",
                       help="shrink larger pictures before they are sent")  # fmt: skip
    group.add_argument("--jpeg", type=arguments.quality, metavar="QUALITY",
                       help="send JPEG, 1 to 95, default: pixels without loss")  # fmt: skip
    parser.add_argument("--track", action="store_true",
                        help="follow detected objects from picture to picture")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> None:
    try:
        _run(args, terminal)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"videos need {error.name}: {install.hint('video')}", ExitCode.USAGE
        ) from None
    except BrokenPipeError:
        raise  # the reader of standard output left
    except OSError as error:
        raise of_file(error) from None
    except ValueError as error:
        raise CommandError(str(error), ExitCode.USAGE) from None


def _run(args: argparse.Namespace, terminal: Terminal) -> None:
    from legato_client.cli.watch_view import View  # needs Pillow
    from legato_client.live import camera, outputs

    asked = arguments.tasks_of(args)
    source = camera.source_of(args.source, size=args.size, fps=args.fps)
    if "-" in args.output:
        terminal = terminal.on_standard_error()
    figures = Figures()
    with (
        arguments.connect(args) as client,
        _receivers(args, source.shown) as receivers,
        View(terminal, figures, source.shown) as view,
    ):
        receivers.append(view)

        def tell(answered: Answered) -> None:
            for receiver in receivers:
                receiver.take(answered)

        how = Asked(
            asked, args.every_frame, args.max_age, args.model, args.adapter, "watch", args.track
        )
        feed = Feed(client, how, tell, figures, patience=args.retry_for, waits=False)
        taker = camera.Camera(
            source,
            feed.offer,
            figures,
            form=camera.Form(args.max_side, args.jpeg),
            rate=args.rate,
            patience=args.retry_for,
        )
        problem = _Watch(feed, taker).perform(args.seconds, view.refresh)
    totals = figures.totals()
    not_drawn = sum(each.left_out for each in receivers if isinstance(each, outputs.Film))
    for line in summary(totals):
        terminal.line(line)
    if not_drawn:
        terminal.line(f"{not_drawn} answered frames are not in the video: drawing is slower")
    terminal.document({"model": feed.model, **totals.document(), "not_drawn": not_drawn})
    if problem is not None:
        raise problem


class _Watch:
    """A thread that takes pictures and one that sends them, until either ends both."""

    def __init__(self, feed: Feed, camera: Camera) -> None:
        self._feed = feed
        self._camera = camera
        self._problem: Exception | None = None
        self._ended = threading.Event()

    def perform(self, seconds: float | None, refresh: Any) -> Exception | None:
        """Return what went wrong; SIGINT and SIGTERM are an end, and nothing wrong."""
        end = None if seconds is None else time.monotonic() + seconds
        threads = [
            threading.Thread(target=work, name=f"legato-{name}", daemon=True)
            for name, work in (("send", self._send), ("camera", self._take))
        ]
        for thread in threads:
            thread.start()
        with signals.calling(self._ended.set):
            while not self._ended.wait(_REFRESH):
                refresh()
                if end is not None and time.monotonic() >= end:
                    self._camera.stop()
                    self._feed.finish()
                    end = None
        self._camera.stop()
        self._feed.stop()
        for thread in threads:
            thread.join(_PATIENCE)
        return self._problem

    def _send(self) -> None:
        try:
            self._feed.run()
        except (LegatoError, OSError) as error:
            self._problem = error
        finally:
            self._camera.stop()
            self._ended.set()

    def _take(self) -> None:
        try:
            self._camera.run()
        except (OSError, ValueError, ModuleNotFoundError) as error:
            self._problem = self._problem or error
        finally:
            self._feed.finish()


@contextlib.contextmanager
def _receivers(args: argparse.Namespace, source: str) -> Iterator[list[Receiver]]:
    """Raises OSError for a file that cannot be written, also at its end."""
    from legato_client.live import outputs

    with contextlib.ExitStack() as stack:
        found: list[Receiver] = []
        for name in args.output:
            found.append(outputs.opened(name, source, args.every_frame, _standard_output))
            stack.callback(found[-1].close)
        yield found


def _standard_output() -> IO[bytes]:
    """A copy that may be closed."""
    return os.fdopen(os.dup(sys.stdout.fileno()), "wb")
