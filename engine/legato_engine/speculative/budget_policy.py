"""Block sizes beyond the seed: by what a token more is worth to the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from legato_engine.speculative.block_policy import Drafter
from legato_engine.speculative.costs import CostTable

PRIOR_RATE = 0.8
_PRIOR_WEIGHT = 16.0
_LONGER = 1.02  # a step less longer than that is as long


@dataclasses.dataclass(slots=True)
class Experience:
    """How the proposals of all requests so far have fared, in tokens; older ones count less."""

    accepted_weight: float = PRIOR_RATE * _PRIOR_WEIGHT
    tried_weight: float = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        """Of the tokens tried, the share accepted."""
        return self.accepted_weight / self.tried_weight


@dataclasses.dataclass(frozen=True, slots=True)
class TokenBudgetPolicy:
    """Proposes as long as a proposed token brings the batch more than it costs.

    What a request is believed to accept is estimated per token: a verify that accepted `n` and then
    met a wrong one tried `n + 1` tokens, whatever the block was, and older verifies count `decay`
    times less with each new one. A new request is believed to do as `everyone` does, to the weight
    of `prior_weight` tokens. The i-th token of a block with rate `a` stands with `a ** i`. Tokens
    are given out, the likeliest first, up to where tokens committed a second are most.

    Who gets none is in tier 0: it decodes plainly, and proposes one token after `probe_every` steps
    to see whether that has changed.
    """

    costs: CostTable
    max_block: int = 8
    pressure_block: int = 2
    decay: float = 0.97
    prior_weight: float = 8.0  # tokens
    common_decay: float = 0.999
    probe_every: int = 32  # steps
    worth: float = 0.01  # more, that a longer step has to bring
    everyone: Experience = dataclasses.field(default_factory=Experience)
    _steps: dict[int, float] = dataclasses.field(default_factory=dict, init=False, compare=False)

    def begin(self, request: Drafter) -> None:
        """Believe what the others did, unless it has been here before."""
        if request.tried_weight == 0.0:
            request.tried_weight = self.prior_weight
            request.accepted_weight = self.everyone.rate * self.prior_weight

    def update(self, request: Drafter, accepted: int, proposed: int) -> None:
        """Learn from the tokens that were tried: those accepted, and the first wrong one."""
        if proposed == 0:
            return
        tried = accepted + (accepted < proposed)
        request.accepted_weight = self.decay * request.accepted_weight + accepted
        request.tried_weight = self.decay * request.tried_weight + tried
        request.ema_acceptance_rate = request.accepted_weight / request.tried_weight
        common = self.everyone
        common.accepted_weight = self.common_decay * common.accepted_weight + accepted
        common.tried_weight = self.common_decay * common.tried_weight + tried

    def allot(self, requests: Sequence[Drafter]) -> None:
        """Give every request its block for the coming verify."""
        gains: list[tuple[float, int, int]] = []
        for index, request in enumerate(requests):
            rate, stands = _rate(request), 1.0
            for depth in range(1, self._limit(request) + 1):
                stands *= rate
                gains.append((-stands, depth, index))
        gains.sort()
        blocks = [0] * len(requests)
        for _, _, index in gains[: self._best_count(len(requests), gains)]:
            blocks[index] += 1
        for request, block in zip(requests, blocks, strict=True):
            request.current_block_size = block or self._probe(request)

    def _best_count(self, num_rows: int, gains: Sequence[tuple[float, int, int]]) -> int:
        """How many of these tokens, the likeliest first, make tokens a second the most.

        Of steps that are as good within `worth`, the shorter one: what is known of the rates is no
        surer than that, and a token waits for its whole step.
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
            if speed > (best * better if seconds > best_seconds * _LONGER else best):
                best, best_seconds, best_count = speed, seconds, count
        return best_count

    def _step(self, positions: int) -> float:
        """As `costs` says, which is asked for the same few hundred numbers in every step."""
        seconds = self._steps.get(positions)
        if seconds is None:
            seconds = self._steps[positions] = self.costs.step(positions)
        return seconds

    def _limit(self, request: Drafter) -> int:
        most = self.pressure_block if request.under_pressure else self.max_block
        return max(0, min(most, request.num_left - 1))

    def _probe(self, request: Drafter) -> int:
        """One token for who has not proposed for long."""
        recent = request.block_size_history[-self.probe_every :]
        return int(len(recent) == self.probe_every and not any(recent))


def _rate(request: Drafter) -> float:
    return request.accepted_weight / request.tried_weight
