"""Load plans and their schedules."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Literal

from legato_client._grpc.settings import OPEN, Security

ARRIVALS = ("poisson", "constant")


def due_times(
    arrivals: str, rate: float, seconds: float, *, share: int = 0, shares: int = 1, seed: int = 0
) -> Iterator[float]:
    """Yield a sender's due times: ascending offsets in seconds from the start, below `seconds`.

    All senders together give `rate` requests a second: "constant" ones evenly spaced, "poisson"
    ones independent of each other, the same for the same seed.
    """
    source = random.Random(f"{seed}/{share}")  # a Poisson process has exponential gaps
    times = (
        ((share + shares * index) / rate for index in itertools.count())
        if arrivals == "constant"
        else itertools.accumulate(source.expovariate(rate / shares) for _ in itertools.count())
    )
    return itertools.takewhile(lambda due: due < seconds, times)


Kind = Literal["unary", "stream", "session"]
KINDS: tuple[Kind, ...] = ("unary", "stream", "session")


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load to run; times are in seconds.

    `request` is the serialised request of every call: of `path` when it is unary, a
    GenerateRequest, or the SessionRequest that opens a session. `image` is the serialised image of
    a session's frames. `rate` requests a second are due, by `arrivals`; with a rate of 0
    `in_flight` callers repeat as soon as they have their answers. The first `warm_up` of all
    `seconds` are not measured. `sessions` are shared by all senders.
    """

    target: str
    kind: Kind
    request: bytes
    path: str = ""
    image: bytes = b""
    rate: float = 0.0
    arrivals: str = "poisson"
    in_flight: int = 1
    seconds: float = 10.0
    warm_up: float = 2.0
    timeout: float = 60.0
    sessions: int = 1
    senders: int = 1
    seed: int = 0
    security: Security = OPEN

    @property
    def window(self) -> float:
        return self.seconds - self.warm_up
