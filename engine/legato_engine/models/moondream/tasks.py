"""Moondream's skills: constraints and tasks of caption, query, detect, point, segment."""

from __future__ import annotations

import abc
import enum
import re
from typing import ClassVar, Generic

from legato_engine.models.confidence import Calibration
from legato_engine.models.moondream.config import MoondreamConfig, SpecialTokens
from legato_engine.models.moondream.tokenizer import NUM_SPECIAL
from legato_engine.models.text import (
    Detokenizer,
    GenerationTask,
    TaskSetup,
    TextTask,
    Vocabulary,
)
from legato_engine.sequence import Constraint, FoundT, SampledToken, ordered
from legato_engine.types import (
    CaptionOutput,
    Certainty,
    DetectOutput,
    DetectSpec,
    Event,
    FinishReason,
    GroundedText,
    ImageBox,
    ImagePoint,
    MaskOutline,
    ObjectEvent,
    OutlineEvent,
    PointEvent,
    PointOutput,
    PointSpec,
    QueryOutput,
    ReasoningEvent,
    SegmentOutput,
)


class Allow(enum.IntEnum):
    """Index of each constraint in the model's table; those of a skill lead to one another."""

    FREE = 0
    DETECT_X = 1  # or the end of the list
    DETECT_Y = 2
    DETECT_SIZE = 3
    POINT_X = 4  # or the end of the list
    POINT_Y = 5
    TEXT = 6  # answers and captions
    REASONING = 7
    FORMATTED = 8  # answers that a grammar masks: of what is suppressed in text, values alone
    ANSWER = 9  # the second of the tokens that open an answer; an index each for further ones


def constraint_table(config: MoondreamConfig) -> tuple[Constraint, ...]:
    """Constraints in the order of `Allow`."""
    tokens, suppressed = config.tokens, config.suppressed
    values = (tokens.answer, tokens.coord, tokens.size)
    coord, coord_or_eos, answer = (tokens.coord,), (tokens.coord, tokens.eos), (tokens.answer,)
    opened = [*range(Allow.ANSWER, Allow.ANSWER + config.num_answer_tokens - 1), Allow.TEXT]
    return (
        Constraint(),
        Constraint(allowed=coord_or_eos, then=Allow.DETECT_Y),
        Constraint(allowed=coord, then=Allow.DETECT_SIZE),
        Constraint(allowed=(tokens.size,), then=Allow.DETECT_X),
        Constraint(allowed=coord_or_eos, then=Allow.POINT_Y),
        Constraint(allowed=coord, then=Allow.POINT_X),
        Constraint(suppressed=suppressed.answer),
        Constraint(suppressed=suppressed.reasoning, then=opened[0], on=tokens.answer),
        Constraint(suppressed=tuple(each for each in suppressed.answer if each in values)),
        *(Constraint(allowed=answer, then=after) for after in opened[1:]),
    )


