"""The Moondream frontend: prompts and request preparation."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
import numpy as np
from PIL import Image

from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models.confidence import Calibration, CalibrationFile, confidence_info
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.models.grammar import GrammarCompiler
from legato_engine.models.moondream.config import MoondreamConfig, SpecialTokens, Template
from legato_engine.models.moondream.preprocess import (
    Pixels,
    crop_image,
    whole_image,
)
from legato_engine.models.moondream.tasks import (
    CaptionSkill,
    DetectSkill,
    PointSkill,
    ReasonedQuerySkill,
    ReasoningOutput,
    SegmentSkill,
    TextSkill,
    constraint_table,
)
from legato_engine.models.text import (
    Detokenizer,
    GenerationTask,
    SamplingDefaults,
    TaskSetup,
    Vocabulary,
    max_objects,
    task_setup,
)
from legato_engine.types import (
    SKILL_OF_TASK,
    SKILLS,
    CaptionLength,
    CaptionSpec,
    DetectSpec,
    ImagePoint,
    ImageProperties,
    PointSpec,
    PromptToken,
    QuerySpec,
    Request,
    SegmentSpec,
    SpatialRef,
    TaskSpec,
    Turn,
)

Prompt = tuple[PromptToken, ...]


class Prompts:
    """Makes each skill's prompt, which follows the shared prefix; text is stripped."""

    def __init__(self, config: MoondreamConfig, tokenizer: Vocabulary) -> None:
        self._templates = config.templates
        self._tokens = config.tokens
        self._tokenizer = tokenizer

    def caption(self, length: CaptionLength) -> Prompt:
        templates = self._templates.caption
        if templates is None:
            raise _unsupported("caption")
        ids: tuple[int, ...] = getattr(templates, length.value)
        return _plain(ids)

    def query(
        self,
        question: str,
        refs: Sequence[SpatialRef],
        *,
        reasoning: bool,
        system: str = "",
        history: Sequence[Turn] = (),
        shows_image: bool = False,
        has_image: bool = True,
    ) -> Prompt:
        """Join turns, references and question; earlier answers have no EOS.

        With `shows_image` an empty first question takes the prompt of a caption.
        """
        questions = [turn.question.strip() for turn in history]
        questions.append(question.strip())
        questions[0] = "\n\n".join(filter(None, (system.strip(), questions[0])))
        has_text = bool(questions[0]) or not shows_image
        if not has_text and not history:
            if reasoning or refs:
                raise InvalidField("reasoning and references need a question", field="question")
            return self.caption(CaptionLength.NORMAL)
        templates, prompt = self._templates, Prompt()
        first = templates.query if has_image else templates.query_alone or templates.query
        for index, turn in enumerate(history):
            if index or has_text:
                text = clean(questions[index], "messages")
                prompt += self._fill(templates.query if index else first, "query", text, ())
            else:
                prompt += self.caption(CaptionLength.NORMAL)
            prompt += _plain(self._tokenizer.encode(turn.answer.strip()))
        skill, template = "query", templates.query if history else first
        if reasoning:
            skill, template = "query with reasoning", templates.query_reasoning
        return prompt + self._fill(template, skill, clean(questions[-1], "question"), refs)

    def detect(self, name: str) -> Prompt:
        """Put a space before the name, as inside a sentence."""
        return self._fill(self._templates.detect, "detect", " " + clean(name, "object"), ())

    def point(self, name: str, refs: Sequence[SpatialRef]) -> Prompt:
        return self._fill(self._templates.point, "point", " " + clean(name, "object"), refs)

    def segment(self, name: str, refs: Sequence[SpatialRef]) -> Prompt:
        """Put no space before the name."""
        return self._fill(self._templates.segment, "segment", clean(name, "object"), refs)

    def _fill(
        self, template: Template | None, skill: str, text: str, refs: Sequence[SpatialRef]
    ) -> Prompt:
        if template is None:
            raise _unsupported(skill)
        return (
            *_plain(template.prefix),
            *(token for ref in refs for token in spatial_tokens(ref, self._tokens)),
            *_plain(self._tokenizer.encode(text)),
            *_plain(template.suffix),
        )


