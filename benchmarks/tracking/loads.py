"""Which frames of a clip are answered, and in which order, by how busy the server is."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.tracking.clips import Frame


@dataclasses.dataclass(frozen=True)
class Load:
    """A server that takes `seconds` for a frame; the newest frame waits, the others are dropped.

    With several `in_flight` a frame takes `seconds` to twice that, at random, and they overtake.
    """

    name: str
    seconds: float
    in_flight: int = 1

    def answered(self, frames: list[Frame], seed: int) -> list[Frame]:
        """Return the frames that get results, in their order."""
        rng = np.random.default_rng(seed)
        free = [0.0] * self.in_flight  # when each place is free again
        waiting, ends = list(frames), []
        while waiting:
            place = int(np.argmin(free))
            now = max(free[place], waiting[0].time)
            newest = [frame for frame in waiting if frame.time <= now][-1]
            waiting = [frame for frame in waiting if frame.time > newest.time]
            factor = 1 if self.in_flight == 1 else rng.uniform(1, 2)
            free[place] = now + self.seconds * factor
            ends.append((free[place], newest))
        return [frame for _, frame in sorted(ends, key=lambda each: each[0])]


LOADS = (
    Load("30 a second", 0.001),
    Load("30 a second, out of order", 0.06, in_flight=8),
    Load("3 times too many", 0.1),
    Load("3 times too many, out of order", 0.2, in_flight=3),
    Load("10 times too many", 0.333),
    Load("20 times too many", 0.667),
)
