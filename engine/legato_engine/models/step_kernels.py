"""A decode step as kernels that a model may have, and what such a step is given.

Shape legend: B tokens of a step, R rows, M pages of a row, D text width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch  # frontends come here by `model`, and never load torch

    from legato_engine.kernels.accelerated import RowTensors


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """B tokens of a step, each in a row of its own or several of one row, at fixed addresses.

    All int64 but payloads (float32). Token b is `token_R[source_B[b]]` with its payload, the last
    that its row sampled; where the source is -1 it is the prompt's, at index b. `row_B` names its
    row of the page table, `fresh_B` the first position of its sequence that this very step writes:
    one behind its own position marks padding, whose results mean nothing.
    `adapter_slot_R` is each row's slot of the bank, None where no row has an adapter.

    Successive tokens of one row form groups that read their keys and values once. `num_groups` is
    how many the step is laid out for: only its speed depends on that.
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
        """Some of the tokens."""
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
    """A whole decode step as a few kernels, for a device that has them; only fixed addresses.

    A token's results have the same bits in every batch. Steps share scratch memory.
    """

    def forward(
        self, inputs: StepInputs, hidden_BD: torch.Tensor, logits_BV: torch.Tensor | None
    ) -> None:
        """Fill the final residual stream and the float32 logits, if wanted; writes K and V."""
        ...

    def payload(
        self,
        state: RowTensors,
        hidden_BD: torch.Tensor,
        token_B: torch.Tensor,
        row_B: torch.Tensor,
        payload_B2: torch.Tensor,
    ) -> None:
        """Write the values that go with sampled tokens, here and in their rows' state."""
        ...