def clean(text: str, field: str) -> str:
    stripped = text.strip()
    if not stripped:
        raise InvalidField(f"{field} is empty", field=field)
    return stripped


def spatial_tokens(ref: SpatialRef, tokens: SpecialTokens) -> Prompt:
    """Encode a point as x and y, a box as centre and size."""
    if isinstance(ref, ImagePoint):
        _check_unit(ref.x, ref.y)
        return PromptToken(tokens.coord, (ref.x, 0.0)), PromptToken(tokens.coord, (ref.y, 0.0))
    _check_unit(ref.x_min, ref.y_min, ref.x_max, ref.y_max)
    if ref.x_min > ref.x_max or ref.y_min > ref.y_max:
        raise InvalidField("a box needs min <= max", field="spatial_refs")
    centre_x, centre_y = (ref.x_min + ref.x_max) / 2, (ref.y_min + ref.y_max) / 2
    return (
        PromptToken(tokens.coord, (centre_x, 0.0)),
        PromptToken(tokens.coord, (centre_y, 0.0)),
        PromptToken(tokens.size, (ref.x_max - ref.x_min, ref.y_max - ref.y_min)),
    )


def _check_unit(*values: float) -> None:
    if not all(math.isfinite(value) and 0.0 <= value <= 1.0 for value in values):
        raise InvalidField("spatial references lie within 0..1", field="spatial_refs")


def _plain(ids: Iterable[int]) -> Prompt:
    return tuple(PromptToken(token_id) for token_id in ids)


def _unsupported(skill: str) -> TaskUnsupported:
    return TaskUnsupported(f"this model has no {skill} skill", task=skill)


