"""Speculation around a forward on the current GPU, one launch each.

Shape legend: R rows of the state, S rows of a launch, B tokens, K draft tokens, C positions, D
width, P positions of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch

from legato_engine.kernels.cuda.attention import GROUP
from legato_engine.kernels.cuda.module import Module
from legato_engine.kernels.proposer import RowHistory
from legato_engine.speculation import (
    LONGER,
    NO_COSTS,
    AdaptiveBlockPolicy,
    BlockPolicy,
    FixedBlockPolicy,
    TokenBudgetPolicy,
    f32,
)

SOURCE = "draft_tokens.cu"
LOOKUP_SOURCE = "ngram_lookup.cu"
_SETTLE_THREADS = 128
_ALLOT_THREADS = 256
_LOOKUP_THREADS = 256
_VECTOR_BYTES = 16
_AUCTION_BYTES = 36
"""Of one draft token, in shared memory."""


class DraftTensors(Protocol):
    """Draft state on the device; int64 but for residual streams and what is said.

    `descriptor_R4`: `RequestDescriptor` of `block_policy.cuh`. `overall`: float64 [2], accepted and
    tried tokens of all requests. `proposal` and `choice`: int32 [1]. `block_S`: by row of a launch.
    """

    tokens_RC: torch.Tensor
    position_R: torch.Tensor
    limit_R: torch.Tensor
    draft_RK: torch.Tensor
    hidden_RD: torch.Tensor
    descriptor_R4: torch.Tensor
    overall: torch.Tensor
    block_S: torch.Tensor
    proposal: torch.Tensor
    choice: torch.Tensor
    scratch_row: int


@dataclasses.dataclass(frozen=True, slots=True)
class RuleConstants:
    """A block policy as the kernels' constants; those of other policies are unused."""

    defines: Mapping[str, int]
    values: tuple[float, ...]  # `Rule` of `block_policy.cuh`

    @classmethod
    def of(cls, policy: BlockPolicy) -> RuleConstants:
        seed, budget = AdaptiveBlockPolicy(), TokenBudgetPolicy(NO_COSTS)
        match policy:
            case FixedBlockPolicy():
                kind, block = 0, policy.block_size
            case AdaptiveBlockPolicy():
                kind, block, seed = 1, policy.max_block, policy
            case TokenBudgetPolicy():
                kind, block, budget = 2, policy.max_block, policy
            case _:
                raise AssertionError(f"no kernel for {policy}")
        pressed = budget.pressure_block if kind == 2 else seed.pressure_block
        defines = {
            "RULE": kind,
            "MOST_DRAFTS": block,
            "FIRST_BLOCK": seed.first_block,
            "MIN_BLOCK": seed.min_block,
            "MID_BLOCK": seed.mid_block,
            "PRESSURE_BLOCK": pressed,
            "PROBE_EVERY": budget.probe_every,
        }
        alpha = f32(seed.alpha)
        values = (
            *(alpha, f32(1.0 - alpha), f32(seed.high), f32(seed.low)),
            *(budget.decay, budget.prior_weight, budget.common_decay, 1.0 + budget.worth, LONGER),
            budget.costs.propose,
        )
        return cls(defines, values)


