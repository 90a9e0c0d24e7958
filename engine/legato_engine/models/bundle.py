"""Models without torch: the bundle that is found, and its frontend."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from legato_engine.sequence import Constraint, Task
from legato_engine.types import ConfidenceInfo, ImageInfo, Request

if TYPE_CHECKING:
    import torch

    from legato_engine.models.base import Model
    from legato_engine.models.checkpoint import Progress


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


# ---------------------------------------------------------------- frontend

# The half of a model that never touches the device; it loads no torch.


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """A decoded image, ready for the vision encoder.

    `pixels`: the model's own layout (numpy uint8). Equal images have equal keys, which identify
    shared prefixes.
    """

    key: str
    pixels: Any
    info: ImageInfo
    num_bytes: int
    num_crops: int = 0  # for an `ImageEncoder`; 0: `Model.prefix_embeddings` reads the image


class ModelFrontend(Protocol):
    """Prepares images and makes tasks, on any thread.

    Without `takes_images`, `prepare_image` is never called, and `make_task` refuses images.
    """

    name: str
    takes_images: bool
    tasks: tuple[str, ...]
    constraints: tuple[Constraint, ...]
    vocab_size: int
    confidence: ConfidenceInfo | None  # None: results have none
    notice: str  # limits of the model, for people; empty: none to name

    def prepare_image(self, image_rgb: Any, key: str, info: ImageInfo) -> PreparedImage:
        """Resize and tile a PIL RGB image, on worker threads."""
        ...

    def resizing_on_device(self) -> ModelFrontend:
        """Leave resizing and tiling to an `ImageEncoder`."""
        ...

    def keeping_images(self) -> ModelFrontend:
        """Keep decoded pixels in prepared images."""
        ...

    def prefix_length(self, has_image: bool) -> int:
        """Count the shared prefix: BOS and the image's tokens; 0 without BOS."""
        ...

    def make_task(self, request: Request) -> Task:
        """Make the task, with its sampling and seed resolved.

        Raises:
            InvalidField: a field is out of range, or the model cannot take the image.
            TaskUnsupported: the model does not have this task.
            PromptTooLong: the prompt leaves no position to generate into.
        """
        ...
