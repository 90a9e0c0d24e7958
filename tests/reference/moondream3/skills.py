"""The skills: greedy decoding, the loops that decode them, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.reference.moondream3 import prompts, text
from tests.reference.moondream3.config import Config, Length
from tests.reference.moondream3.numerics import Array, Weights
from tests.reference.moondream3.prompts import Coord, Ref, Size, Text, Token

# ---------------------------------------------------------------- results
# The results of a run: its choices, and the answers, points and boxes made of them.

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


# ---------------------------------------------------------------- decoding
# Greedy decoding, a token at a time.


def embed(token: Token, config: Config, weights: Weights) -> Array:
    """The input embedding [D] of a token; a value's embedding replaces that of its id."""
    match token:
        case Text(token_id):
            return weights["text.wte"][token_id].astype(np.float64)
        case Coord(value):
            return prompts.encode_coord(value, config, weights)
        case Size(width, height):
            return prompts.encode_size(width, height, config, weights)


def sequence_embeddings(
    prompt: Sequence[Token], image_PD: Array | None, config: Config, weights: Weights
) -> tuple[Array, int]:
    """BOS, the image, the prompt: [T, D]; and how many of them attend both ways.

    Without an image none do.
    """
    bos_D = embed(Text(config.ids.bos), config, weights)
    prompt_TD = [embed(token, config, weights) for token in prompt]
    if image_PD is None:
        return np.stack([bos_D, *prompt_TD]), 0
    return np.stack([bos_D, *image_PD, *prompt_TD]), config.image_prefix


@dataclass(frozen=True)
class Step:
    """One choice and what it was chosen from."""

    token: Token
    token_id: int
    hidden_D: Array  # before post_ln
    logits_V: Array  # of tokens, before any is ruled out
    bins: (
        Array | None
    )  # [coord_bins] where the token is a coordinate, [2, size_bins] where it is a size


class Decoder:
    """A sequence that grows.

    `embeddings_TD` are all positions so far, `hidden_D` is the residual stream of the last one,
    before post_ln. Without `cached` all positions are computed again for every token.
    """

    def __init__(
        self,
        prompt: Sequence[Token],
        image_PD: Array | None,
        config: Config,
        weights: Weights,
        cached: bool = True,
    ):
        self.config = config
        self.weights = weights
        self._cached = cached
        self.embeddings_TD, self.prefix = sequence_embeddings(prompt, image_PD, config, weights)
        hidden_TD, self._cache = text.prefill(self.embeddings_TD, self.prefix, config, weights)
        self.hidden_D = hidden_TD[-1]

    def feed(self, token: Token) -> None:
        """Adds a position."""
        embedding_D = embed(token, self.config, self.weights)
        self.embeddings_TD = np.concatenate([self.embeddings_TD, embedding_D[None]])
        if self._cached:
            self.hidden_D, self._cache = text.decode_step(
                embedding_D, self._cache, self.config, self.weights
            )
        else:
            self.hidden_D = text.recompute(
                self.embeddings_TD, self.prefix, self.config, self.weights
            )[-1]

    def logits(self) -> Array:
        """Of the next token: [V]."""
        return text.logits(self.hidden_D, self.weights)

    def _step(self, token_id: int, logits_V: Array, spatial: bool) -> Step:
        """A choice with its bin, which is read from the hidden state that chose the id."""
        config, hidden_D = self.config, self.hidden_D
        if spatial and token_id == config.ids.coord:
            bins = prompts.coord_logits(hidden_D, config, self.weights)
            coord = Coord(prompts.coord_value(int(bins.argmax()), config))
            return Step(coord, token_id, hidden_D, logits_V, bins)
        if spatial and token_id == config.ids.size:
            bins = prompts.size_logits(hidden_D, config, self.weights)
            width, height = (prompts.size_value(int(index), config) for index in bins.argmax(-1))
            return Step(Size(width, height), token_id, hidden_D, logits_V, bins)
        return Step(Text(token_id), token_id, hidden_D, logits_V, None)

    def choose(self, spatial: bool = True) -> Step:
        """The likeliest of all tokens; with `spatial`, coord and size ids stand for values."""
        logits_V = self.logits()
        return self._step(int(logits_V.argmax()), logits_V, spatial)

    def choose_or_end(self, token_id: int) -> Step:
        """That token or the end, as the switch `boundary` says."""
        logits_V, eos = self.logits(), self.config.ids.eos
        if self.config.switches.boundary == "restricted":
            ends = logits_V[eos] >= logits_V[token_id]
        else:
            ends = logits_V.argmax() == eos
        return self._step(eos if ends else token_id, logits_V, spatial=True)

    def choose_only(self, token_id: int) -> Step:
        """That token, whatever the logits say."""
        return self._step(token_id, self.logits(), spatial=True)


# ---------------------------------------------------------------- skills
# The skills, and the loops that decode them.

MAX_TOKENS = 768
MAX_OBJECTS = 150


def _generate(decoder: Decoder, end_id: int, budget: int, spatial: bool = True) -> list[Step]:
    """Free decoding until `end_id`, EOS or the budget; an id that ends it is not fed."""
    steps: list[Step] = []
    while len(steps) < budget:
        steps.append(decoder.choose(spatial))
        if steps[-1].token_id in (end_id, decoder.config.ids.eos):
            break
        decoder.feed(steps[-1].token)
    return steps


def _ended(steps: list[Step], token_id: int) -> bool:
    return bool(steps) and steps[-1].token_id == token_id