class DraftKernels:
    """The operations of `runtime.draft_state.DraftState`. Can be captured.

    `rules` and `seconds_P` are the policy's constants and the costs of steps on the device.
    """

    def __init__(
        self, policy: BlockPolicy, *, num_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        """Allocate for launches of up to `num_rows` rows."""
        rule = RuleConstants.of(policy)
        defines = {**rule.defines, "ROWS": num_rows, "VOCAB": vocab_size, "GROUP": GROUP}
        module = Module(SOURCE, defines)
        block = rule.defines["MOST_DRAFTS"]
        auction = _AUCTION_BYTES * num_rows * block + _VECTOR_BYTES
        is_budget = isinstance(policy, TokenBudgetPolicy)
        self._allot = module.kernel("allot_blocks", shared=auction if is_budget else 0)
        self._place = module.kernel("place")
        self._settle = module.kernel("settle")
        self.rules = torch.tensor(rule.values, dtype=torch.float64, device=device)
        num_positions = num_rows * (1 + block) + 1
        self.seconds_P = torch.ones(num_positions, dtype=torch.float64, device=device)

    def set_costs(self, policy: TokenBudgetPolicy) -> None:
        """Take the costs of a policy of the same kind; nothing may be in flight."""
        values = RuleConstants.of(policy).values
        self.rules.copy_(torch.tensor(values, dtype=torch.float64))
        seconds = [policy.costs.step(count) for count in range(len(self.seconds_P))]
        self.seconds_P.copy_(torch.tensor(seconds, dtype=torch.float64))

    def allot(
        self,
        state: DraftTensors,
        staged: Mapping[str, torch.Tensor],
        page_table_RM: torch.Tensor,
        proposal_K: torch.Tensor,
    ) -> None:
        fields = [staged[name] for name in ("scheduled_row", "room", "control", "entry", "page")]
        self._allot.launch(
            (1, 1, 1),
            _ALLOT_THREADS,
            [
                *(*fields, page_table_RM, state.position_R, state.limit_R, state.descriptor_R4),
                *(self.rules, state.overall, self.seconds_P, proposal_K),
                *(state.block_S, state.proposal),
                *(len(staged["scheduled_row"]), len(staged["entry"]), state.scratch_row),
            ],
        )

    def place(
        self,
        state: DraftTensors,
        staged: Mapping[str, torch.Tensor],
        choice_B3: torch.Tensor,
    ) -> None:
        tokens = ("row", "draft_index", "source", "token", "position", "fresh")
        names = (*tokens, "sample_row", "sample_position", "scheduled", "start", "fed")
        self._place.launch(
            (1, 1, 1),
            _ALLOT_THREADS,
            [
                *(staged["scheduled_row"], staged["control"], state.block_S, state.draft_RK),
                *(state.position_R, state.limit_R, choice_B3),
                *(*(staged[name] for name in names), state.choice),
                *(len(staged["scheduled_row"]), len(staged["row"]), state.scratch_row),
            ],
        )

    def settle(
        self,
        state: DraftTensors,
        staged: Mapping[str, torch.Tensor],
        sampled_B: torch.Tensor,
        hidden_BD: torch.Tensor,
        token_R: torch.Tensor,
        outputs: Mapping[str, torch.Tensor],
        num_rows: int,
    ) -> None:
        """Accept draft tokens that were sampled too, and update the rows' descriptors.

        Rows of D have a multiple of 16 bytes.
        """
        width = hidden_BD.shape[1] * hidden_BD.element_size()
        assert width % _VECTOR_BYTES == 0, f"rows of {width} bytes"
        scheduled = [staged[name] for name in ("scheduled_row", "room", "start", "fed")]
        self._settle.launch(
            (num_rows, 1, 1),
            _SETTLE_THREADS,
            [
                *(*scheduled, state.draft_RK, staged["sample_position"]),
                *(sampled_B, hidden_BD, state.tokens_RC, state.position_R, token_R),
                *(state.hidden_RD, state.descriptor_R4, self.rules, state.overall),
                *(outputs["count"], outputs["proposed"], outputs["descriptor"]),
                *(num_rows, state.tokens_RC.shape[1], width // _VECTOR_BYTES, state.scratch_row),
            ],
        )


class LookupKernel:
    """A `LookupProposer` in one launch; `lengths` are the fewest and the most tokens that match."""

    sequential = False

    def __init__(self, *, shortest: int = 1, longest: int = 4) -> None:
        self.lengths = (shortest, longest)
        self._lookup = Module(LOOKUP_SOURCE, {}).kernel("lookup")

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        rows, context = history.tokens_RC.shape
        self._lookup.launch(
            (rows, 1, 1),
            _LOOKUP_THREADS,
            [
                *(history.tokens_RC, history.position_R, draft_RK),
                *(context, draft_RK.stride(0), draft_RK.shape[1], *self.lengths),
            ],
        )