class ReasoningOutput:
    """Turns tokens into `ReasoningEvent` events.

    A span runs from `ground_start` to `ground_end`. Its coord tokens are pairs of x and y; an
    unpaired last one is dropped, as is a span without points.
    """

    def __init__(self, tokenizer: Vocabulary, tokens: SpecialTokens) -> None:
        self._stream = Detokenizer(tokenizer)
        self._tokens = tokens
        self._span_start: int | None = None
        self._coords: list[float] = []
        self._grounding: list[GroundedText] = []

    @property
    def text(self) -> str:
        """Grounding offsets count its characters."""
        return self._stream.text

    @property
    def grounding(self) -> tuple[GroundedText, ...]:
        return tuple(self._grounding)

    def push(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.ground_start:
            self._span_start = len(self.text)
            self._coords = []
        elif token.token_id == self._tokens.ground_end:
            return self._end_span()
        elif token.token_id == self._tokens.coord:
            self._coords.append(token.payload[0])
        elif text := self._stream.push(token.token_id):
            return [ReasoningEvent(text=text)]
        return []

    def _end_span(self) -> list[Event]:
        start, self._span_start = self._span_start, None
        pairs = zip(self._coords[::2], self._coords[1::2], strict=False)
        points = tuple(ImagePoint(x=x, y=y) for x, y in pairs)
        if start is None or not points:
            return []
        grounding = GroundedText(start_index=start, end_index=len(self.text), points=points)
        self._grounding.append(grounding)
        return [ReasoningEvent(text="", grounding=(grounding,))]


# Ints here and below, because enum lookup is slow.
_TEXT, _FORMATTED = int(Allow.TEXT), int(Allow.FORMATTED)


class TextSkill(TextTask):
    """An answer in text; with `has_values` it may hold coords and sizes."""

    def __init__(self, setup: TaskSetup, answer: Detokenizer, *, has_values: bool) -> None:
        super().__init__(setup, answer)
        self.has_payload = has_values

    def constraint(self) -> int:
        return _TEXT if self.grammar is None else _FORMATTED


class CaptionSkill(TextSkill):
    """Text that describes the image."""

    def result(self, finish_reason: FinishReason) -> CaptionOutput:
        self._close()
        return CaptionOutput(caption=self._answer.text)


_REASONING, _ANSWER = int(Allow.REASONING), int(Allow.ANSWER)


class ReasonedQuerySkill(TextSkill):
    """Reasoning, `num_answer_tokens` answer tokens, then the answer, in one budget.

    The model samples the first answer token; others are forced. EOS ends the task.
    """

    def __init__(
        self,
        setup: TaskSetup,
        answer: Detokenizer,
        reasoning: ReasoningOutput,
        answer_token: int,
        num_answer_tokens: int,
    ) -> None:
        super().__init__(setup, answer, has_values=True)  # reasoning points at objects
        self.grammar, self.constrained = None, True
        self._answer_grammar = setup.grammar
        self._reasoning = reasoning
        self._answer_token = answer_token
        self._num_answer_tokens = num_answer_tokens
        self._num_opened = 0  # answer tokens so far
        self._num_before_answer: int | None = None  # None before the answer

    @property
    def reasoning_tokens(self) -> int:
        """Answer tokens and an EOS instead of them included."""
        if self._num_before_answer is None:
            return self._num_consumed
        return self._num_before_answer

    def constraint(self) -> int:
        if self._num_opened == 0:
            return _REASONING
        if self._num_opened == self._num_answer_tokens:
            return super().constraint()
        return _ANSWER + self._num_opened - 1

    def result(self, finish_reason: FinishReason) -> QueryOutput:
        self._close()
        return QueryOutput(
            answer=self._answer.text,
            reasoning=self._reasoning.text,
            grounding=self._reasoning.grounding,
        )

    def _read(self, token: SampledToken) -> list[Event]:
        if self._num_opened == self._num_answer_tokens:
            return super()._read(token)
        if token.token_id != self._answer_token:
            return self._reasoning.push(token)
        self._num_opened += 1
        if self._num_opened == self._num_answer_tokens:
            self._num_before_answer, self.grammar = self._num_consumed, self._answer_grammar
        return []


class ObjectListSkill(GenerationTask, Generic[FoundT]):
    """Instances of `task.object`, until EOS or `task.max_objects`.

    An instance is a token for each constraint of `cycle`.
    """

    constrained = True
    has_payload = True
    cycle: ClassVar[tuple[int, ...]]
    default_max_objects: ClassVar[int]

    def __init__(
        self, setup: TaskSetup, task: DetectSpec | PointSpec, calibration: Calibration
    ) -> None:
        super().__init__(setup)
        self._task = task
        self._calibration = calibration
        self._found: list[FoundT] = []
        self._payloads: list[tuple[float, float]] = []  # of the object that is being read
        self._certainties: list[Certainty | None] = []

    def constraint(self) -> int:
        return self.cycle[len(self._payloads)]

    def _read(self, token: SampledToken) -> list[Event]:
        self._payloads.append(token.payload)
        self._certainties.append(token.certainty)
        if len(self._payloads) < len(self.cycle):
            return []
        confidence = self._calibration.confidence(self._certainties)
        instance = self._instance(self._payloads, confidence)
        self._payloads, self._certainties = [], []
        if confidence is not None and confidence < self._task.min_confidence:
            return []
        self._found.append(instance)
        if len(self._found) == self._task.max_objects:
            self.finish_reason = FinishReason.MAX_OBJECTS
        return [instance]

    @abc.abstractmethod
    def _instance(
        self, payloads: list[tuple[float, float]], confidence: float | None
    ) -> FoundT: ...


class DetectSkill(ObjectListSkill[ObjectEvent]):
    """Boxes: x, y and size of each, then EOS."""

    cycle = (int(Allow.DETECT_X), int(Allow.DETECT_Y), int(Allow.DETECT_SIZE))
    default_max_objects = 50

    def result(self, finish_reason: FinishReason) -> DetectOutput:
        return DetectOutput(objects=ordered(self._found, self._task.order))

    def _instance(
        self, payloads: list[tuple[float, float]], confidence: float | None
    ) -> ObjectEvent:
        (x, _), (y, _), size = payloads
        box = centred_box((x, y), size)
        return ObjectEvent(box=box, label=self._task.object, confidence=confidence)


def centred_box(centre: tuple[float, float], size: tuple[float, float]) -> ImageBox:
    """Cut the box to the image."""
    (x, y), (width, height) = centre, size
    return ImageBox(
        x_min=max(0.0, x - width / 2),
        y_min=max(0.0, y - height / 2),
        x_max=min(1.0, x + width / 2),
        y_max=min(1.0, y + height / 2),
    )


class PointSkill(ObjectListSkill[PointEvent]):
    """Points: x and y of each, then EOS."""

    cycle = (int(Allow.POINT_X), int(Allow.POINT_Y))
    default_max_objects = 150

    def result(self, finish_reason: FinishReason) -> PointOutput:
        return PointOutput(points=ordered(self._found, self._task.order))

    def _instance(
        self, payloads: list[tuple[float, float]], confidence: float | None
    ) -> PointEvent:
        (x, _), (y, _) = payloads
        point = ImagePoint(x=x, y=y)
        return PointEvent(point=point, label=self._task.object, confidence=confidence)


# ---------------------------------------------------------------- svg path

_VIEWBOX = 960
_INTEGER = re.compile(r"-?[0-9]+")
ARITY = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_UNSCALED_OF_ARC = (2, 3, 4)  # rotation and the two flags


class SvgPath:
    """Parses a path piece by piece; the results of `push` add up to `text`.

    A piece is a command letter, an integer in a 960 by 960 view of the box, a minus sign for the
    next integer, or blank; any other empties `text` for good. Only complete groups of a command's
    numbers are emitted.
    """

    def __init__(self) -> None:
        self.text = ""
        self._valid = True
        self._command = ""
        self._command_shown = False
        self._numbers: list[int] = []
        self._negative = False

    def push(self, piece: str) -> str:
        """Return the path text that a token completes."""
        piece = piece.strip()
        if not self._valid or not piece:
            return ""
        if piece.upper() in ARITY:
            return self._begin(piece)
        if piece == "-" and not self._negative:
            self._negative = True
            return ""
        if _INTEGER.fullmatch(piece) and ARITY.get(self._command.upper()):
            return self._number(int(piece))
        return self._fail()

    def _begin(self, command: str) -> str:
        if self._negative or (not self._command and command.upper() != "M"):
            return self._fail()
        self._command, self._command_shown = command, False
        self._numbers = []
        return self._show([]) if ARITY[command.upper()] == 0 else ""

    def _number(self, value: int) -> str:
        self._numbers.append(-value if self._negative else value)
        self._negative = False
        command = self._command.upper()
        if len(self._numbers) < ARITY[command]:
            return ""
        numbers = [
            str(number)
            if command == "A" and index in _UNSCALED_OF_ARC
            else f"{number / _VIEWBOX:z.3f}".rstrip("0").rstrip(".")
            for index, number in enumerate(self._numbers)
        ]
        self._numbers = []
        return self._show(numbers)

    def _show(self, numbers: list[str]) -> str:
        words = [] if self._command_shown else [self._command]
        words += [",".join(numbers[at : at + 2]) for at in range(0, len(numbers), 2)]
        self._command_shown = True
        delta = (" " if self.text else "") + " ".join(words)
        self.text += delta
        return delta

    def _fail(self) -> str:
        self._valid = False
        self.text = ""
        return ""


class SegmentSkill(GenerationTask):
    """One outline: x, y and size of its box, then path text until EOS, in any order.

    The first two coords and size make the box; earlier path text is emitted with it. No token is
    masked: the path is text of the whole vocabulary, whose pieces cross the grammar's tokens, so
    a mask would need a table of states for each tokenizer. Moondream's own inference masks none
    either. An invalid path is found by parsing.
    """

    has_payload = True

    def __init__(
        self,
        setup: TaskSetup,
        label: str,
        tokenizer: Vocabulary,
        tokens: SpecialTokens,
        calibration: Calibration,
    ) -> None:
        super().__init__(setup)
        self._label = label
        self._tokens = tokens
        self._calibration = calibration
        self._tokenizer = tokenizer
        self._coords: list[float] = []
        self._size: tuple[float, float] | None = None
        self._certainties: list[Certainty | None] = []  # of the box's tokens
        self._box: ImageBox | None = None
        self._path = SvgPath()

    def result(self, finish_reason: FinishReason) -> SegmentOutput:
        """No outline without a box; an empty path if the text is invalid."""
        if self._box is None:
            return SegmentOutput()
        outline = MaskOutline(
            path=self._path.text,
            box=self._box,
            label=self._label,
            confidence=self._calibration.confidence(self._certainties),
        )
        return SegmentOutput(segments=(outline,))

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id in (self._tokens.coord, self._tokens.size):
            return self._read_region(token)
        if token.token_id < NUM_SPECIAL:
            return []
        piece = self._tokenizer.piece(token.token_id).decode("utf-8", "replace")
        delta = self._path.push(piece)
        return [OutlineEvent(index=0, path_delta=delta)] if delta and self._box else []

    def _read_region(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.coord:
            if len(self._coords) < 2:
                self._certainties.append(token.certainty)
            self._coords.append(token.payload[0])
        elif self._size is None:
            self._certainties.append(token.certainty)
            self._size = token.payload
        if self._box is not None or self._size is None or len(self._coords) < 2:
            return []
        self._box = centred_box((self._coords[0], self._coords[1]), self._size)
        return [OutlineEvent(index=0, path_delta=self._path.text, box=self._box)]
