"""All builds of the resident kernel that a model's launches need."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from legato_engine.kernels.cuda.compiler import compile_ahead
from legato_engine.kernels.cuda.module import current_arch
from legato_engine.kernels.cuda.resident import (
    RING_STAGES,
    SOURCE,
    ResidentBuild,
    ResidentWeights,
    source_folder,
)
from legato_engine.kernels.cuda.resident_values import value_dims
from legato_engine.kernels.cuda.value_heads import TwoLayerValues
from legato_engine.kernels.parameters import Affine, DecoderLayer
from legato_engine.kernels.resident_builds import Build, Kind
from legato_engine.resident.program import build_program
from legato_engine.resident.sizes import ModelSizes
from legato_engine.speculative.block_policy import BlockPolicy

if TYPE_CHECKING:
    from legato_engine.kernels.resident_launch import ResidentRows
    from legato_engine.kernels.step import StepCache


class ResidentDecoder:
    """A `kernels.resident_launch.ResidentSteps`; launches must not overlap."""

    def __init__(
        self,
        sizes: ModelSizes,
        layers: Sequence[DecoderLayer],
        head: Affine,
        head_norm: Affine,
        embedding: torch.Tensor,
        cache: StepCache,
        *,
        wanted: Collection[Build],
        values: TwoLayerValues | None = None,
        policy: BlockPolicy | None = None,
    ) -> None:
        """Compile what is `wanted` of `builds_for`: with `values`, and for rows that draft by a
        `policy`.
        """
        drafts, block = policy is not None, 0 if policy is None else policy.max_block
        self.most_rows = {
            kind: max(build.rows for build in wanted if build.kind is kind)
            for kind in sorted({build.kind for build in wanted})
        }
        self.program = build_program(sizes, RING_STAGES[1])
        """Of words, for 8 rows; the others differ in the ring and in values."""
        weights = ResidentWeights(self.program, layers, head, head_norm)

        def builds(of: ModelSizes, values: TwoLayerValues | None = None) -> list[ResidentBuild]:
            kind = Kind.of(values=values is not None, drafts=drafts)
            tiles = sorted({_tiles(each.tokens(block)) for each in wanted if each.kind is kind})
            return [
                ResidentBuild(
                    build_program(of, RING_STAGES[each]),
                    weights,
                    embedding,
                    cache,
                    each,
                    values=values,
                    policy=policy,
                    compile_source=None,
                )
                for each in tiles
            ]

        of = dataclasses.replace(sizes, drafts=drafts)
        self.builds = builds(of)
        """For 8, 16 and 32 tokens, as far as they are wanted."""
        self.value_builds: list[ResidentBuild] = []
        """The same where some row's tokens may have values."""
        if values is not None:
            self.value_builds = builds(dataclasses.replace(of, values=value_dims(values)), values)
        made = (*self.builds, *self.value_builds)
        compile_ahead(
            SOURCE,
            [each.constants for each in made],
            current_arch(own=True),
            folder=source_folder(),
        )
        for each in made:
            each.load()

    def run(
        self,
        rows: ResidentRows,
        num_rows: int,
        num_steps: int,
        *,
        payload: bool = False,
        num_tokens: int = 0,
    ) -> None:
        builds = self.value_builds if payload else self.builds
        build = next(each for each in builds if max(num_rows, num_tokens) <= each.tokens)
        build.run(rows, num_rows, num_steps, num_tokens=num_tokens)

    def fault(self) -> str | None:
        builds = (*self.builds, *self.value_builds)
        return next(filter(None, (build.fault() for build in builds)), None)


def builds_for(max_rows: int, *, values: bool, block: int = 0) -> tuple[Build, ...]:
    """For 8, 16 and 32 tokens, as far as up to `max_rows` rows have so many, with `block` draft
    tokens each; some rows may have `values`, and no draft tokens.
    """
    drafts = block > 0
    kinds = [Kind.of(values=each, drafts=drafts) for each in (False, True)[: 1 + values]]
    builds = []
    for kind in kinds:
        most, each = max_rows, 1 + block
        if kind is Kind.BOTH:
            most, each = max_rows + (max_rows - 1) * block, 1
        counts = {min(most, 8 * tiles // each) for tiles in RING_STAGES} - {0}
        builds += [Build(kind, count) for count in sorted(counts)]
    return tuple(builds)


def _tiles(tokens: int) -> int:
    return next(tiles for tiles in RING_STAGES if tokens <= 8 * tiles)
