"""What it takes to find a model, and what is found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from legato_engine.models.frontend import ModelFrontend

if TYPE_CHECKING:
    import torch  # only `load` needs it, and only when called

    from legato_engine.models.checkpoint import Progress
    from legato_engine.models.model import Model


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """The name that was asked for and where its files are; what is empty is the family's choice.

    `max_context` 0 leaves the positions of a sequence to the family, too.
    """

    name: str
    weights: str = ""
    tokenizer: str = ""
    random_weights: bool = False
    max_context: int = 0


class ModelBundle(Protocol):
    """A model that is found but not loaded."""

    @property
    def frontend(self) -> ModelFrontend:
        """Its half without a device."""
        ...

    @property
    def adapters(self) -> Path | None:
        """A folder of adapters that came with it."""
        ...

    @property
    def draft(self) -> Path | None:
        """The file of a draft that came with it."""
        ...

    @property
    def max_context(self) -> int:
        """Positions of one sequence, generated ones included."""
        ...

    def load(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        vision_fp8: bool = False,
        kv_dtype: str = "auto",
        memory: int | None = None,
        progress: Progress = lambda fraction: None,
    ) -> Model:
        """The model on a device, its vision tower in fp8 if asked.

        `kv_dtype`: keys and values are stored as `fp8`, as the `model` computes them, or (`auto`)
        as fp8 where the weights have the scales for it. Raises `InvalidField` when the weights do
        not fit the model, or not into `memory` bytes (None: that is not asked), or the device or
        tower cannot be fp8, or scales are missing.
        """
        ...
