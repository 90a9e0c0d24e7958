"""Block size policies of speculative decoding and their costs.

A double holds a sum, product or quotient of two float32 values to more than twice their precision,
so rounding it gives the result of `__fadd_rn`, `__fmul_rn` and `__fdiv_rn`. The device compiler
must not fuse these operations.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
import struct
from collections import abc
from collections.abc import Sequence as Many
from typing import Protocol, TypeAlias

from legato_engine.config import SPECULATION_OFF, max_block_size
from legato_engine.sequence import RowTokens, Sequence

_FLOAT = struct.Struct("f")


def f32(value: float) -> float:
    rounded: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    return rounded


# ---------------------------------------------------------------- costs

_COUNT = operator.itemgetter(0)


@dataclasses.dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one step by the number of positions in its forward.

    `steps` are measured (positions, seconds), interpolated linearly and extrapolated from the last
    two. `prefill` is the cost of one prompt position, `propose` that of one more token in the
    longest block, because a proposer drafts one token at a time for all rows.
    """

    steps: tuple[tuple[int, float], ...]
    prefill: float
    propose: float = 0.0

    def step(self, positions: int) -> float:
        if positions == 0:
            return 0.0
        right = bisect.bisect_left(self.steps, positions, key=_COUNT)
        right = min(max(right, 1), len(self.steps) - 1)
        (x0, y0), (x1, y1) = self.steps[right - 1], self.steps[right]
        if positions <= x0 and right == 1:
            return y0
        return y0 + (y1 - y0) * (positions - x0) / (x1 - x0)


NO_COSTS = CostTable(steps=((1, 1.0), (2, 2.0)), prefill=0.0)
"""Cost table to use before any step is timed."""


# ---------------------------------------------------------------- block policy

INITIAL_RATE = f32(0.8)
"""Before a request's first verification."""

ALPHA = 0.2
"""Weight of the newest verification in a request's average."""

PRESSURE_RATIO = 0.85
"""Fraction of the page pool in use above which it is under pressure."""


class BlockState(Protocol):
    """Inputs of a block size policy."""

    ema_acceptance_rate: float  # float32, as on the device
    accepted_weight: float
    tried_weight: float
    current_block_size: int

    @property
    def block_size_history(self) -> abc.Sequence[int]: ...

    @property
    def num_left(self) -> int: ...

    @property
    def under_pressure(self) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class FixedBlockPolicy:
    """Policy with a constant block size; the average only ranks pages for eviction."""

    block_size: int

    @property
    def max_block(self) -> int:
        return self.block_size

    def begin(self, request: BlockState) -> None:
        request.current_block_size = self.block_size

    def update(self, request: BlockState, accepted: int, proposed: int) -> None:
        update_average(ALPHA, request, accepted, proposed)

    def allot(self, requests: abc.Sequence[BlockState]) -> None:
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptiveBlockPolicy:
    """Seed policy: one of three block sizes by a moving average."""

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
        """Update a request's average with one verification, then its block size.

        The rule follows the seed, although `accepted / proposed` falls as blocks grow: with a share
        `a` of the tokens right, `(a + a^2 + ... + a^B) / B` of a block of B are accepted.
        """
        update_average(self.alpha, request, accepted, proposed)
        request.current_block_size = self.size(request)

    def allot(self, requests: abc.Sequence[BlockState]) -> None:
        """Do nothing: each request's size depends on that request alone."""

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


def update_average(alpha: float, request: BlockState, accepted: int, proposed: int) -> None:
    """Update a request's average acceptance with one verification."""
    assert 0 <= accepted <= proposed, f"{accepted} of {proposed} tokens accepted"
    rate = f32(accepted / proposed) if proposed else 0.0
    newest = f32(alpha)
    kept = f32(f32(1.0 - newest) * request.ema_acceptance_rate)
    request.ema_acceptance_rate = f32(f32(newest * rate) + kept)


# ---------------------------------------------------------------- budget policy

PRIOR_RATE = 0.8
_PRIOR_WEIGHT = 16.0
PROBE_EVERY = 32
LONGER = 1.02
"""Steps within this factor count as equally long."""


@dataclasses.dataclass(slots=True)
class AcceptanceCounts:
    """Token counts of all requests, decayed by age."""

    accepted_weight: float = PRIOR_RATE * _PRIOR_WEIGHT
    tried_weight: float = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self.accepted_weight / self.tried_weight


@dataclasses.dataclass(frozen=True, slots=True)
class TokenBudgetPolicy:
    """Policy that proposes a token while it is expected to gain the batch more than it costs.

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
    worth: float = 0.01  # minimum relative gain that justifies a longer step
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

    def allot(self, requests: abc.Sequence[BlockState]) -> None:
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

    def _best_count(self, num_rows: int, gains: abc.Sequence[tuple[float, int, int]]) -> int:
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


BlockPolicy: TypeAlias = FixedBlockPolicy | AdaptiveBlockPolicy | TokenBudgetPolicy
"""Chooses each request's block size, at most `max_block`.

`begin` prepares a request's first proposal, also after a preemption, `update` learns from a
verification, and `allot` revises the block sizes of requests that propose together.
"""


# ---------------------------------------------------------------- block sizes


class BlockSizes:
    """Upper bounds of the tokens that the device drafts for each sequence, by a block policy.

    The device decides from the results of the previous launch, which the host has not read.
    """

    def __init__(self, policy: BlockPolicy) -> None:
        self._policy = policy

    @property
    def max_block(self) -> int:
        return self._policy.max_block

    def allot(self, sequences: Many[Sequence], *, under_pressure: bool) -> list[int]:
        """Return the maximum draft tokens of each sequence; there is at least one.

        The plan must be launched. Under pressure the budget caps this launch's block, the adaptive
        rule the next one's.
        """
        policy, most = self._policy, self._policy.max_block
        if isinstance(policy, FixedBlockPolicy):
            return [most] * len(sequences)
        few = min(policy.pressure_block, most)
        if isinstance(policy, TokenBudgetPolicy):
            return [few if under_pressure else most] * len(sequences)
        bounds = []
        for sequence in sequences:
            was_under_pressure = sequence.draft_stats.under_pressure
            bounds.append(few if was_under_pressure and under_pressure else most)
            sequence.draft_stats.under_pressure = under_pressure
        return bounds

    def learn(self, sequence: Sequence, output: RowTokens) -> None:
        """Keep what a committed launch says of a sequence."""
        sequence.draft_stats.block_size_history.append(output.num_drafted)
        sequence.draft_stats.learnt = output.learnt


def block_policy(setting: str) -> BlockPolicy | None:
    """Return the policy of a `--speculation` setting; `budget` has no costs yet.

    Raises:
        InvalidField: the setting is unknown.
    """
    block = max_block_size(setting)
    if setting == SPECULATION_OFF:
        return None
    if setting == "seed":
        return AdaptiveBlockPolicy(max_block=block)
    if setting == "budget":
        return TokenBudgetPolicy(NO_COSTS, max_block=block)
    return FixedBlockPolicy(block)


def block_sizes(setting: str) -> BlockSizes | None:
    """Return the block sizes of a `--speculation` setting; raise as `block_policy`."""
    policy = block_policy(setting)
    return None if policy is None else BlockSizes(policy)
