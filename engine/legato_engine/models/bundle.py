"""Models that are found but not loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from legato_engine.models.frontend import ModelFrontend

if TYPE_CHECKING:
    import torch  # loaded by `load` alone

    from legato_engine.models.checkpoint import Progress
    from legato_engine.models.model import Model


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's name and files; the family chooses what is empty or 0."""

    name: str
    weights: str = ""
    tokenizer: str = ""
    random_weights: bool = False
    max_context: int = 0


class ModelBundle(Protocol):
    """A model whose configuration is read and whose weights are not."""

    @property
    def frontend(self) -> ModelFrontend: ...

    @property
    def adapters(self) -> Path | None:
        """A folder beside the weights."""
        ...

    @property
    def draft(self) -> Path | None:
        """A file beside the weights."""
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
        weight_dtype: str = "auto",
        cpu_kernels: str = "auto",
        memory: int | None = None,
        progress: Progress = lambda fraction: None,
    ) -> Model:
        """Load the weights, with `vision_fp8` those of the vision encoder in fp8.

        `kv_dtype`: keys and values as `fp8`, in the dtype of the `model`, or (`auto`) as fp8 if the
        weights have scales. `weight_dtype`, on a CPU: of linear layers, as `packed_weights.pack`.
        `cpu_kernels`: as `EngineConfig`.

        Raises:
            InvalidField: the weights do not fit the model or `memory` bytes (None: unlimited), fp8
                cannot run, or scales are missing.
        """
        ...
