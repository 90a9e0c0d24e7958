"""Requests of many independent callers: pictures by a Poisson process, questions about each."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from benchmarks.fleet.clock import Clock
from benchmarks.fleet.engine import Picture, Request

DEADLINE = 1.0  # seconds in which an answer is of use
FOLLOW_UP = 1.0  # mean seconds from one question about a picture to the next


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """`mean_questions` about each picture, and a share of questions about few popular ones.

    A share of answers has `long_tokens`, the others `tokens`.
    `rate` is the questions a second at a time, in all.
    """

    rate: Callable[[float], float]
    mean_questions: float = 1.0
    hot_share: float = 0.0
    num_hot: int = 8
    tokens: int = 3
    long_share: float = 0.0
    long_tokens: int = 60


def steady(per_second: float) -> Callable[[float], float]:
    """Return a rate that does not change."""
    return lambda _: per_second


class Source:
    """Sends a workload's requests; every picture but the popular ones is new once."""

    def __init__(
        self, clock: Clock, workload: Workload, rng: random.Random, send: Callable[[Request], None]
    ) -> None:
        self._clock = clock
        self._workload = workload
        self._random = rng
        self._send = send
        self._hot = [Picture(-1 - number) for number in range(workload.num_hot)]
        self._num_pictures = 0
        self._stopped = False
        self.num_sent = 0
        clock.at(clock.now, self._next, None)

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True

    def _next(self, _: None) -> None:
        if self._stopped:
            return
        workload, rng = self._workload, self._random
        if workload.hot_share and rng.random() < self._share_of_hot_arrivals():
            self._ask(self._hot[int(rng.random() * workload.num_hot)])
        else:
            self._num_pictures += 1
            self._ask(Picture(self._num_pictures))
        gap = rng.expovariate(1.0) / self._arrivals(self._clock.now)
        self._clock.at(self._clock.now + gap, self._next, None)

    def _ask(self, picture: Picture) -> None:
        if self._stopped:
            return
        workload, now = self._workload, self._clock.now
        self.num_sent += 1
        is_long = workload.long_share and self._random.random() < workload.long_share
        tokens = workload.long_tokens if is_long else workload.tokens
        self._send(Request(now, now + DEADLINE, picture, tokens))
        is_again = workload.mean_questions > 1 and picture.key > 0
        if is_again and self._random.random() < 1 - 1 / workload.mean_questions:
            later = now + self._random.expovariate(1 / FOLLOW_UP)
            self._clock.at(later, self._ask, picture)

    def _arrivals(self, now: float) -> float:
        """New pictures and popular questions a second; follow-ups make up the rest of the rate."""
        workload = self._workload
        cold = (1 - workload.hot_share) / workload.mean_questions
        return workload.rate(now) * (cold + workload.hot_share)

    def _share_of_hot_arrivals(self) -> float:
        workload = self._workload
        cold = (1 - workload.hot_share) / workload.mean_questions
        return workload.hot_share / (cold + workload.hot_share)
