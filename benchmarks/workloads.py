"""The requests of callers as lists of jobs: images by number, a question, a number of tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

QUESTION = "What about {}?"
"""With its template about 19 tokens, as a question about a chart has: random weights come with a
tokenizer of one token a byte."""
_MIX_PICTURES, _MIX_QUESTIONS = 3, 5  # five questions for every three images


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One call; jobs with the same `image` send the same bytes. Only `timed` ones count."""

    image: int
    question: str
    tokens: int
    timed: bool
    detects: bool = False  # instead of a question: objects, of three tokens each


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A cell to measure: `calls` timed ones by `callers` at once, images from number `first`."""

    callers: int
    calls: int
    tokens: int
    first: int

    @property
    def lead(self) -> int:
        """Untimed calls before, until every caller has been busy for a while."""
        return max(4, 2 * self.callers)

    @property
    def tail(self) -> int:
        """Untimed calls after, so that the last timed ones run among as many as the first."""
        return self.callers if self.callers > 1 else 0

    @property
    def total(self) -> int:
        """Calls in all."""
        return self.lead + self.calls + self.tail


def new(ask: Ask) -> list[Job]:
    """Return calls with a new image each."""
    return _jobs(ask, [ask.first + index for index in range(ask.total)])


def cached(ask: Ask) -> list[Job]:
    """Return calls with the same image each."""
    return _jobs(ask, [ask.first] * ask.total)


def mix(ask: Ask) -> list[Job]:
    """Return five questions for every three images, shuffled.

    Two of three images get two questions. The second one comes `callers` to twice as many calls
    after the first, so that the first is answered and its image still cached.
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
    images = [image for _, image in sorted(places)]
    return _jobs(ask, images[span : span + ask.total])


WORKLOADS: dict[str, Callable[[Ask], list[Job]]] = {"new": new, "mix": mix, "cached": cached}


def _jobs(ask: Ask, images: list[int]) -> list[Job]:
    timed = range(ask.lead, ask.lead + ask.calls)
    return [
        Job(image, QUESTION.format(place % 100), ask.tokens, place in timed)
        for place, image in enumerate(images)
    ]
