"""The frontend of text models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from legato_engine.core.images import ImageInfo
from legato_engine.core.requests import Request
from legato_engine.core.results import ConfidenceInfo
from legato_engine.core.task_specs import SKILL_OF_TASK, QueryTask
from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models import budget
from legato_engine.models.decoder.task import TextTask
from legato_engine.models.detokenizer import Pieces
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.text_output import TextOutput
from legato_engine.models.token_log import TokenLog
from legato_engine.tasks import Constraint

_log = structlog.get_logger()

FREE: tuple[Constraint, ...] = (Constraint(),)
"""The constraints of plain text."""


class Prompter(Protocol):
    """Makes a prompt of a question and its conversation."""

    def check(self) -> None:
        """Raises InvalidField if no question would have a prompt."""

    def end_of_turn(self) -> int | None:
        """Return the token that follows an answer in a conversation, if there is one."""

    def encode(self, task: QueryTask) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class TextSetup:
    """Parts of a frontend; any id of `eos` ends an answer."""

    name: str
    prompter: Prompter
    pieces: Pieces
    token: Callable[[int], str]
    eos: frozenset[int]
    sampling: budget.SamplingDefaults
    max_context: int
    vocab_size: int


class TextFrontend:
    """A thread-safe `ModelFrontend` without images."""

    takes_images = False
    tasks: tuple[str, ...] = ("query",)
    constraints = FREE
    confidence: ConfidenceInfo | None = None

    def __init__(self, setup: TextSetup) -> None:
        self.name = setup.name
        self.vocab_size = setup.vocab_size
        self._setup = setup
        self._eos = setup.eos

    def check(self) -> None:
        """Try the model's chat template, and end answers where it ends them.

        The files of many models name another token, the end of a document, or none: then an answer
        would run on into turns that the model makes up.

        Raises:
            InvalidField: the template makes no prompt of a question.
        """
        setup = self._setup
        setup.prompter.check()
        end = setup.prompter.end_of_turn()
        if end is not None and end not in setup.eos:
            _log.warning(
                "end_of_turn_is_no_eos",
                reason="the chat template ends turns with a token that the model's files do not "
                "name as an end: answers end there too",
                token=setup.token(end),
                token_id=end,
                eos={token_id: setup.token(token_id) for token_id in sorted(setup.eos)},
            )
            self._eos = setup.eos | {end}
        if not self._eos:
            _log.warning(
                "no_end_of_answer",
                reason="neither the model's files nor its chat template name a token that ends an "
                "answer: each one ends at max_tokens or a stop string",
            )

    def prepare_image(self, image_rgb: Any, key: str, info: ImageInfo) -> PreparedImage:
        raise _no_images("image")

    def resizing_on_device(self) -> TextFrontend:
        return self

    def keeping_images(self) -> TextFrontend:
        return self

    def prefix_length(self, has_image: bool) -> int:
        """0, because the prompt holds any BOS."""
        return 0

    def make_task(self, request: Request) -> TextTask:
        setup, task = self._setup, request.task
        skill = SKILL_OF_TASK[type(task)]
        if not isinstance(task, QueryTask):
            raise TaskUnsupported(f"this model has no {skill} skill", task=skill)
        if request.image is not None or task.spatial_refs or task.shows_image:
            raise _no_images(skill)
        if task.reasoning:
            raise TaskUnsupported("this model has no query with reasoning", task=skill)
        prompt = setup.prompter.encode(task)
        if not prompt:
            raise InvalidField("the question is empty", field="question")
        sampling = budget.resolve_sampling(request, setup.sampling)
        wanted = sampling.max_tokens or setup.sampling.max_tokens
        max_tokens = budget.token_budget(wanted, len(prompt), setup.max_context)
        stop = request.sampling.stop
        answer = TextOutput(setup.pieces, stop)
        log = None
        if request.return_tokens:
            log = TokenLog(
                setup.pieces, logprobs=request.logprobs, top_logprobs=request.top_logprobs
            )
        return TextTask(prompt, sampling, max_tokens, self._eos, answer, log)


def _no_images(skill: str) -> TaskUnsupported:
    return TaskUnsupported("this model takes no images", task=skill)