def _answer(decoder: Decoder, reasoned: list[Step] | None, budget: int) -> Answer:
    """The answer's own tokens, after those of the reasoning."""
    ids, switches = decoder.config.ids, decoder.config.switches
    steps = _generate(decoder, ids.eos, budget, switches.spatial_answers)
    ended = _ended(steps, ids.eos)
    thoughts = None if reasoned is None else _without(reasoned, ids.answer)
    return Answer(
        steps=[*(reasoned or []), *steps],
        finish_reason="stop" if ended else "length",
        answer=_without(steps, ids.eos),
        reasoning=thoughts,
        grounding=grounding(thoughts or [], decoder.config),
    )


def _without(steps: list[Step], end_id: int) -> list[Token]:
    """The tokens before the one that ended them."""
    kept = steps[:-1] if _ended(steps, end_id) else steps
    return [step.token for step in kept]


def _stopped(steps: list[Step], config: Config) -> Answer:
    """A reasoning that ended in EOS, or with the whole budget: there is no answer."""
    thoughts = _without(steps, config.ids.eos)
    reason: FinishReason = "stop" if _ended(steps, config.ids.eos) else "length"
    return Answer(steps, reason, [], thoughts, grounding(thoughts, config))


def query(
    question: Sequence[int],
    config: Config,
    weights: Weights,
    image: Array | None = None,
    refs: Sequence[Ref] = (),
    reasoning: bool = False,
    max_tokens: int = MAX_TOKENS,
    cached: bool = True,
) -> Answer:
    """Answers a question, given as ids, about an image's embeddings [P, D] or about none.

    Raises:
        ValueError: hints without an image, or hints that are none.
    """
    if refs and image is None:
        raise ValueError("hints need a picture")
    prompt = prompts.query_prompt(config.ids, question, refs, reasoning)
    decoder = Decoder(prompt, image, config, weights, cached)
    if not reasoning:
        return _answer(decoder, None, max_tokens)
    steps = _generate(decoder, config.ids.answer, max_tokens)
    each = config.switches.reasoning_budget == "each"
    cut = not _ended(steps, config.ids.answer) and not _ended(steps, config.ids.eos)
    if _ended(steps, config.ids.eos) or (cut and not each):
        return _stopped(steps, config)
    decoder.feed(Text(config.ids.answer))
    return _answer(decoder, steps, max_tokens if each else max_tokens - len(steps))


def caption(
    image: Array,
    config: Config,
    weights: Weights,
    length: Length = "normal",
    max_tokens: int = MAX_TOKENS,
    cached: bool = True,
) -> Answer:
    """Describes an image's embeddings [P, D]."""
    prompt = prompts.caption_prompt(config.ids, length)
    return _answer(Decoder(prompt, image, config, weights, cached), None, max_tokens)


def _objects(
    decoder: Decoder, kinds: Sequence[int], max_objects: int, max_tokens: int
) -> tuple[list[list[Token]], list[Step], FinishReason]:
    """Objects of these kinds of values each, until the end comes in the place of a first value.

    An object that the budget cuts is dropped.
    """
    steps: list[Step] = []
    objects: list[list[Token]] = []
    while len(objects) < max_objects:
        values: list[Token] = []
        for kind in kinds:
            if len(steps) == max_tokens:
                return objects, steps, "length"
            step = decoder.choose_only(kind) if values else decoder.choose_or_end(kind)
            steps.append(step)
            if step.token_id == decoder.config.ids.eos:
                return objects, steps, "stop"
            decoder.feed(step.token)
            values.append(step.token)
        objects.append(values)
    return objects, steps, "length"


def _point(x: Token, y: Token) -> Point:
    assert isinstance(x, Coord)
    assert isinstance(y, Coord)
    return x.value, y.value


def point(
    image: Array,
    name: Sequence[int],
    config: Config,
    weights: Weights,
    refs: Sequence[Ref] = (),
    max_objects: int = MAX_OBJECTS,
    max_tokens: int = MAX_TOKENS,
    cached: bool = True,
) -> Points:
    """Centres of the objects of a name, given as ids."""
    ids = config.ids
    prompt = prompts.point_prompt(ids, name, refs)
    decoder = Decoder(prompt, image, config, weights, cached)
    found, steps, reason = _objects(decoder, [ids.coord, ids.coord], max_objects, max_tokens)
    return Points(steps, reason, [_point(x, y) for x, y in found])


def detect(
    image: Array,
    name: Sequence[int],
    config: Config,
    weights: Weights,
    max_objects: int = MAX_OBJECTS,
    max_tokens: int = MAX_TOKENS,
    cached: bool = True,
) -> Boxes:
    """Boxes of the objects of a name, given as ids."""
    ids = config.ids
    decoder = Decoder(prompts.detect_prompt(ids, name), image, config, weights, cached)
    kinds = [ids.coord, ids.coord, ids.size]
    found, steps, reason = _objects(decoder, kinds, max_objects, max_tokens)
    return Boxes(steps, reason, [_box(x, y, size, config) for x, y, size in found])


def _box(x: Token, y: Token, size: Token, config: Config) -> Box:
    assert isinstance(size, Size)
    return box_of(_point(x, y), size, config)


def segment(
    image: Array,
    name: Sequence[int],
    config: Config,
    weights: Weights,
    refs: Sequence[Ref] = (),
    max_tokens: int = MAX_TOKENS,
    cached: bool = True,
) -> Segment:
    """The outline of an object of a name, given as ids: decoded freely, with the box first."""
    ids = config.ids
    prompt = prompts.segment_prompt(ids, name, refs)
    decoder = Decoder(prompt, image, config, weights, cached)
    steps = _generate(decoder, ids.eos, max_tokens)
    reason: FinishReason = "stop" if _ended(steps, ids.eos) else "length"
    return Segment(
        steps,
        reason,
        box=leading_box([step.token for step in steps], config),
        path_ids=[step.token_id for step in steps if step.token_id > ids.last_special],
    )
