"""The half of a text model that never touches the device: prompts, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from legato_engine.core import (
    CaptionTask,
    DetectTask,
    ImageInfo,
    PointTask,
    QueryTask,
    Request,
    SegmentTask,
)
from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models import budget
from legato_engine.models.decoder.task import TextTask
from legato_engine.models.detokenizer import Pieces
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.text_output import Answer
from legato_engine.models.token_log import TokenLog
from legato_engine.tasks import Constraint

FREE: tuple[Constraint, ...] = (Constraint(),)
"""Text has no constraint but none."""

_SKILLS = {
    QueryTask: "query",
    CaptionTask: "caption",
    DetectTask: "detect",
    PointTask: "point",
    SegmentTask: "segment",
}


class Prompter(Protocol):
    """How a question becomes a prompt."""

    def encode(self, task: QueryTask) -> tuple[int, ...]:
        """Ids of the whole prompt, what was said before the question included."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TextSetup:
    """What a frontend is made of; `eos` ends an answer, any of them."""

    name: str
    prompter: Prompter
    pieces: Pieces
    eos: frozenset[int]
    sampling: budget.SamplingDefaults
    max_context: int


class TextFrontend:
    """A `models.frontend.ModelFrontend` without pictures; safe to use from many threads."""

    takes_images = False
    tasks: tuple[str, ...] = ("query",)
    constraints = FREE

    def __init__(self, setup: TextSetup) -> None:
        self.name = setup.name
        self._setup = setup

    def prepare_image(self, image_rgb: Any, key: str, info: ImageInfo) -> PreparedImage:
        """Raises `TaskUnsupported`."""
        raise _no_pictures("image")

    def resizing_on_device(self) -> TextFrontend:
        """The same: there is nothing to resize."""
        return self

    def keeping_images(self) -> TextFrontend:
        """The same: there is nothing to keep."""
        return self

    def prefix_length(self, has_image: bool) -> int:
        """0: a BOS, if there is one, is the prompt's."""
        return 0

    def make_task(self, request: Request) -> TextTask:
        """A question as the model reads it.

        Raises `TaskUnsupported` for other skills and for pictures, `InvalidField`, or
        `PromptTooLong` (metadata `limit`, `actual`) when not even one token fits behind the prompt.
        `max_tokens` is cut to what fits.
        """
        setup, task = self._setup, request.task
        skill = _SKILLS[type(task)]
        if not isinstance(task, QueryTask):
            raise TaskUnsupported(f"this model has no {skill} skill", task=skill)
        if request.image is not None or task.spatial_refs or task.shows_image:
            raise _no_pictures(skill)
        if task.reasoning:
            raise TaskUnsupported("this model has no query with reasoning", task=skill)
        prompt = setup.prompter.encode(task)
        if not prompt:
            raise InvalidField("the question is empty", field="question")
        sampling = budget.resolve_sampling(request, setup.sampling)
        wanted = sampling.max_tokens or setup.sampling.max_tokens
        max_tokens = budget.token_budget(wanted, len(prompt), setup.max_context)
        stop = request.sampling.stop
        answer = Answer(setup.pieces, stop)
        log = TokenLog(setup.pieces, logprobs=request.logprobs) if request.return_tokens else None
        return TextTask(prompt, sampling, max_tokens, setup.eos, answer, log)


def _no_pictures(skill: str) -> TaskUnsupported:
    return TaskUnsupported("this model takes no pictures", task=skill)
