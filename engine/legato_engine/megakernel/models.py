"""The simulated target and its proposers, as pure functions of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from legato_engine.megakernel.descriptor import RequestDescriptor

VOCABULARY = 50_000
STOP_TOKEN = 0
CONTEXT = 4
"""Preceding tokens that a next token depends on, so that a wrong page is noticed."""


_MASK = 2**64 - 1


def _draw(*numbers: int) -> int:
    """32 pseudo-random bits from numbers (SplitMix64, folded)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        mixed ^= mixed >> 31
    return mixed >> 32


def next_token(seed: int, position: int, context: Sequence[int]) -> int:
    """The target's token for `position` after `context`, keyed by seed and position."""
    return 1 + _draw(seed, position, *context[-CONTEXT:]) % (VOCABULARY - 1)


class Proposer(Protocol):
    """Proposes draft tokens."""

    def propose(self, request: RequestDescriptor, count: int) -> tuple[int, ...]:
        """At most `count` tokens after the committed ones."""
        ...


AcceptanceProfile = Callable[[RequestDescriptor, int], float]
"""The probability that the draft token at a position is right."""


class SyntheticProposer:
    """A proposer that knows the target's tokens and is right with the profile's probability.

    The outcome is drawn from request and position, so it does not depend on block sizes.
    """

    def __init__(self, profile: AcceptanceProfile) -> None:
        self._profile = profile

    def propose(self, request: RequestDescriptor, count: int) -> tuple[int, ...]:
        """Exactly `count` tokens; more follow the first wrong one."""
        tokens = list(request.tokens[-CONTEXT:])
        proposed: list[int] = []
        first = len(request.tokens)
        for position in range(first, first + count):
            right = next_token(request.seed, position, tokens)
            luck = _draw(request.seed, position, request.request_id, -1) / 2**32
            token = right if luck < self._profile(request, position) else right + 1
            proposed.append(token)
            tokens.append(token)
        return tuple(proposed)


class LookupProposer:
    """Prompt lookup: the tokens after the latest earlier occurrence of the last `order` tokens."""

    def __init__(self, order: int = 2) -> None:
        self._order = order

    def propose(self, request: RequestDescriptor, count: int) -> tuple[int, ...]:
        """The tokens after that occurrence, if there is one."""
        tokens, order = request.tokens, self._order
        tail = tokens[-order:]
        for start in range(len(tokens) - order - 1, -1, -1):
            if tokens[start : start + order] == tail:
                return tuple(tokens[start + order : start + order + count])
        return ()
