"""A decode step as CUDA kernels, and its inputs.

Shape legend: B tokens, R rows, M pages of a row, D text width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from legato_engine.kernels.accelerated import RowTensors, SampledTokens
    from legato_engine.kernels.resident_launch import ResidentOffer
    from legato_engine.speculative.block_policy import BlockPolicy


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """B tokens of a step at fixed addresses, int64 but for payloads.

    Token b is `token_R[source_B[b]]`, the newest sampled token of that row, with its payload; with
    source -1 it is `prompt_token_B[b]`. `row_B`: rows of the page table. `fresh_B`: the first
    position of its sequence that this step writes; above its position for a padding token, whose
    results are undefined. `adapter_slot_R` None: no row has an adapter.

    Adjacent tokens of one row form groups that read keys and values once. The step is laid out for
    `num_groups` of them, which affects only speed.
    """

    source_B: torch.Tensor
    row_B: torch.Tensor
    position_B: torch.Tensor
    fresh_B: torch.Tensor
    prompt_token_B: torch.Tensor
    prompt_payload_B2: torch.Tensor
    token_R: torch.Tensor
    payload_R2: torch.Tensor
    page_table_RM: torch.Tensor
    adapter_slot_R: torch.Tensor | None = None
    num_groups: int = 1 << 30

    def part(self, of: slice) -> StepInputs:
        return dataclasses.replace(
            self,
            source_B=self.source_B[of],
            row_B=self.row_B[of],
            position_B=self.position_B[of],
            fresh_B=self.fresh_B[of],
            prompt_token_B=self.prompt_token_B[of],
            prompt_payload_B2=self.prompt_payload_B2[of],
        )


class StepKernels(Protocol):
    """A whole decode step as a few kernels, over fixed addresses.

    A token's bits do not depend on the batch. Steps share scratch memory, so two must not run at
    the same time.
    """

    def forward(
        self, inputs: StepInputs, hidden_BD: torch.Tensor, logits_BV: torch.Tensor | None
    ) -> None:
        """Fill the final residual stream and the float32 logits, if given; write K and V."""
        ...

    def values(self, state: RowTensors, sampled: SampledTokens) -> None:
        """Write the tokens' payloads, also to their rows' state, and their certainties."""
        ...

    def resident(self, max_rows: int, policy: BlockPolicy | None = None) -> ResidentOffer | str:
        """Offer launches of several steps of up to `max_rows` rows, which draft by a `policy` if
        there is one, or say why there are none.
        """
        ...
