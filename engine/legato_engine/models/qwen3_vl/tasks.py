"""Tasks of Qwen3-VL: text about images, and boxes and points that it writes as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from legato_engine.models.text import Detokenizer, TaskSetup, TextTask
from legato_engine.sequence import SampledToken, VisualInputs, VisualTask
from legato_engine.types import (
    AnswerFormat,
    CaptionOutput,
    DetectOutput,
    Event,
    FinishReason,
    ImageBox,
    ImagePoint,
    ObjectEvent,
    PointEvent,
    PointOutput,
    TaskOutput,
)


class VisualTextTask(VisualTask, TextTask):
    """A `TextTask` whose prompt may hold images."""

    def __init__(self, setup: TaskSetup, answer: Detokenizer, visual: VisualInputs | None) -> None:
        super().__init__(setup, answer)
        self.visual = visual


class CaptionTextTask(VisualTextTask):
    """Text that describes the image."""

    def result(self, finish_reason: FinishReason) -> TaskOutput:
        self._answer.close()
        return CaptionOutput(caption=self._answer.text)


_SCALE = 1000  # of coordinates
_GRAMMAR = """\
start: list | "```json\\n" list "\\n```"
list: "[" BLANK? (item ("," BLANK? item)* BLANK?)? "]"
item: {item}
NUMBER: /[0-9]|[1-9][0-9]{{1,2}}|1000/
BLANK: /[ \\t\\n]{{1,4}}/
"""
_FENCE = 16  # tokens that a fence and brackets may take


_COORDINATES = re.compile(r'"(?:bbox|point)_2d": \[(\d+(?:, \d+)+)\]')


def _event(numbers: Sequence[int], label: str) -> ObjectEvent | PointEvent:
    """Normalise coordinates; the corners of a box may come in any order."""
    x, y, *others = (min(number, _SCALE) / _SCALE for number in numbers)
    if not others:
        return PointEvent(point=ImagePoint(x=x, y=y), label=label)
    (x_min, x_max), (y_min, y_max) = sorted((x, others[0])), sorted((y, others[1]))
    return ObjectEvent(
        box=ImageBox(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max), label=label
    )


class ObjectTask(VisualTextTask):
    """A list of boxes or points, each an event once its brackets close.

    It ends with its text or `max_objects`. `output` makes the result of what was found.
    """

    def __init__(
        self,
        setup: TaskSetup,
        answer: Detokenizer,
        visual: VisualInputs | None,
        label: str,
        max_objects: int,
        output: Callable[[tuple[Any, ...]], TaskOutput],
    ) -> None:
        super().__init__(setup, answer, visual)
        self._label = label
        self._max_objects = max_objects
        self._output = output
        self._found: list[Event] = []
        self._num_read = 0  # characters before the next object

    def result(self, finish_reason: FinishReason) -> TaskOutput:
        return self._output(tuple(self._found))

    def _read(self, token: SampledToken) -> list[Event]:
        super()._read(token)
        before = len(self._found)
        while match := _COORDINATES.search(self._answer.text, self._num_read):
            self._num_read = match.end()
            self._found.append(_event([int(each) for each in match[1].split(", ")], self._label))
            if len(self._found) == self._max_objects:
                self.finish_reason = FinishReason.MAX_OBJECTS
                break
        return self._found[before:]


@dataclasses.dataclass(frozen=True, slots=True)
class JsonListing:
    """A question for objects of one kind, and the JSON of its answer."""

    asks: str
    key: str
    num_coordinates: int
    default_max_objects: int
    output: Callable[[tuple[Any, ...]], TaskOutput]

    def question(self, label: str) -> str:
        return self.asks.replace("%", label)

    def format(self, label: str) -> AnswerFormat:
        """Return the grammar of a list of objects, all with that label."""
        numbers = ' ", " '.join(["NUMBER"] * self.num_coordinates)
        first, last = f'{{"{self.key}": [', f'], "label": {_quoted(label)}}}'
        item = f"{_quoted(first)} {numbers} {_quoted(last)}"
        return AnswerFormat(grammar=_GRAMMAR.format(item=item))

    def num_tokens(self, encode: Callable[[str], Collection[int]], label: str, count: int) -> int:
        """Return the tokens of `count` objects with the longest numbers and blanks."""
        numbers = ", ".join([str(_SCALE)] * self.num_coordinates)
        item = f'\n\t\t\t{{"{self.key}": [{numbers}], "label": {_quoted(label)}}},'
        return count * len(encode(item)) + _FENCE


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_LOCATE = 'Locate every instance that belongs to the following categories: "%"'
BOXES = JsonListing(
    asks=f"{_LOCATE}. Report bbox coordinates in JSON format.",
    key="bbox_2d",
    num_coordinates=4,
    default_max_objects=50,
    output=lambda found: DetectOutput(objects=found),
)
POINTS = JsonListing(
    asks=f"{_LOCATE} with points. Report point coordinates in JSON format like this: "
    '{"point_2d": [x, y], "label": "name"}.',
    key="point_2d",
    num_coordinates=2,
    default_max_objects=150,
    output=lambda found: PointOutput(points=found),
)
