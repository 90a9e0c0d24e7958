"""Recipe of a quantised checkpoint, which `legato quantize` writes into the file's metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from legato_engine.config import Progress
from legato_engine.errors import InvalidField
from legato_engine.kernels.map_codes import GROUPS, KINDS, CodeFormat, WeightKind, format_of
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint import TensorHeader
from legato_engine.models.gguf import is_gguf
from legato_engine.models.untrusted import reason

_VERSION = 1
RECIPE_KEY = "legato_recipe"
"""Name of the recipe in the metadata."""


class _Version(msgspec.Struct, frozen=True):
    version: int


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quantisation of a checkpoint; `group_size` 0: a scale for each row.

    `maps` are the kinds of its maps, with `folds_norms` each with the norm before it folded in;
    `source` the SHA-256 of the files that it was made from.
    """

    version: int
    kind: str
    group_size: int
    maps: dict[str, str]
    folds_norms: bool
    source: dict[str, str]
    legato: str

    @property
    def code_format(self) -> CodeFormat:
        """Return the format of the maps, apart from the head."""
        return format_of(KINDS[self.kind], self.group_size)


@dataclasses.dataclass(frozen=True, slots=True)
class Quantisation:
    """Tensors of a checkpoint that stay, the bytes of its codes, and how to make it."""

    kept: Sequence[TensorHeader]
    num_bytes: int
    recipe: Callable[[dict[str, str], str], Recipe]
    codes: Callable[[Progress], dict[str, torch.Tensor]]


def require_plain(weights: Path | None) -> Path:
    """Return the weights of a model if they can be quantised.

    Raises:
        InvalidField: they are random, or a GGUF file, or quantised.
    """
    if weights is None:
        raise InvalidField("random weights have no checkpoint to quantise", field="weights")
    if is_gguf(weights):
        problem = "is a GGUF file: use weight_dtype stored, or quantise the folder that it was made"
        raise InvalidField(f"{weights} {problem} from", field="weights")
    if RECIPE_KEY in checkpoint.metadata(weights):
        problem = f"{weights} is quantised already: use the checkpoint that it was made from"
        raise InvalidField(problem, field="weights")
    return weights


class QuantisedMaps(NamedTuple):
    """Names of a family's quantised maps in its recipes; the kind of the head is `of_head`."""

    maps: tuple[str, ...]
    head: str
    folds_norms: bool

    def recipe(self, code_format: CodeFormat, source: dict[str, str], legato: str) -> Recipe:
        names = {kind: name for name, kind in KINDS.items()}
        kind = names[code_format.kind]
        maps = dict.fromkeys(self.maps, kind) | {self.head: names[code_format.kind.of_head]}
        return Recipe(_VERSION, kind, code_format.group, maps, self.folds_norms, source, legato)

    def read(self, weights: Path, weight_dtype: str) -> Recipe | None:
        """Return the recipe of a checkpoint, or None if it is not quantised.

        Raises:
            InvalidField: the recipe is not one of this version's, or differs from `weight_dtype`.
        """
        text = checkpoint.metadata(weights).get(RECIPE_KEY)
        if text is None:
            return None
        try:
            recipe = self._parsed(text)
        except (ValueError, RecursionError) as error:  # of msgspec too
            raise InvalidField(
                f"{weights} was quantised by an unknown recipe ({reason(error)}): use weights that "
                "this version's `legato quantize` wrote, or the checkpoint that they were made "
                "from",
                field="weights",
            ) from None
        if weight_dtype not in ("auto", recipe.kind):
            raise InvalidField(
                f"{weights} was quantised as {recipe.kind} and cannot be read as {weight_dtype}: "
                f"use weight_dtype auto or {recipe.kind}, or the checkpoint that it was made from",
                field="weight_dtype",
            )
        return recipe

    def _parsed(self, text: str) -> Recipe:
        version = msgspec.json.decode(text, type=_Version).version
        if version != _VERSION:
            raise ValueError(f"version {version}, not {_VERSION}")
        recipe = msgspec.json.decode(text, type=Recipe)
        if recipe.kind not in KINDS or KINDS[recipe.kind] is WeightKind.BF16:
            raise ValueError(f"kind {recipe.kind[:40]!r}")
        groups = GROUPS if recipe.kind == "int4" else (0,)
        known = self.recipe(recipe.code_format, recipe.source, recipe.legato)
        if recipe.group_size not in groups or recipe != known:
            raise ValueError(f"not the maps and groups of {recipe.kind}")
        return recipe
