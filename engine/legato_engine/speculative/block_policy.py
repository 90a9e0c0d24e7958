"""Block size policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from legato_engine.speculative.float32 import f32

INITIAL_RATE = f32(0.8)
"""Before a request's first verification."""

ALPHA = 0.2
"""Weight of the newest verification in a request's average."""

PRESSURE_RATIO = 0.85
"""Share of the page pool in use above which it is under pressure."""


class BlockState(Protocol):
    """What a request's block size is chosen from."""

    ema_acceptance_rate: float  # float32, as on the device
    accepted_weight: float
    tried_weight: float
    current_block_size: int

    @property
    def block_size_history(self) -> Sequence[int]: ...

    @property
    def num_left(self) -> int: ...

    @property
    def under_pressure(self) -> bool: ...


class BlockPolicy(Protocol):
    """Chooses each request's block size, at most `max_block`."""

    @property
    def max_block(self) -> int: ...

    def begin(self, request: BlockState) -> None:
        """Prepare a request's first proposal, also after a preemption."""
        ...

    def update(self, request: BlockState, accepted: int, proposed: int) -> None: ...

    def allot(self, requests: Sequence[BlockState]) -> None:
        """Revise the block sizes of requests that propose together."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class FixedBlockPolicy:
    """A constant block size. The average is kept for the eviction of pages."""

    block_size: int

    @property
    def max_block(self) -> int:
        return self.block_size

    def begin(self, request: BlockState) -> None:
        request.current_block_size = self.block_size

    def update(self, request: BlockState, accepted: int, proposed: int) -> None:
        update_average(ALPHA, request, accepted, proposed)

    def allot(self, requests: Sequence[BlockState]) -> None:
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptiveBlockPolicy:
    """The seed's rule: one of three sizes by a moving average."""

    first_block: int = 4
    min_block: int = 1
    mid_block: int = 4
    max_block: int = 8
    pressure_block: int = 2
    alpha: float = ALPHA
    high: float = 0.80
    low: float = 0.50

    def begin(self, request: BlockState) -> None:
        block = self.size(request) if request.block_size_history else self.first_block
        request.current_block_size = self.capped(block, request)

    def update(self, request: BlockState, accepted: int, proposed: int) -> None:
        update_block_size(self, request, accepted, proposed)

    def allot(self, requests: Sequence[BlockState]) -> None:
        """Each request's size depends on that request alone."""

    def size(self, request: BlockState) -> int:
        average = request.ema_acceptance_rate
        if average >= f32(self.high):
            block = self.max_block
        elif average >= f32(self.low):
            block = self.mid_block
        else:
            block = self.min_block
        return self.capped(block, request)

    def capped(self, block: int, request: BlockState) -> int:
        return min(block, self.pressure_block) if request.under_pressure else block


def update_block_size(
    policy: AdaptiveBlockPolicy, request: BlockState, accepted: int, proposed: int
) -> None:
    """Update a request's average with one verification, then its block size.

    The rule follows the seed, although `accepted / proposed` falls as blocks grow: with a share `a`
    of the tokens right, `(a + a^2 + ... + a^B) / B` of a block of B are accepted.
    """
    update_average(policy.alpha, request, accepted, proposed)
    request.current_block_size = policy.size(request)


def update_average(alpha: float, request: BlockState, accepted: int, proposed: int) -> None:
    """Update a request's average acceptance with one verification."""
    assert 0 <= accepted <= proposed, f"{accepted} of {proposed} tokens accepted"
    rate = f32(accepted / proposed) if proposed else 0.0
    newest = f32(alpha)
    kept = f32(f32(1.0 - newest) * request.ema_acceptance_rate)
    request.ema_acceptance_rate = f32(f32(newest * rate) + kept)
