"""Block policies applied to the engine's sequences."""

from __future__ import annotations

from collections.abc import Sequence as Many

from legato_engine.config import SPECULATION_OFF, max_block_size
from legato_engine.sequence import DraftStats, Sequence
from legato_engine.speculative.block_policy import (
    INITIAL_RATE,
    PRESSURE_RATIO,
    AdaptiveBlockPolicy,
    BlockPolicy,
    FixedBlockPolicy,
)
from legato_engine.speculative.budget_policy import TokenBudgetPolicy
from legato_engine.speculative.costs import CostTable


class PolicyBlockSizes:
    """A `scheduler.block_sizes.BlockSizes` over a block policy.

    A sequence's policy state is kept with the sequence. Pressure is read when a launch is planned;
    accepted tokens are learnt from when it is committed.
    """

    def __init__(self, policy: BlockPolicy) -> None:
        self._policy = policy

    def allot(self, sequences: Many[Sequence], *, kv_use: float) -> list[int]:
        """See `BlockSizes`."""
        records = [self._record(sequence, kv_use > PRESSURE_RATIO) for sequence in sequences]
        self._policy.allot(records)
        return [record.current_block_size for record in records]

    def learn(self, sequence: Sequence, num_accepted: int, num_drafted: int) -> None:
        """See `BlockSizes`."""
        record = sequence.draft_stats
        assert record is not None, f"sequence {sequence.seq_id} drafted without being planned to"
        record.block_size_history.append(num_drafted)
        self._policy.update(record, num_accepted, num_drafted)

    def _record(self, sequence: Sequence, under_pressure: bool) -> DraftStats:
        record = sequence.draft_stats
        is_first = record is None
        if record is None:
            record = sequence.draft_stats = DraftStats(ema_acceptance_rate=INITIAL_RATE)
        record.under_pressure = under_pressure
        record.num_left = sequence.task.max_tokens - sequence.progress.num_launched
        if is_first:
            self._policy.begin(record)
        return record


def block_sizes(setting: str, costs: CostTable | None) -> PolicyBlockSizes | None:
    """Return the block sizes for a `--speculation` setting, None for `off`.

    `costs` are required by `budget`, which weighs draft tokens by them.

    Raises:
        InvalidField: the setting is unknown, see `max_block_size`.
    """
    block = max_block_size(setting)
    if setting == SPECULATION_OFF:
        return None
    if setting == "seed":
        return PolicyBlockSizes(AdaptiveBlockPolicy(max_block=block))
    if setting == "budget":
        assert costs is not None, "the budget policy needs the costs of steps"
        return PolicyBlockSizes(TokenBudgetPolicy(costs, max_block=block))
    return PolicyBlockSizes(FixedBlockPolicy(block))
