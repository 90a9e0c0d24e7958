"""Null model: scripted answers without weights."""

from __future__ import annotations

import functools

import msgspec

from legato_engine.config import EngineConfig
from legato_engine.errors import AdapterNotFound, InvalidField, ModelNotFound
from legato_engine.ipc.messages import ServedModel
from legato_engine.models.confidence import confidence_info
from legato_engine.models.text import SamplingDefaults, fill_sampling, max_objects, token_budget
from legato_engine.null.scripted_output import ScriptedOutput, scripted_output
from legato_engine.types import (
    SKILLS,
    DetectSpec,
    ImageProperties,
    PointSpec,
    Request,
    RequestTimings,
    Resumed,
    SamplingParams,
    TaskSpec,
    TokenUsage,
)

IMAGE_TOKENS = 729
MAX_IMAGES = 8


class NullRequest(msgspec.Struct, eq=False):
    """Request with its scripted output; times are monotonic seconds, 0 while unknown."""

    request: Request
    output: ScriptedOutput
    images: tuple[ImageProperties, ...]
    arrival: float
    image_seconds: float
    input_tokens: int
    started: float = 0.0
    first_token: float = 0.0
    num_tokens: int = 0

    @property
    def adapter_key(self) -> str:
        return ""

    @property
    def max_cost(self) -> int:
        return self.input_tokens + len(self.output.events)

    @property
    def cost(self) -> int:
        return self.input_tokens + self.num_tokens

    @property
    def was_started(self) -> bool:
        return self.request.was_admitted

    @property
    def image(self) -> ImageProperties | None:
        return self.images[0] if self.images else None

    @property
    def cached_tokens(self) -> int:
        hits = [image.cache_hit for image in self.images]
        return 1 + IMAGE_TOKENS * len(hits) if hits and all(hits) else 0

    @property
    def queue_time(self) -> float:
        return max(0.0, self.started - self.arrival - self.image_seconds)

    def usage(self) -> TokenUsage:
        return TokenUsage(
            input_tokens=self.input_tokens,
            output_tokens=self.num_tokens,
            cached_tokens=self.cached_tokens,
            image_tokens=IMAGE_TOKENS * len(self.images),
            reasoning_tokens=min(self.num_tokens, self.output.num_thoughts),
        )

    def timings(self, now: float) -> RequestTimings:
        first_token = self.first_token or now
        return RequestTimings(
            queue=self.queue_time,
            image=self.image_seconds,
            prefill=max(0.0, first_token - (self.started or now)),
            first_token=first_token - self.arrival,
            decode=now - first_token,
            total=now - self.arrival,
        )


# ---------------------------------------------------------------- model

NAME = "null"
_NAMES = ("", NAME)
_MAX_CONTEXT = 8192  # positions, unless configured
_DEFAULTS = SamplingDefaults(max_tokens=_MAX_CONTEXT)


def info(config: EngineConfig) -> ServedModel:
    max_context = config.max_context or _MAX_CONTEXT
    return ServedModel(
        name=NAME,
        device="none",
        tasks=SKILLS,
        max_context_tokens=max_context,
        max_output_tokens=max_context - IMAGE_TOKENS - 1,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        max_images=MAX_IMAGES,
        num_parameters=0,
        dtype="none",
        confidence=confidence_info(SKILLS, None),
    )


class NullModel:
    """Null model: checks requests and answers them."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_context = config.max_context or _MAX_CONTEXT
        self._num_objects = config.null_objects

    def check(self, request: Request) -> None:
        """Check the names of the model and the adapter.

        Raises:
            ModelNotFound: another model.
            AdapterNotFound: an adapter.
        """
        if request.model not in _NAMES:
            raise ModelNotFound(f"this engine serves {NAME}", resource=request.model)
        if request.adapter:
            raise AdapterNotFound("this engine holds no adapters", resource=request.adapter)

    def answer(self, request: Request) -> tuple[int, ScriptedOutput]:
        """Return the length of the prompt and the output.

        Raises:
            InvalidField: a field is out of range, or a resumed token is not of this output.
            PromptTooLong: not even one token fits.
        """
        length, output = _scripted(
            request.task,
            request.sampling,
            len(request.images),
            self._num_objects,
            self._max_context,
        )
        if request.resumed is not None:
            _check_tokens(request.resumed, output)
        return length, output


def _check_tokens(resumed: Resumed, output: ScriptedOutput) -> None:
    """Check resumed tokens; a token's id is its index."""
    count = min(len(resumed.token_ids), len(output.events))
    for index, token_id in enumerate(resumed.token_ids):
        if index >= count or token_id != index:
            raise InvalidField("no such token", field=f"resume_from.token_ids[{index}]")


@functools.lru_cache(1024)
def _scripted(
    task: TaskSpec, sampling: SamplingParams, num_images: int, num_objects: int, max_context: int
) -> tuple[int, ScriptedOutput]:
    """Return the prompt's length and the output, truncated to the context as by a model.

    The prompt is BOS, the images, and a token for each word.

    Raises:
        InvalidField: a field is out of range.
        PromptTooLong: not even one token fits.
    """
    resolved = fill_sampling(sampling, _DEFAULTS, seed=0)
    assert resolved.max_tokens is not None, "it was resolved"
    if isinstance(task, (DetectSpec, PointSpec)):
        max_objects(task.max_objects, num_objects)
    output = scripted_output(task, sampling, num_objects)
    length = 1 + IMAGE_TOKENS * num_images + output.num_words
    budget = token_budget(resolved.max_tokens, length, max_context)
    if len(output.events) > budget:
        cut = msgspec.structs.replace(sampling, max_tokens=budget)
        output = scripted_output(task, cut, num_objects)
    return length, output
