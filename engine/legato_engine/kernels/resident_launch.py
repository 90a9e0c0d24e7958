"""What launches of several decode steps for rows that need no host between them read and write.

Shape legend: B rows of a launch, R rows of the state, M pages of a row, C constraints, V
vocabulary, S steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from legato_engine.kernels.accelerated import RowTensors
from legato_engine.kernels.cuda.drafting import DraftTensors
from legato_engine.kernels.resident_builds import Build, Kind


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ResidentDrafts:
    """Speculation of a launch whose first tokens are placed, at fixed addresses.

    Staged fields of tokens and of rows, the draft `state`, the policy's constants and step costs
    (`DraftKernels`), a step's `outputs` by row of the launch and the same fields of the host's
    `ring`, and how many tokens a lookup matches at least and at most.
    """

    staged: Mapping[str, torch.Tensor]
    state: DraftTensors
    rules: torch.Tensor
    seconds_P: torch.Tensor
    outputs: Mapping[str, torch.Tensor]
    ring: Mapping[str, torch.Tensor]
    lengths: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ResidentRows:
    """What steps read and write at fixed addresses, int64 but for sampling's numbers.

    By row of a launch: its row of the state, its constraint, and the positions of the first step.
    `successor_C2` and `words` [2] are those of `kernels.decode_loop`; `ring_SB` is its ring's
    tokens, beside which are float32 values and their certainties.
    """

    row_B: torch.Tensor
    constraint_B: torch.Tensor
    position_B: torch.Tensor
    sample_position_B: torch.Tensor
    state: RowTensors
    page_table_RM: torch.Tensor
    constraints_CV: torch.Tensor
    successor_C2: torch.Tensor
    ring_SB: torch.Tensor
    payload_SB2: torch.Tensor
    certainty_SB2: torch.Tensor
    words: torch.Tensor
    drafts: ResidentDrafts | None = None


class ResidentSteps(Protocol):
    """Launches of several steps. Every step's control is `kernels.decode_loop.control_step`'s, or
    with drafts `control_drafting_step`'s.
    """

    @property
    def most_rows(self) -> Mapping[Kind, int]:
        """Of the launches that it takes, as `Kind.counts_as` has them."""
        ...

    def run(
        self,
        rows: ResidentRows,
        num_rows: int,
        num_steps: int,
        *,
        payload: bool = False,
        num_tokens: int = 0,
    ) -> None:
        """Enqueue at most `num_steps` steps of the first `num_rows` rows, with drafts of up to
        `num_tokens` tokens each.

        Values are not written where they are not asked for (`payload`).
        """
        ...

    def fault(self) -> str | None:
        """The wait that a launch which is over gave up; no launch may follow it.

        Its last step that the ring counts is whole: tokens, keys, values and rows' newest tokens.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ResidentOffer:
    """Launches of the kernel that a model can have on its device.

    `subject`: what their times depend on, by name. `make` compiles some of the `builds`, and packs
    a second copy of the weights.
    """

    subject: Mapping[str, str]
    builds: tuple[Build, ...]
    make: Callable[[Collection[Build]], ResidentSteps]
