"""How many tokens a request proposes next: adaptive speculative block sizing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from legato_engine.speculative.float32 import f32

INITIAL_RATE = f32(0.8)
"""The acceptance rate assumed before a request's first verification."""

PRESSURE_RATIO = 0.85
"""Share of the page pool in use above which it is under pressure."""


class Drafter(Protocol):
    """What a policy knows and decides of a request, in the kernel's descriptor or in the engine."""

    ema_acceptance_rate: float  # float32, as on the device
    accepted_weight: float
    tried_weight: float
    current_block_size: int
    block_size_history: list[int]

    @property
    def num_left(self) -> int:
        """Tokens it may still generate."""
        ...

    @property
    def under_pressure(self) -> bool:
        """Whether the pool was nearly full when it was last looked at."""
        ...


class BlockPolicy(Protocol):
    """Decides `current_block_size` of each request, from what its verifies gave."""

    def begin(self, request: Drafter) -> None:
        """It is about to propose for the first time, or again after a preemption."""
        ...

    def update(self, request: Drafter, accepted: int, proposed: int) -> None:
        """It proposed `proposed` tokens, of which the first `accepted` were right."""
        ...

    def allot(self, requests: Sequence[Drafter]) -> None:
        """These are about to propose; a policy may weigh them against each other."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class FixedBlockPolicy:
    """Always the same block."""

    block_size: int

    def begin(self, request: Drafter) -> None:
        """Propose `block_size`."""
        request.current_block_size = self.block_size

    def update(self, request: Drafter, accepted: int, proposed: int) -> None:
        """Nothing is learnt."""

    def allot(self, requests: Sequence[Drafter]) -> None:
        """Nothing is weighed."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptiveBlockPolicy:
    """The seed's rule: a moving average of the share accepted chooses one of three sizes.

    `first_block` is proposed before anything is known. Under KV pressure no more than
    `pressure_block` is proposed.
    """

    first_block: int = 4
    min_block: int = 1
    mid_block: int = 4
    max_block: int = 8
    pressure_block: int = 2
    alpha: float = 0.2
    high: float = 0.80
    low: float = 0.50

    def begin(self, request: Drafter) -> None:
        """What the launch says, under the cap; a request that comes back keeps what it learnt."""
        block = self.size(request) if request.block_size_history else self.first_block
        request.current_block_size = self.capped(block, request)

    def update(self, request: Drafter, accepted: int, proposed: int) -> None:
        """As `update_block_size`."""
        update_block_size(self, request, accepted, proposed)

    def allot(self, requests: Sequence[Drafter]) -> None:
        """Each request decides for itself."""

    def size(self, request: Drafter) -> int:
        """The block for the request's average and flags as they are."""
        average = request.ema_acceptance_rate
        if average >= f32(self.high):
            block = self.max_block
        elif average >= f32(self.low):
            block = self.mid_block
        else:
            block = self.min_block
        return self.capped(block, request)

    def capped(self, block: int, request: Drafter) -> int:
        """`block`, or less under pressure."""
        return min(block, self.pressure_block) if request.under_pressure else block


def update_block_size(
    policy: AdaptiveBlockPolicy, request: Drafter, accepted: int, proposed: int
) -> None:
    """Learn from one verify and choose the next block; touches nothing but the request.

    `accepted / proposed` falls as the block grows: with a share `a` of the tokens right, a block of
    B is accepted for `(a + a^2 + ... + a^B) / B` of its length. The rule is the seed's all the
    same.
    """
    assert 0 <= accepted <= proposed, f"{accepted} of {proposed} accepted"
    rate = f32(accepted / proposed) if proposed else 0.0
    alpha = f32(policy.alpha)
    kept = f32(f32(1.0 - alpha) * request.ema_acceptance_rate)
    request.ema_acceptance_rate = f32(f32(alpha * rate) + kept)
    request.current_block_size = policy.size(request)
