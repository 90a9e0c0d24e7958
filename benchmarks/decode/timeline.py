"""What the live timeline costs a step of the host: without it, unwatched, and watched; in turns.

`python -m benchmarks timeline` prints the figures. The device does nothing; a watcher gets batches
as a service process does, encoded.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import cast

from legato_engine.ipc.messages import TimelineBatch, encode
from legato_engine.ipc.service_connections import ServiceConnections
from legato_engine.scheduler.batch import Launch, StepRecord
from legato_engine.scheduler.interfaces import LaunchTimes
from legato_engine.telemetry import StepCounter, StepStats, TimelineStream, step_feed

from benchmarks.decode.tick import TASKS, ticks

STREAMS = (1, 8, 32)
WAYS = ("without it", "unwatched", "watched")


class Watchers:
    """Encodes the batches and counts their bytes."""

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self.num_bytes = 0

    def send_timeline(self, batch: TimelineBatch) -> None:
        """As the engine's end of the connection, without the socket."""
        self.num_bytes += len(encode(batch))


def feed(way: str) -> tuple[Callable[[StepRecord], None], Watchers]:
    """Return the listeners of an engine process, with or without the timeline."""
    stats, watchers = StepStats(), Watchers(way == "watched")
    stream = (
        () if way == WAYS[0] else (TimelineStream(cast(ServiceConnections, watchers), stats).add,)
    )
    return step_feed(_times, (stats.add, StepCounter().add, *stream)), watchers


def main(argv: Sequence[str]) -> int:
    """Print the median of all turns, and what a watcher is sent for a step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks timeline", description=__doc__)
    parser.add_argument("--ticks", default=2000, type=int, help="measured ticks of a turn")
    parser.add_argument("--turns", default=6, type=int)
    arguments = parser.parse_args(argv)
    print("streams  " + "  ".join(f"{way:>15}" for way in WAYS) + "  bytes a step, watched")
    for streams in STREAMS:
        medians: dict[str, list[float]] = {way: [] for way in WAYS}
        sent = 0.0
        for turn in range(arguments.turns):
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                observer, watchers = feed(way)
                spent = ticks(TASKS["free"], streams, arguments.ticks, observer=observer)
                medians[way].append(statistics.median(spent) / 1000)
                sent = watchers.num_bytes / arguments.ticks or sent
        cells = [f"{statistics.median(medians[way]):12.2f} us" for way in WAYS]
        print(f"{streams:7}  " + "  ".join(cells) + f"  {sent:8.0f}")
    return 0


def _times(launch: Launch) -> LaunchTimes:
    """Of a device that takes a microsecond for each part."""
    at = 1000 * launch.launch_id
    return LaunchTimes(at, at + 400, at + 500, at + 700, at + 800)
