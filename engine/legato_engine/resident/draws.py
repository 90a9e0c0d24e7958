"""How a row's token is drawn by all workers, in the simulator.

The token with the best sum of score and noise among those that are kept: the first ones by falling
score, while the mass before them is at most `top_p` of all and they are fewer than `top_k`. Each
worker weighs a slice of the vocabulary in ranges of distance from the highest score. In the sums of
all slices the row's worker finds the range of the last kept token: ranges before it are kept whole,
those after it not at all. Only if the best token of that range is better than those before it
the scores themselves say whether it is kept, and if not, which is the next best.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from legato_engine.resident.maps import Floats
from legato_engine.resident.sizes import (
    FAR_DIGITS,
    FIRST_DIGITS,
    NEAR_DIGITS,
    NEAR_RANGES,
    RANGES,
    ModelSizes,
)
from legato_engine.resident.weights import Rule, noise_of

Token = tuple[float, float, int]
"""Score with noise, score, and the id's opposite: of equal ones the lowest id is best."""
NO_TOKEN: Token = (-np.inf, -np.inf, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Weighed:
    """Of a slice: mass and count of each range, and the best token of it and all before it."""

    mass: Floats
    count: Floats
    best: tuple[Token, ...]


NOTHING_WEIGHED = Weighed(
    np.full(RANGES, np.nan), np.full(RANGES, np.nan), ((np.nan, np.nan, 0),) * RANGES
)


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnRow:
    """A row's rule, its highest score by the temperature, and each token's noise [V]."""

    rule: Rule
    peak: float
    noise: Floats

    @classmethod
    def of(cls, highest: float, rule: Rule, position: int, vocab_size: int) -> DrawnRow:
        return cls(rule, highest / rule.temperature, noise_of(rule, position, vocab_size))

    def tokens(self, first: int, logits: Floats) -> list[Token]:
        """Of consecutive ids."""
        scores = logits / self.rule.temperature
        totals = scores + self.noise[first : first + len(logits)]
        ids = range(first, first + len(logits))
        return [(*each, -id) for *each, id in zip(totals, scores, ids, strict=True)]

    def range_of(self, token: Token) -> int:
        distance = self.peak - token[1]
        if not np.isfinite(distance):
            return RANGES - 1
        digit = int(distance * FIRST_DIGITS)
        near = NEAR_RANGES * NEAR_DIGITS
        far = NEAR_RANGES + (digit - near) // FAR_DIGITS
        return digit // NEAR_DIGITS if digit < near else min(far, RANGES - 1)

    def mass(self, token: Token) -> float:
        return float(np.exp(token[1] - self.peak))


def own_slice(sizes: ModelSizes, worker: int) -> slice:
    """Whole fours of the vocabulary."""
    length = 4 * -(-sizes.vocab_size // (4 * sizes.num_workers))
    return slice(worker * length, min((worker + 1) * length, sizes.vocab_size))


def weigh(row: DrawnRow, first: int, logits: Floats) -> Weighed:
    mass, count = np.zeros(RANGES), np.zeros(RANGES)
    best = [NO_TOKEN] * RANGES
    for token in row.tokens(first, logits):
        at = row.range_of(token)
        mass[at] += row.mass(token)
        count[at] += 1
        best[at:] = [max(each, token) for each in best[at:]]
    return Weighed(mass, count, tuple(best))


def choose(row: DrawnRow, weighed: list[Weighed], logits: Floats) -> int:
    """From what all workers weighed, and the row's logits [V]."""
    mass, count = (sum(getattr(each, name) for each in weighed) for name in ("mass", "count"))
    limit = row.rule.top_p * mass.sum()
    most = row.rule.top_k or len(logits)
    masses, counts = np.cumsum(mass) - mass, np.cumsum(count) - count
    (begun,) = ((count > 0) & (masses <= limit) & (counts < most)).nonzero()
    if not len(begun):
        return -1
    last = int(begun[-1])
    below = NO_TOKEN if last == 0 else max(each.best[last - 1] for each in weighed)
    best = max(each.best[last] for each in weighed)
    rivals = [token for token in row.tokens(0, logits) if row.range_of(token) == last]
    while best > below:
        before = [token for token in rivals if token[1:] > best[1:]]
        reached = masses[last] + sum(map(row.mass, before))
        if reached <= limit and counts[last] + len(before) < most:
            return -best[2]
        best = max([below, *before])
    return -below[2]
