"""A block size policy by the worth of draft tokens to the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from legato_engine.speculative.block_policy import BlockState
from legato_engine.speculative.costs import CostTable

PRIOR_RATE = 0.8
_PRIOR_WEIGHT = 16.0
PROBE_EVERY = 32
LONGER = 1.02
"""Steps within this factor count as equally long."""


@dataclasses.dataclass(slots=True)
class AcceptanceCounts:
    """Tokens of all requests, older ones weighted less."""

    accepted_weight: float = PRIOR_RATE * _PRIOR_WEIGHT
    tried_weight: float = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self.accepted_weight / self.tried_weight


@dataclasses.dataclass(frozen=True, slots=True)
class TokenBudgetPolicy:
    """Proposes a token as long as it is expected to bring the batch more than it costs.

    A verification that accepts n tokens and rejects the next has tried n + 1, whatever the block
    size. A request's acceptance rate is over the tokens it tried, with weights that decay by
    `decay` a verification; it starts from the `overall` rate, weighted like `prior_weight` tokens.
    The i-th token of a block is accepted with probability `rate ** i`. Tokens are given in the
    order of these probabilities, up to the number at which the batch commits most tokens per
    second.

    A request without draft tokens probes with one every `probe_every` steps.
    """

    costs: CostTable
    max_block: int = 8
    pressure_block: int = 2
    decay: float = 0.97
    prior_weight: float = 8.0  # tokens
    common_decay: float = 0.999
    probe_every: int = PROBE_EVERY  # steps
    worth: float = 0.01  # least relative gain that justifies a longer step
    overall: AcceptanceCounts = dataclasses.field(default_factory=AcceptanceCounts)
    _steps: dict[int, float] = dataclasses.field(default_factory=dict, init=False, compare=False)

    def begin(self, request: BlockState) -> None:
        if request.tried_weight == 0.0:
            request.tried_weight = self.prior_weight
            request.accepted_weight = self.overall.rate * self.prior_weight

    def update(self, request: BlockState, accepted: int, proposed: int) -> None:
        if proposed == 0:
            return
        tried = accepted + (accepted < proposed)
        request.accepted_weight = self.decay * request.accepted_weight + accepted
        request.tried_weight = self.decay * request.tried_weight + tried
        request.ema_acceptance_rate = request.accepted_weight / request.tried_weight
        common = self.overall
        common.accepted_weight = self.common_decay * common.accepted_weight + accepted
        common.tried_weight = self.common_decay * common.tried_weight + tried

    def allot(self, requests: Sequence[BlockState]) -> None:
        gains: list[tuple[float, int, int]] = []
        for index, request in enumerate(requests):
            rate, accepted = _rate(request), 1.0
            for depth in range(1, self._limit(request) + 1):
                accepted *= rate
                gains.append((-accepted, depth, index))
        gains.sort()
        blocks = [0] * len(requests)
        for _, _, index in gains[: self._best_count(len(requests), gains)]:
            blocks[index] += 1
        for request, block in zip(requests, blocks, strict=True):
            request.current_block_size = block or self._probe(request)

    def _best_count(self, num_rows: int, gains: Sequence[tuple[float, int, int]]) -> int:
        """Count the draft tokens, likeliest first, that maximise committed tokens per second.

        Among steps that are equal within `worth` the shorter wins: the rates are no more certain,
        and it delivers its tokens earlier.
        """
        committed, longest, best_count = float(num_rows), 0, 0
        best_seconds, propose = self._step(num_rows), self.costs.propose
        best, better = committed / best_seconds, 1.0 + self.worth
        for count, (gain, depth, _) in enumerate(gains, start=1):
            committed -= gain
            if depth > longest:
                longest = depth
            seconds = self._step(num_rows + count) + propose * longest
            speed = committed / seconds
            if speed > (best * better if seconds > best_seconds * LONGER else best):
                best, best_seconds, best_count = speed, seconds, count
        return best_count

    def _step(self, positions: int) -> float:
        seconds = self._steps.get(positions)
        if seconds is None:
            seconds = self._steps[positions] = self.costs.step(positions)
        return seconds

    def _limit(self, request: BlockState) -> int:
        most = self.pressure_block if request.under_pressure else self.max_block
        return max(0, min(most, request.num_left - 1))

    def _probe(self, request: BlockState) -> int:
        recent = request.block_size_history[-self.probe_every :]
        return int(len(recent) == self.probe_every and not any(recent))


def _rate(request: BlockState) -> float:
    return request.accepted_weight / request.tried_weight
