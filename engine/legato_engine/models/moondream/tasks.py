"""Moondream's skills: constraints and tasks of caption, query, detect, point, segment."""

from __future__ import annotations

import abc
import dataclasses
import enum
import re
from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

from legato_engine.models.confidence import Calibration, score
from legato_engine.models.moondream.config import MoondreamConfig, SpecialTokens
from legato_engine.models.moondream.tokenizer import NUM_SPECIAL, Tokenizer
from legato_engine.models.text import Detokenizer, TextOutput, TokenLog
from legato_engine.sequence import Constraint, Grammar, SampledToken, with_token
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
    ObjectOrder,
    OutlineEvent,
    PointEvent,
    PointOutput,
    PointSpec,
    PromptToken,
    QueryOutput,
    ReasoningEvent,
    SamplingParams,
    SegmentOutput,
    TaskOutput,
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


# ---------------------------------------------------------------- skill task

# The task of a skill.


@dataclasses.dataclass(frozen=True, slots=True)
class TaskSetup:
    """Parts of a task; `sampling` is resolved, and `max_tokens` fits the context.

    `values_in_text`: answers may hold coords and sizes.
    """

    prompt: tuple[PromptToken, ...]
    sampling: SamplingParams
    max_tokens: int
    tokens: SpecialTokens
    values_in_text: bool
    log: TokenLog | None
    calibration: Calibration


class SkillTask(abc.ABC):
    """A `Task`; skills read a token in `_read`, which may set `finish_reason`."""

    constrained = False
    uses_transition_table = True
    has_payload = False
    grammar: Grammar | None = None

    def __init__(self, setup: TaskSetup) -> None:
        self.prompt = setup.prompt
        self.sampling = setup.sampling
        self.max_tokens = setup.max_tokens
        self.finish_reason: FinishReason | None = None
        self._tokens = setup.tokens
        self._log = setup.log
        self._calibration = setup.calibration
        self._num_consumed = 0

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def consume(self, token: SampledToken) -> list[Event]:
        self._num_consumed += 1
        events = self._read(token)
        if self._log is not None:
            events = with_token(events, self._log.read(token))
        if self.finish_reason is None:
            if self._num_consumed < self.max_tokens:
                return events
            self.finish_reason = FinishReason.LENGTH
        return events + self._close()

    @abc.abstractmethod
    def constraint(self) -> int: ...

    @abc.abstractmethod
    def _read(self, token: SampledToken) -> list[Event]: ...

    def _close(self) -> list[Event]:
        return []

    def _confidence(self, certainties: Iterable[Certainty | None]) -> float | None:
        raw = score(certainties)
        return None if raw is None else self._calibration(raw)

    @abc.abstractmethod
    def result(self, finish_reason: FinishReason) -> TaskOutput: ...


# ---------------------------------------------------------------- reasoning

# Reasoning and its grounding.


