"""A Moondream model's configuration."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Annotated

import msgspec

from legato_engine.errors import InvalidField
from legato_engine.models.text import SamplingDefaults

ARCHITECTURE = "moondream2"
ARCHITECTURE_3 = "moondream3"

_LARGEST = 2**24  # of any size, far above that of a model
Size = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
Index = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]


class Gelu(enum.StrEnum):
    """Forms of the gelu."""

    TANH = "tanh"
    EXACT = "exact"


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The vision encoder and its crops; `max_crops` up to 1: no tiles."""

    dim: Size
    ff_dim: Size
    num_layers: Size
    num_heads: Size
    patch_size: Size
    crop_size: Size
    max_crops: Index
    overlap_margin: Index
    proj_inner_dim: Size

    @property
    def grid(self) -> int:
        """Patches along a side of a crop."""
        return self.crop_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """Embeddings of one image of any size."""
        return self.grid * self.grid

    @property
    def window(self) -> int:
        """Pixels from one tile to the next."""
        return (self.grid - 2 * self.overlap_margin) * self.patch_size


class TauConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gains on queries and values; published sources disagree on the gelu."""

    gelu: Gelu = Gelu.TANH


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts instead of MLPs from `first_layer` on, `num_active` per token."""

    first_layer: Index
    num_experts: Size
    num_active: Size
    inner_dim: Size


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decoder; `tau` None: no gains; `moe` None: MLPs only."""

    dim: Size
    ff_dim: Size
    num_layers: Size
    num_heads: Size
    vocab_size: Size
    max_context: Size
    rope_theta: Annotated[float, msgspec.Meta(gt=0, le=1e12)]
    rotary_dim: Size
    tau: TauConfig | None = None
    moe: MoEConfig | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class RegionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coordinates and sizes: Fourier features in, bins out.

    `inner_dim` None: heads of a norm and one linear layer. Bin b of B coord bins means b / B; with
    `coord_reaches_one`, b / (B - 1).
    """

    coord_features: Size
    size_features: Size
    coord_bins: Size
    size_bins: Size
    inner_dim: Size | None
    coord_reaches_one: bool = False

    @property
    def coord_divisor(self) -> int:
        return self.coord_bins - 1 if self.coord_reaches_one else self.coord_bins


class RefinerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Refinement of outlines by vision block `early_block` and the last, `iterations` times."""

    early_block: Index
    iterations: Index = 5


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ids that carry no text."""

    bos: int
    eos: int
    answer: int
    thinking: int
    coord: int
    size: int
    ground_start: int
    ground_end: int


class Template(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids around a request's spatial references and text."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


class CaptionTemplates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whole prompts, one per length."""

    short: tuple[int, ...]
    normal: tuple[int, ...]
    long: tuple[int, ...]


class Templates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Templates by skill; None: the model lacks the skill.

    A query suffix may end with several answer ids, a training artefact; as many separate reasoning
    from the answer.
    """

    caption: CaptionTemplates | None = None
    query: Template | None = None
    query_alone: Template | None = None  # of a first question without an image; None: as `query`
    query_reasoning: Template | None = None
    detect: Template | None = None
    point: Template | None = None
    segment: Template | None = None


class Suppression(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ids that are never sampled in text.

    If answers may hold coords and sizes, text rows read and feed back their values.
    """

    answer: tuple[int, ...] = ()  # in answers and captions
    reasoning: tuple[int, ...] = ()  # before the answer


class MoondreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model without weights and tokenizer; `sampling` is of text, other skills are greedy.

    `notice` tells people the model's limits.
    """

    architecture: str
    name: str
    vision: VisionConfig
    text: TextConfig
    region: RegionConfig
    tokens: SpecialTokens
    templates: Templates
    suppression: Suppression | None = None
    refiner: RefinerConfig | None = None  # None: outlines cannot be refined
    sampling: SamplingDefaults = SamplingDefaults()
    notice: Annotated[str, msgspec.Meta(max_length=500)] = ""

    @property
    def prefix_length(self) -> int:
        """Positions of BOS and the image."""
        return 1 + self.vision.num_tokens

    @property
    def suppressed(self) -> Suppression:
        """The configured ids, or Moondream 2's.

        Its answers hold no values, so that plain text does not pay for reading them.
        """
        if self.suppression is not None:
            return self.suppression
        tokens = self.tokens
        return Suppression(
            answer=(tokens.answer, tokens.coord, tokens.size), reasoning=(tokens.eos, tokens.size)
        )

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that open the answer after reasoning."""
        query = self.templates.query
        return max(1, 0 if query is None else query.suffix.count(self.tokens.answer))

    @property
    def has_values_in_text(self) -> bool:
        return not {self.tokens.coord, self.tokens.size} <= set(self.suppressed.answer)


def parse_config(data: bytes) -> MoondreamConfig:
    """Parse a config.json.

    Raises:
        InvalidField: a field is missing, unknown or inconsistent.
    """
    try:
        config = msgspec.json.decode(data, type=MoondreamConfig)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidField(f"config.json: {error}", field="weights") from None
    if problem := _problem(config):
        raise InvalidField(f"config.json: {problem}", field="weights")
    return config


def _problem(config: MoondreamConfig) -> str | None:
    vision, text = config.vision, config.text
    if config.architecture not in (ARCHITECTURE, ARCHITECTURE_3):
        known = f"{ARCHITECTURE!r} or {ARCHITECTURE_3!r}"
        return f"architecture is {config.architecture!r}, not {known}"
    if vision.crop_size % vision.patch_size:
        return "crop_size is not a multiple of patch_size"
    if vision.window <= 0:
        return "overlap_margin leaves no window"
    if vision.dim % vision.num_heads or text.dim % text.num_heads:
        return "num_heads does not divide dim"
    if text.rotary_dim % 2 or text.rotary_dim > text.head_dim:
        return "rotary_dim is odd or wider than a head"
    if config.refiner is not None and not 0 <= config.refiner.early_block < vision.num_layers:
        return "early_block of refiner is no block of the vision encoder"
    if config.prefix_length >= text.max_context:
        return "an image does not fit max_context"
    named = msgspec.to_builtins((config.tokens, config.templates, config.suppression))
    if wrong := [each for each in _ids(named) if not 0 <= each < text.vocab_size]:
        return f"{wrong[0]} is no id of a vocabulary of {text.vocab_size} tokens"
    return _problem_of_experts(text)


def _problem_of_experts(text: TextConfig) -> str | None:
    moe = text.moe
    if moe is None:
        return None
    if not 0 <= moe.first_layer < text.num_layers:
        return "first_layer of moe is no layer"
    if not 1 <= moe.num_active <= moe.num_experts:
        return "num_active is not between 1 and num_experts"
    return None


def _ids(value: object) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _ids(each)