class MoondreamFrontend(ModelFrontend):
    """A thread-safe `ModelFrontend`."""

    max_images = 1

    def __init__(
        self,
        config: MoondreamConfig,
        tokenizer: Vocabulary,
        *,
        calibrations: CalibrationFile | None = None,
    ) -> None:
        self.name = config.name
        self.notice = config.notice
        skills = tuple(s for s in SKILLS if getattr(config.templates, s) is not None)
        reasons = config.templates.query_reasoning is not None
        self.tasks = (*skills, "reasoning") if reasons else skills
        self.constraints = constraint_table(config)
        self.vocab_size = config.text.vocab_size
        self._config = config
        self._has_values = config.has_values_in_text
        self._tokenizer = tokenizer
        self._prompts = Prompts(config, tokenizer)
        self._grammars = GrammarCompiler(tokenizer, self.vocab_size, (config.tokens.eos,))
        self._resize_on_device = False
        self._keep_images = False
        self._calibrations = calibrations
        self.confidence = confidence_info(self.tasks, calibrations)

    def resizing_on_device(self) -> Self:
        other = copy.copy(self)
        other._resize_on_device = True
        return other

    def keeping_images(self) -> Self:
        other = copy.copy(self)
        other._keep_images = True
        return other

    def prepare_image(
        self, image_rgb: Image.Image | Pixels, key: str, info: ImageProperties
    ) -> PreparedImage:
        """Prepare PIL RGB or pixels [H, W, 3], to which the result may refer."""
        if self._resize_on_device:
            whole = whole_image(np.asarray(image_rgb), self._config.vision)
            if whole is not None:
                return PreparedImage(key, whole, info, whole.num_bytes, whole.plan.num_crops)
        if isinstance(image_rgb, np.ndarray):
            image_rgb = Image.fromarray(image_rgb)
        crops = crop_image(image_rgb, self._config.vision)
        if self._keep_images:
            crops = dataclasses.replace(crops, original=np.asarray(image_rgb))
        return PreparedImage(key, crops, info, crops.num_bytes)

    def prefix_length(self, has_image: bool) -> int:
        return self._config.prefix_length if has_image else 1

    def check_images(self, task: TaskSpec, sizes: Sequence[tuple[int, int]]) -> None:
        """Take an image of any size: it is resized."""

    def make_task(self, request: Request, images: Sequence[PreparedImage] = ()) -> GenerationTask:
        match request.task:
            case QuerySpec():
                return self._query(request, request.task)
            case CaptionSpec():
                prompt = self._prompts.caption(request.task.length)
                setup = self._setup(request, prompt, self._config.sampling)
                return CaptionSkill(setup, self._answer(request), has_values=self._has_values)
            case DetectSpec():
                prompt = self._prompts.detect(request.task.object)
                return self._listing(DetectSkill, request, request.task, prompt)
            case PointSpec():
                prompt = self._prompts.point(request.task.object, request.task.spatial_refs)
                return self._listing(PointSkill, request, request.task, prompt)
            case SegmentSpec():
                prompt = self._prompts.segment(request.task.object, request.task.spatial_refs)
                setup = self._setup(request, prompt, SamplingDefaults())
                label, calibration = request.task.object.strip(), self._calibration(request)
                tokens = self._config.tokens
                return SegmentSkill(setup, label, self._tokenizer, tokens, calibration)

    def _query(self, request: Request, task: QuerySpec) -> TextSkill:
        for place in task.places:
            if not place.is_first:
                raise InvalidField(
                    "this model sees one image, before the first question", field=place.field
                )
        prompt = self._prompts.query(
            task.question,
            task.spatial_refs,
            reasoning=task.reasoning,
            system=task.system,
            history=task.history,
            shows_image=task.shows_image,
            has_image=request.image is not None,
        )
        needs_image = task.shows_image or bool(task.spatial_refs)
        setup = self._setup(request, prompt, self._config.sampling, needs_image=needs_image)
        grammar = self._grammars.compile(task.response_format)
        setup, answer = dataclasses.replace(setup, grammar=grammar), self._answer(request)
        config = self._config
        if not task.reasoning or config.templates.query is None:
            return TextSkill(setup, answer, has_values=self._has_values and grammar is None)
        reasoning = ReasoningOutput(self._tokenizer, config.tokens)
        opens = config.tokens.answer, config.num_answer_tokens
        return ReasonedQuerySkill(setup, answer, reasoning, *opens)

    def _listing(
        self,
        skill: type[DetectSkill | PointSkill],
        request: Request,
        task: DetectSpec | PointSpec,
        prompt: Prompt,
    ) -> GenerationTask:
        limit = max_objects(task.max_objects, skill.default_max_objects)
        most = max(limit, skill.default_max_objects) if task.min_confidence else limit
        needed = most * len(skill.cycle) + 1  # and EOS
        setup = self._setup(request, prompt, SamplingDefaults(max_tokens=needed))
        task = msgspec.structs.replace(task, object=task.object.strip(), max_objects=limit)
        return skill(setup, task, self._calibration(request))

    def _answer(self, request: Request) -> Detokenizer:
        return Detokenizer(self._tokenizer, request.sampling.stop)

    def _setup(
        self,
        request: Request,
        prompt: Prompt,
        defaults: SamplingDefaults,
        *,
        needs_image: bool = True,
    ) -> TaskSetup:
        has_image = request.image is not None
        if needs_image and not has_image:
            raise InvalidField("this task needs an image", field="image")
        tokens = self._config.tokens
        return task_setup(
            request,
            prompt,
            defaults,
            pieces=self._tokenizer,
            eos=frozenset((tokens.eos,)),
            max_context=self._config.text.max_context,
            prefix_length=self.prefix_length(has_image),
            coord=tokens.coord,
            size=tokens.size,
        )

    def _calibration(self, request: Request) -> Calibration:
        """Return the skill's calibration, which holds for the model without adapters only."""
        if self._calibrations is None or request.adapter:
            return Calibration()
        skill = SKILL_OF_TASK[type(request.task)]
        return self._calibrations.skills.get(skill, Calibration())
