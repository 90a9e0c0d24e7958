"""Scripted outputs, equal for equal requests."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from legato_engine.errors import TaskUnsupported
from legato_engine.sequence import ordered, with_token
from legato_engine.types import (
    CaptionOutput,
    CaptionSpec,
    DetectOutput,
    DetectSpec,
    Event,
    FinishReason,
    ImageBox,
    ImagePoint,
    MaskOutline,
    ObjectEvent,
    OutlineEvent,
    PointEvent,
    PointOutput,
    PointSpec,
    QueryOutput,
    QuerySpec,
    ReasoningEvent,
    Request,
    SamplingParams,
    SegmentOutput,
    SegmentSpec,
    TaskOutput,
    TaskSpec,
    TextEvent,
    TokenInfo,
)

DEFAULT_WORDS = 16  # of a text without `max_tokens`
_WORDS = "nobody looked at this picture and yet here is an answer of so many words"
_THOUGHTS = "there is no model to ask"
_OUTLINE = ("M0.1 0.1", " L0.9 0.1", " L0.9 0.9", " L0.1 0.9", " z")
_GRID = 8  # columns and rows of the grid of objects
_CONFIDENCES = (0.75, 0.9375, 0.375, 0.8125, 0.5625)  # of consecutive objects, cyclic


@dataclasses.dataclass(frozen=True, slots=True)
class ScriptedOutput:
    """Events of a request, one per token.

    The first `num_thoughts` events are reasoning. The task's own text has `num_words`.
    """

    task: TaskSpec
    events: tuple[Event, ...]
    finish_reason: FinishReason
    whole: TaskOutput
    num_thoughts: int
    num_words: int

    def result(self, num_tokens: int) -> TaskOutput:
        if num_tokens == len(self.events):
            return self.whole
        return _result(self.task, self.events[:num_tokens])

    def events_at(self, index: int, request: Request) -> tuple[Event, ...]:
        event = self.events[index]
        if not request.return_tokens:
            return (event,)
        return tuple(with_token([event], self._token(index, request)))

    def tokens(self, num_tokens: int, request: Request) -> tuple[TokenInfo, ...]:
        return tuple(self._token(index, request) for index in range(num_tokens))

    def _token(self, index: int, request: Request) -> TokenInfo:
        event = self.events[index]
        text = event.text if isinstance(event, (TextEvent, ReasoningEvent)) else ""
        logprob = 0.0 if request.logprobs else None
        return TokenInfo(token_id=index, text=text, logprob=logprob, piece=text.encode())


def scripted_output(task: TaskSpec, sampling: SamplingParams, num_objects: int) -> ScriptedOutput:
    match task:
        case QuerySpec():
            if task.response_format is not None:
                problem = "the null engine has no response_format"
                raise TaskUnsupported(problem, task="query")
            thoughts = [ReasoningEvent(text=text) for text in _spaced(_THOUGHTS)]
            return _text_output(task, thoughts if task.reasoning else [], sampling)
        case CaptionSpec():
            return _text_output(task, [], sampling)
        case DetectSpec() | PointSpec():
            return _object_output(task, num_objects, sampling.max_tokens)
        case SegmentSpec():
            pieces = [OutlineEvent(index=0, path_delta=piece) for piece in _OUTLINE]
            events = (OutlineEvent(index=0, box=_cell(0)), *pieces)
            return _limited(task, events, FinishReason.STOP, sampling.max_tokens)


def _text_output(
    task: TaskSpec, thoughts: Sequence[Event], sampling: SamplingParams
) -> ScriptedOutput:
    count = DEFAULT_WORDS if sampling.max_tokens is None else sampling.max_tokens
    text = " ".join(itertools.islice(itertools.cycle(_WORDS.split()), count))
    ends = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
    texts = [TextEvent(text=word) for word in _spaced(text[: min(ends, default=None)])]
    return _limited(task, (*thoughts, *texts), FinishReason.STOP, sampling.max_tokens)


def _spaced(text: str) -> list[str]:
    """Split a text into words, all but the first with the space before it."""
    return re.findall("^[^ ]+| [^ ]*", text)


def _object_output(
    task: DetectSpec | PointSpec, num_objects: int, max_tokens: int | None
) -> ScriptedOutput:
    most = num_objects if task.max_objects is None else min(num_objects, task.max_objects)
    confident = [index for index in range(num_objects) if _confidence(index) >= task.min_confidence]
    events: tuple[Event, ...] = tuple(_object(task, index) for index in confident[:most])
    reason = FinishReason.MAX_OBJECTS if len(events) == task.max_objects else FinishReason.STOP
    return _limited(task, events, reason, max_tokens)


def _object(task: DetectSpec | PointSpec, index: int) -> Event:
    label, confidence = task.object, _confidence(index)
    if isinstance(task, DetectSpec):
        return ObjectEvent(box=_cell(index), label=label, confidence=confidence)
    box = _cell(index)
    point = ImagePoint(x=(box.x_min + box.x_max) / 2, y=(box.y_min + box.y_max) / 2)
    return PointEvent(point=point, label=label, confidence=confidence)


def _confidence(index: int) -> float:
    return _CONFIDENCES[index % len(_CONFIDENCES)]


def _limited(
    task: TaskSpec, events: Sequence[Event], reason: FinishReason, max_tokens: int | None
) -> ScriptedOutput:
    if max_tokens is not None and len(events) >= max_tokens and reason is FinishReason.STOP:
        reason = FinishReason.LENGTH
    kept = tuple(events[:max_tokens])
    return ScriptedOutput(
        task,
        kept,
        reason,
        whole=_result(task, kept),
        num_thoughts=sum(isinstance(event, ReasoningEvent) for event in kept),
        num_words=_num_words(task),
    )


def _num_words(task: TaskSpec) -> int:
    if isinstance(task, QuerySpec):
        earlier = (text for turn in task.history for text in (turn.question, turn.answer))
        return sum(len(text.split()) for text in (task.system, *earlier, task.question))
    return 1 if isinstance(task, CaptionSpec) else len(task.object.split())


def _cell(index: int) -> ImageBox:
    row, column = divmod(index % (_GRID * _GRID), _GRID)
    side = 1 / _GRID
    return ImageBox(
        x_min=column * side, y_min=row * side, x_max=(column + 1) * side, y_max=(row + 1) * side
    )


# ---------------------------------------------------------------- results of events


def _result(task: TaskSpec, events: Sequence[Event]) -> TaskOutput:
    match task:
        case QuerySpec():
            thoughts = "".join(e.text for e in events if isinstance(e, ReasoningEvent))
            return QueryOutput(answer=_text(events), reasoning=thoughts if task.reasoning else None)
        case CaptionSpec():
            return CaptionOutput(caption=_text(events))
        case DetectSpec():
            boxes = [each for each in events if isinstance(each, ObjectEvent)]
            return DetectOutput(objects=ordered(boxes, task.order))
        case PointSpec():
            points = [each for each in events if isinstance(each, PointEvent)]
            return PointOutput(points=ordered(points, task.order))
        case _:
            return _segments(task.object, [e for e in events if isinstance(e, OutlineEvent)])


def _text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent))


def _segments(label: str, pieces: Sequence[OutlineEvent]) -> SegmentOutput:
    box = next((piece.box for piece in pieces if piece.box is not None), None)
    if box is None:
        return SegmentOutput()
    path = "".join(piece.path_delta for piece in pieces)
    return SegmentOutput(
        segments=(MaskOutline(path=path, box=box, label=label, confidence=_confidence(0)),)
    )
