"""The skills, and the loops that decode them."""

from collections.abc import Sequence

from tests.reference.moondream3 import prompts
from tests.reference.moondream3.config import Config, Length
from tests.reference.moondream3.decoding import Decoder, Step
from tests.reference.moondream3.numerics import Array, Weights
from tests.reference.moondream3.prompts import Coord, Ref, Size, Text, Token
from tests.reference.moondream3.results import (
    Answer,
    Box,
    Boxes,
    FinishReason,
    Point,
    Points,
    Segment,
    box_of,
    grounding,
    leading_box,
)

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
