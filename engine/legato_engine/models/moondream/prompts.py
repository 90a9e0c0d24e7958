"""Prompts around spatial references and text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from legato_engine.core.geometry import Box, Point, SpatialRef
from legato_engine.core.task_specs import CaptionLength, Turn
from legato_engine.core.tokens import PromptToken
from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models.moondream.config import MoondreamConfig, SpecialTokens, Template
from legato_engine.models.moondream.tokenizer import Tokenizer

Prompt = tuple[PromptToken, ...]


class Prompts:
    """Makes each skill's prompt, which follows the shared prefix; text is stripped."""

    def __init__(self, config: MoondreamConfig, tokenizer: Tokenizer) -> None:
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
        for index, turn in enumerate(history):
            if index or has_text:
                text = clean(questions[index], "messages")
                prompt += self._fill(templates.query, "query", text, ())
            else:
                prompt += self.caption(CaptionLength.NORMAL)
            prompt += _plain(self._tokenizer.encode(turn.answer.strip()))
        skill, template = "query", templates.query
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
    if isinstance(ref, Point):
        _check_unit(ref.x, ref.y)
        return PromptToken(tokens.coord, (ref.x, 0.0)), PromptToken(tokens.coord, (ref.y, 0.0))
    _check_box(ref)
    centre_x, centre_y = (ref.x_min + ref.x_max) / 2, (ref.y_min + ref.y_max) / 2
    return (
        PromptToken(tokens.coord, (centre_x, 0.0)),
        PromptToken(tokens.coord, (centre_y, 0.0)),
        PromptToken(tokens.size, (ref.x_max - ref.x_min, ref.y_max - ref.y_min)),
    )


def _check_unit(*values: float) -> None:
    if not all(math.isfinite(value) and 0.0 <= value <= 1.0 for value in values):
        raise InvalidField("spatial references lie within 0..1", field="spatial_refs")


def _check_box(box: Box) -> None:
    _check_unit(box.x_min, box.y_min, box.x_max, box.y_max)
    if box.x_min > box.x_max or box.y_min > box.y_max:
        raise InvalidField("a box needs min <= max", field="spatial_refs")


def _plain(ids: Iterable[int]) -> Prompt:
    return tuple(PromptToken(token_id) for token_id in ids)


def _unsupported(skill: str) -> TaskUnsupported:
    return TaskUnsupported(f"this model has no {skill} skill", task=skill)
