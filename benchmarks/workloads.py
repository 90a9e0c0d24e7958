"""What callers ask, as lists of jobs: pictures by number, a question, a number of tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

QUESTION = "What about {}?"
"""With its template about 19 tokens, as a question about a chart has: random weights come with a
tokenizer of one token a byte."""
_MIX_PICTURES, _MIX_QUESTIONS = 3, 5  # five questions for every three pictures


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One call; jobs with the same `picture` send the same bytes. Only `timed` ones count."""

    picture: int
    question: str
    tokens: int
    timed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A cell to measure: `calls` timed ones by `callers` at once, pictures from number `first`."""

    callers: int
    calls: int
    tokens: int
    first: int

    @property
    def lead(self) -> int:
        """Calls in front, until every caller has been busy for a while."""
        return max(4, 2 * self.callers)

    @property
    def tail(self) -> int:
        """Calls behind, so that the last timed ones run among as many as the first."""
        return self.callers if self.callers > 1 else 0

    @property
    def total(self) -> int:
        """Calls in all."""
        return self.lead + self.calls + self.tail


def new(ask: Ask) -> list[Job]:
    """Every call brings a picture that was never seen."""
    return _jobs(ask, [ask.first + index for index in range(ask.total)])


def cached(ask: Ask) -> list[Job]:
    """The same picture again and again."""
    return _jobs(ask, [ask.first] * ask.total)


def mix(ask: Ask) -> list[Job]:
    """Five questions for every three pictures, shuffled.

    Two pictures of three are asked about twice. The second question comes `callers` to twice as
    many calls behind the first, so that the first is answered and its picture still cached.
    """
    rng = random.Random(ask.first)
    span = 2 * ask.callers + 2
    spacing = _MIX_QUESTIONS / _MIX_PICTURES
    places: list[tuple[float, int]] = []
    for index in range(int((ask.total + 2 * span) / spacing) + _MIX_PICTURES):
        place = (index + rng.random()) * spacing
        places.append((place, ask.first + index))
        if index % _MIX_PICTURES:
            places.append((place + rng.uniform(ask.callers + 1, span), ask.first + index))
    pictures = [picture for _, picture in sorted(places)]
    return _jobs(ask, pictures[span : span + ask.total])


WORKLOADS: dict[str, Callable[[Ask], list[Job]]] = {"new": new, "mix": mix, "cached": cached}


def _jobs(ask: Ask, pictures: list[int]) -> list[Job]:
    timed = range(ask.lead, ask.lead + ask.calls)
    return [
        Job(picture, QUESTION.format(place % 100), ask.tokens, place in timed)
        for place, picture in enumerate(pictures)
    ]
