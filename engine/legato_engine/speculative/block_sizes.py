"""Block policies applied to the engine's sequences."""

from __future__ import annotations

from collections.abc import Sequence as Many

from legato_engine.config import SPECULATION_OFF, max_block_size
from legato_engine.scheduler.runner import RowTokens
from legato_engine.sequence import DraftStats, Sequence
from legato_engine.speculative.block_policy import (
    AdaptiveBlockPolicy,
    BlockPolicy,
    FixedBlockPolicy,
)
from legato_engine.speculative.budget_policy import TokenBudgetPolicy
from legato_engine.speculative.costs import NO_COSTS, CostTable


class PolicyBlockSizes:
    """A `scheduler.block_sizes.BlockSizes` of a block policy that the device follows."""

    def __init__(self, policy: BlockPolicy) -> None:
        self._policy = policy

    def allot(self, sequences: Many[Sequence], *, under_pressure: bool) -> list[int]:
        """Under pressure the budget caps the launch's block, the adaptive rule the one after it."""
        policy, most = self._policy, self._policy.max_block
        if isinstance(policy, FixedBlockPolicy):
            return [most] * len(sequences)
        assert isinstance(policy, AdaptiveBlockPolicy | TokenBudgetPolicy)
        few = min(policy.pressure_block, most)
        if isinstance(policy, TokenBudgetPolicy):
            return [few if under_pressure else most] * len(sequences)
        bounds = []
        for sequence in sequences:
            stats = sequence.draft_stats
            if stats is None:
                stats = sequence.draft_stats = DraftStats()
                stats.under_pressure = under_pressure
            bounds.append(few if stats.under_pressure and under_pressure else most)
            stats.under_pressure = under_pressure
        return bounds

    def learn(self, sequence: Sequence, output: RowTokens) -> None:
        stats = sequence.draft_stats
        if stats is None:
            stats = sequence.draft_stats = DraftStats()
        stats.block_size_history.append(output.num_drafted)
        stats.learnt = output.learnt


def block_policy(setting: str, costs: CostTable = NO_COSTS) -> BlockPolicy | None:
    """The policy of a `--speculation` setting; `budget` goes by `costs`.

    Raises:
        InvalidField: the setting is unknown.
    """
    block = max_block_size(setting)
    if setting == SPECULATION_OFF:
        return None
    if setting == "seed":
        return AdaptiveBlockPolicy(max_block=block)
    if setting == "budget":
        return TokenBudgetPolicy(costs, max_block=block)
    return FixedBlockPolicy(block)


def block_sizes(setting: str) -> PolicyBlockSizes | None:
    """The bounds of a `--speculation` setting.

    Raises:
        InvalidField: the setting is unknown.
    """
    policy = block_policy(setting)
    return None if policy is None else PolicyBlockSizes(policy)
