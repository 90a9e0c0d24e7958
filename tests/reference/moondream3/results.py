"""The results of a run: its choices, and the answers, points and boxes made of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.reference.moondream3.config import Config
from tests.reference.moondream3.decoding import Step
from tests.reference.moondream3.prompts import Coord, Size, Text, Token

FinishReason = Literal["stop", "length"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """Edges as shares of the whole image."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


@dataclass(frozen=True)
class Grounding:
    """A stretch of a reasoning, start and end in text tokens, and the points that belong to it."""

    start: int
    end: int
    points: list[Point]


@dataclass(frozen=True)
class Run:
    """All choices of one request in order, EOS and the end of a reasoning included."""

    steps: list[Step]
    finish_reason: FinishReason

    @property
    def token_ids(self) -> list[int]:
        """The ids, where coordinates and sizes have theirs."""
        return [step.token_id for step in self.steps]

    @property
    def tokens(self) -> list[Token]:
        """The tokens, where coordinates and sizes are values."""
        return [step.token for step in self.steps]


@dataclass(frozen=True)
class Answer(Run):
    """What a query or a caption leaves, without the tokens that end it.

    `reasoning` is None where none was asked for.
    """

    answer: list[Token]
    reasoning: list[Token] | None
    grounding: list[Grounding]


@dataclass(frozen=True)
class Points(Run):
    """Centres of objects."""

    points: list[Point]


@dataclass(frozen=True)
class Boxes(Run):
    """Boxes of objects."""

    boxes: list[Box]


@dataclass(frozen=True)
class Segment(Run):
    """The box that the outline's viewbox spans, if one was decoded, and the ids of its path."""

    box: Box | None
    path_ids: list[int]


def box_of(centre: Point, size: Size, config: Config) -> Box:
    """From a centre and a size; clamped to the image as the switch `clamp_boxes` says."""
    edges = [
        centre[0] - size.width / 2,
        centre[1] - size.height / 2,
        centre[0] + size.width / 2,
        centre[1] + size.height / 2,
    ]
    if config.switches.clamp_boxes:
        edges = [min(max(edge, 0.0), 1.0) for edge in edges]
    return Box(*edges)


def leading_box(tokens: Sequence[Token], config: Config) -> Box | None:
    """The box of the first two coordinates and the first size, always clamped."""
    coords = [token.value for token in tokens if isinstance(token, Coord)]
    sizes = [token for token in tokens if isinstance(token, Size)]
    if len(coords) < 2 or not sizes:
        return None
    return box_of((coords[0], coords[1]), sizes[0], config.switched(clamp_boxes=True))


def grounding(thoughts: Sequence[Token], config: Config) -> list[Grounding]:
    """The stretches between the two grounding ids, which are no text; nor are values.

    A coordinate without its partner is dropped, and so is a stretch without its end.
    """
    found: list[Grounding] = []
    start: int | None = None
    coords: list[float] = []
    num_texts = 0
    for token in thoughts:
        match token:
            case Text(config.ids.ground_start):
                start, coords = num_texts, []
            case Text(config.ids.ground_end):
                if start is not None:
                    pairs = list(zip(coords[::2], coords[1::2], strict=False))
                    found.append(Grounding(start, num_texts, pairs))
                start = None
            case Text():
                num_texts += 1
            case Coord(value):
                coords.append(value)
    return found