class ReasoningOutput:
    """Turns tokens into `ReasoningEvent` events.

    A span runs from `ground_start` to `ground_end`. Its coord tokens are pairs of x and y; an
    unpaired last one is dropped, as is a span without points.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: SpecialTokens) -> None:
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


# ---------------------------------------------------------------- text skill

# Skills that answer in plain text.

# Ints here and below, because enum lookup is slow.
_TEXT, _FORMATTED = int(Allow.TEXT), int(Allow.FORMATTED)


class TextSkill(SkillTask):
    """Text until EOS, a stop string or the end of a `grammar`."""

    def __init__(
        self, setup: TaskSetup, answer: TextOutput, grammar: Grammar | None = None
    ) -> None:
        super().__init__(setup)
        self.has_payload = setup.values_in_text
        self._answer = answer
        if grammar is not None:
            self.constrained, self.uses_transition_table = True, False
            self.grammar = grammar

    def constraint(self) -> int:
        return _TEXT if self.grammar is None else _FORMATTED

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        if self.grammar is not None:
            self.grammar.accept(token.token_id)
        events = self._answer.push(token.token_id)
        if self._answer.stopped or (self.grammar is not None and self.grammar.is_complete):
            self.finish_reason = FinishReason.STOP
        return events

    def _close(self) -> list[Event]:
        return self._answer.close()


# ---------------------------------------------------------------- caption

# The caption skill.


class CaptionSkill(TextSkill):
    """Text that describes the image."""

    def result(self, finish_reason: FinishReason) -> CaptionOutput:
        self._close()
        return CaptionOutput(caption=self._answer.text)


# ---------------------------------------------------------------- query

# The query skill.

_REASONING, _ANSWER = int(Allow.REASONING), int(Allow.ANSWER)


class QuerySkill(TextSkill):
    """An answer without reasoning."""

    def result(self, finish_reason: FinishReason) -> QueryOutput:
        self._close()
        return QueryOutput(answer=self._answer.text)


class ReasonedQuerySkill(QuerySkill):
    """Reasoning, `num_answer_tokens` answer tokens, then the answer, in one budget.

    The model samples the first answer token; others are forced. EOS ends the task.
    """

    constrained = True

    def __init__(
        self,
        setup: TaskSetup,
        answer: TextOutput,
        reasoning: ReasoningOutput,
        num_answer_tokens: int,
        grammar: Grammar | None = None,
    ) -> None:
        super().__init__(setup, answer, grammar)
        self.grammar, self._answer_grammar = None, grammar
        self.has_payload = True  # reasoning points at objects
        self._reasoning = reasoning
        self._num_answer_tokens = num_answer_tokens
        self._num_opened = 0  # answer tokens so far
        self._num_before_answer = 0

    @property
    def reasoning_tokens(self) -> int:
        """Answer tokens included."""
        return self._num_before_answer

    def constraint(self) -> int:
        if self._num_opened == 0:
            return _REASONING
        if self._num_opened == self._num_answer_tokens:
            return super().constraint()
        return _ANSWER + self._num_opened - 1

    def result(self, finish_reason: FinishReason) -> QueryOutput:
        answer = super().result(finish_reason).answer
        return QueryOutput(
            answer=answer, reasoning=self._reasoning.text, grounding=self._reasoning.grounding
        )

    def _read(self, token: SampledToken) -> list[Event]:
        if self._num_opened == self._num_answer_tokens:
            return super()._read(token)
        self._num_before_answer += 1
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        if token.token_id == self._tokens.answer:
            self._num_opened += 1
            if self._num_opened == self._num_answer_tokens:
                self.grammar = self._answer_grammar
            return []
        return self._reasoning.push(token)


# ---------------------------------------------------------------- object list

# Skills that list instances.

InstanceT = TypeVar("InstanceT", ObjectEvent, PointEvent)


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """Selection and order of listed objects."""

    label: str
    max_objects: int
    min_confidence: float = 0.0
    order: ObjectOrder = ObjectOrder.MODEL

    @classmethod
    def of(cls, task: DetectSpec | PointSpec, label: str, max_objects: int) -> Listing:
        return cls(label, max_objects, task.min_confidence, task.order)


class ObjectListSkill(SkillTask, Generic[InstanceT]):
    """Instances of `tokens_per_object` tokens, until EOS or `max_objects`."""

    constrained = True
    has_payload = True
    tokens_per_object: ClassVar[int]
    default_max_objects: ClassVar[int]

    def __init__(self, setup: TaskSetup, listing: Listing) -> None:
        super().__init__(setup)
        self._label = listing.label
        self._listing = listing
        self._found: list[InstanceT] = []
        self._certainties: list[Certainty | None] = []  # of the object that is being read

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
        self._certainties.append(token.certainty)
        if len(self._certainties) < self.tokens_per_object:
            self._begin(token.payload)
            return []
        confidence = self._confidence(self._certainties)
        self._certainties = []
        instance = self._complete(token.payload, confidence)
        if confidence is not None and confidence < self._listing.min_confidence:
            return []
        self._found.append(instance)
        if len(self._found) == self._listing.max_objects:
            self.finish_reason = FinishReason.MAX_OBJECTS
        return [instance]

    def _ordered(self) -> tuple[InstanceT, ...]:
        if self._listing.order is ObjectOrder.MODEL:
            return tuple(self._found)
        return tuple(sorted(self._found, key=_rank))

    @abc.abstractmethod
    def _begin(self, payload: tuple[float, float]) -> None:
        """Read a value that completes nothing."""

    @abc.abstractmethod
    def _complete(self, payload: tuple[float, float], confidence: float | None) -> InstanceT: ...


def _rank(instance: ObjectEvent | PointEvent) -> float:
    return 1.0 if instance.confidence is None else -instance.confidence


# ---------------------------------------------------------------- detect

# The detect skill.

# Ints, because enum lookup is slow.
_CYCLE = (int(Allow.DETECT_X), int(Allow.DETECT_Y), int(Allow.DETECT_SIZE))


class DetectSkill(ObjectListSkill[ObjectEvent]):
    """Boxes: x, y and size of each, then EOS."""

    tokens_per_object = 3
    default_max_objects = 50

    def __init__(self, setup: TaskSetup, listing: Listing) -> None:
        super().__init__(setup, listing)
        self._centre: list[float] = []

    def constraint(self) -> int:
        return _CYCLE[len(self._centre)]

    def result(self, finish_reason: FinishReason) -> DetectOutput:
        return DetectOutput(objects=self._ordered())

    def _begin(self, payload: tuple[float, float]) -> None:
        self._centre.append(payload[0])

    def _complete(self, payload: tuple[float, float], confidence: float | None) -> ObjectEvent:
        box = centred_box((self._centre[0], self._centre[1]), payload)
        self._centre = []
        return ObjectEvent(box=box, label=self._label, confidence=confidence)


def centred_box(centre: tuple[float, float], size: tuple[float, float]) -> ImageBox:
    """Cut the box to the image."""
    (x, y), (width, height) = centre, size
    return ImageBox(
        x_min=max(0.0, x - width / 2),
        y_min=max(0.0, y - height / 2),
        x_max=min(1.0, x + width / 2),
        y_max=min(1.0, y + height / 2),
    )


# ---------------------------------------------------------------- point

# The point skill.

# Ints, because enum lookup is slow.
_X, _Y = int(Allow.POINT_X), int(Allow.POINT_Y)


class PointSkill(ObjectListSkill[PointEvent]):
    """Points: x and y of each, then EOS."""

    tokens_per_object = 2
    default_max_objects = 150

    def __init__(self, setup: TaskSetup, listing: Listing) -> None:
        super().__init__(setup, listing)
        self._x = 0.0

    def constraint(self) -> int:
        return _Y if self._certainties else _X

    def result(self, finish_reason: FinishReason) -> PointOutput:
        return PointOutput(points=self._ordered())

    def _begin(self, payload: tuple[float, float]) -> None:
        self._x = payload[0]

    def _complete(self, payload: tuple[float, float], confidence: float | None) -> PointEvent:
        point = ImagePoint(x=self._x, y=payload[0])
        return PointEvent(point=point, label=self._label, confidence=confidence)


# ---------------------------------------------------------------- svg path

# An SVG path in the unit square of a box, from the model's text.

_VIEWBOX = 960
_INTEGER = re.compile(r"-?[0-9]+")
_ARITY = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
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
        if piece.upper() in _ARITY:
            return self._begin(piece)
        if piece == "-" and not self._negative:
            self._negative = True
            return ""
        if _INTEGER.fullmatch(piece) and _ARITY.get(self._command.upper()):
            return self._number(int(piece))
        return self._fail()

    def _begin(self, command: str) -> str:
        if self._negative or (not self._command and command.upper() != "M"):
            return self._fail()
        self._command, self._command_shown = command, False
        self._numbers = []
        return self._show([]) if _ARITY[command.upper()] == 0 else ""

    def _number(self, value: int) -> str:
        self._numbers.append(-value if self._negative else value)
        self._negative = False
        command = self._command.upper()
        if len(self._numbers) < _ARITY[command]:
            return ""
        numbers = [
            str(number) if command == "A" and index in _UNSCALED_OF_ARC else _scaled(number)
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


def _scaled(value: int) -> str:
    text = f"{value / _VIEWBOX:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


# ---------------------------------------------------------------- segment

# The segment skill.

_FREE = int(Allow.FREE)  # an int, because enum lookup is slow


class SegmentSkill(SkillTask):
    """One outline: x, y and size of its box, then path text until EOS, in any order.

    The first two coords and size make the box; earlier path text is emitted with it. No token is
    masked: the path is text of the whole vocabulary, whose pieces cross the grammar's tokens, so
    a mask would need a table of states for each tokenizer. Moondream's own inference masks none
    either. An invalid path is found by parsing.
    """

    has_payload = True

    def __init__(self, setup: TaskSetup, label: str, tokenizer: Tokenizer) -> None:
        super().__init__(setup)
        self._label = label
        self._tokenizer = tokenizer
        self._coords: list[float] = []
        self._size: tuple[float, float] | None = None
        self._certainties: list[Certainty | None] = []  # of the box's tokens
        self._box: ImageBox | None = None
        self._path = SvgPath()

    def constraint(self) -> int:
        return _FREE

    def result(self, finish_reason: FinishReason) -> SegmentOutput:
        """No outline without a box; an empty path if the text is invalid."""
        if self._box is None:
            return SegmentOutput()
        outline = MaskOutline(
            path=self._path.text,
            box=self._box,
            label=self._label,
            confidence=self._confidence(self._certainties),
        )
        return SegmentOutput(segments=(outline,))

    def _read(self, token: SampledToken) -> list[Event]:
        if token.token_id == self._tokens.eos:
            self.finish_reason = FinishReason.STOP
            return []
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
