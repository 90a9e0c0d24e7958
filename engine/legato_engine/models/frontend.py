"""The half of a model that never touches the device; it loads no torch."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from legato_engine.sequence import Constraint, Task
from legato_engine.types import CalibrationInfo, ImageProperties, Request, TaskSpec


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """A decoded image, ready for the vision encoder.

    `pixels`: the model's own layout (numpy uint8). Equal images have equal keys, which identify
    shared prefixes.
    """

    key: str
    pixels: Any
    info: ImageProperties
    num_bytes: int
    num_crops: int = 0  # for an `ImageEncoder`; 0: `Model.prefix_embeddings` reads the image


class ModelFrontend(abc.ABC):
    """Prepares images and makes tasks, on any thread.

    A query takes up to `max_images`, any other task one of them. With 0, `prepare_image` is never
    called, and `make_task` refuses images. With `places_images` a prompt has its images between its
    tokens, and is made once they are prepared; without, one image is the prefix.
    """

    name: str
    max_images: int = 0
    places_images: bool = False
    tasks: tuple[str, ...]
    constraints: tuple[Constraint, ...]
    vocab_size: int
    confidence: CalibrationInfo | None = None  # None: results have none
    notice: str = ""  # limits of the model, for people

    @abc.abstractmethod
    def prepare_image(self, image_rgb: Any, key: str, info: ImageProperties) -> PreparedImage:
        """Resize and tile a PIL RGB image, on worker threads."""

    def resizing_on_device(self) -> Self:
        """Leave resizing and tiling to an `ImageEncoder`, if the model has one."""
        return self

    def keeping_images(self) -> Self:
        """Keep decoded pixels in prepared images, if a refiner may read them."""
        return self

    def prefix_length(self, has_image: bool) -> int:
        """Count the shared prefix: BOS and the image's tokens; 0 if prompts hold any BOS."""
        return 0

    @abc.abstractmethod
    def check_images(self, task: TaskSpec, sizes: Sequence[tuple[int, int]]) -> None:
        """Check the width and height of a task's images before they are decoded.

        Raises:
            InvalidField: a size is not one that the model takes.
            PromptTooLong: the images leave no position for text.
        """

    @abc.abstractmethod
    def make_task(self, request: Request, images: Sequence[PreparedImage] = ()) -> Task:
        """Make the task, with its sampling and seed resolved.

        `images`: the request's for a frontend that `places_images`, none if it is stopped before
        they are prepared; other frontends ignore them.

        Raises:
            InvalidField: a field is out of range, or the model cannot take the image.
            TaskUnsupported: the model does not have this task.
            PromptTooLong: the prompt leaves no position to generate into.
        """
