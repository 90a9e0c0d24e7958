"""Requests that draft in virtual time, and what proposers know of rows."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Sequence

import torch
from legato_engine.kernels.proposer import RowHistory
from legato_engine.speculation import (
    INITIAL_RATE,
    AdaptiveBlockPolicy,
    BlockPolicy,
    CostTable,
)

H200_MOONDREAM2 = CostTable(
    steps=((8, 0.842e-3), (32, 1.05e-3), (64, 1.6e-3), (256, 4.0e-3)), prefill=6e-6
)
"""Steps of Moondream 2's decoder at a context of 850, measured up to 8 positions."""


class Flag(enum.IntFlag):
    """Conditions of a request that a policy reads."""

    NONE = 0
    KV_PRESSURE = 1


@dataclasses.dataclass(slots=True, eq=False)
class RequestDescriptor:
    """A drafting request; the fields below `num_generated` are what policies read and write."""

    request_id: int
    max_tokens: int
    flags: Flag = Flag.NONE
    num_generated: int = 0

    ema_acceptance_rate: float = INITIAL_RATE
    accepted_weight: float = 0.0
    tried_weight: float = 0.0
    current_block_size: int = 0
    block_size_history: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_left(self) -> int:
        return self.max_tokens - self.num_generated

    @property
    def under_pressure(self) -> bool:
        return Flag.KV_PRESSURE in self.flags

    def set_flag(self, flag: Flag, *, on: bool) -> None:
        self.flags = self.flags | flag if on else self.flags & ~flag


class DraftingRun:
    """Decode steps of one batch whose draft tokens are right with each request's own rate.

    `now` is in virtual seconds, by the costs of Moondream 2 on an H200.
    """

    def __init__(
        self,
        requests: Sequence[RequestDescriptor],
        rates: Sequence[float],
        policy: BlockPolicy | None = None,
    ) -> None:
        self.requests = requests
        self.now = 0.0
        self._rates = rates
        self._policy = policy or AdaptiveBlockPolicy()
        self._draws = [random.Random(request.request_id) for request in requests]
        for request in requests:
            self._policy.begin(request)

    def run(self) -> None:
        while self.active():
            self.step()

    def active(self) -> list[RequestDescriptor]:
        return [request for request in self.requests if request.num_left]

    def step(self) -> None:
        """Draft, verify and commit once for every unfinished request."""
        active = self.active()
        self._policy.allot(active)
        blocks = [min(request.current_block_size, request.num_left - 1) for request in active]
        self.now += H200_MOONDREAM2.step(sum(blocks) + len(blocks))
        self.now += H200_MOONDREAM2.propose * max(blocks)
        for request, block in zip(active, blocks, strict=True):
            rate, draw = self._rates[request.request_id % len(self._rates)], self._draws
            accepted = 0
            while accepted < block and draw[request.request_id].random() < rate:
                accepted += 1
            request.num_generated += accepted + 1
            request.block_size_history.append(block)
            self._policy.update(request, accepted, block)


# ---------------------------------------------------------------- histories
# What proposers are told of rows, by hand.


def row_history(tokens_RC, position_R):
    """Rows of which only the tokens are known."""
    rows = len(tokens_RC)
    return RowHistory(
        torch.arange(rows), tokens_RC, position_R, torch.zeros(rows, 1), torch.zeros(rows, 1).long()
    )
