"""Support check of the megakernel: a kernel for a model, or the reason why not."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from legato_engine.kernels.cuda import capability, skinny_gemm
from legato_engine.kernels.cuda.capability import HOPPER, Gpu, gpu_of
from legato_engine.kernels.cuda.decoder import DecoderSizes
from legato_engine.kernels.cuda.module import checked, compile_ahead
from legato_engine.kernels.cuda.value_heads import TwoLayerValues
from legato_engine.kernels.decode_loop import BatchKind, Build, MegakernelOffer
from legato_engine.kernels.megakernel.kernel import (
    MAX_PAGES,
    MAX_SHARED,
    RING_STAGES,
    SOURCE,
    MegakernelBuild,
    MegakernelWeights,
    model_sizes,
    shared_body,
    source_folder,
    value_dims,
    values_obstacle,
)
from legato_engine.kernels.megakernel.program import (
    BLOCKS_AT_ONCE,
    WORD_BYTES,
    WORDS,
    build_program,
    max_instructions,
)
from legato_engine.kernels.megakernel.sizes import (
    BLOCK,
    HEAD_DIM,
    MAX_TOKENS,
    PAGE,
    ROTARY_DIM,
    ModelSizes,
)
from legato_engine.kernels.parameters import Affine, DecoderLayer, DenseMlp
from legato_engine.speculation import BlockPolicy

if TYPE_CHECKING:
    from legato_engine.kernels.decode_loop import MegakernelRows
    from legato_engine.kernels.step import StepCache

_SPARE = 1.2  # of the weights' memory: packing also needs a layer
_MAX_DRAFTING_ROWS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTarget:
    """Model and device that the kernel is asked to serve."""

    sizes: DecoderSizes
    num_layers: int
    plain: bool  # every layer is a dense MLP beside attention, without gains
    dtype: torch.dtype
    gpu: Gpu | None  # None: there is none
    processors: int
    free_bytes: int


def _instructions_fit(target: KernelTarget) -> bool:
    """Return whether the instructions fit beside the ring in every build."""
    sizes = model_sizes(target.sizes, target.num_layers)
    body = max(shared_body(sizes, ring, 8 * tiles) for tiles, ring in RING_STAGES.items())
    return body + max_instructions(target.num_layers) * WORDS * WORD_BYTES <= MAX_SHARED


def _adds_alike(target: KernelTarget) -> bool:
    sizes, parts = model_sizes(target.sizes, target.num_layers), target.sizes.parts
    return (
        sizes.out_parts == parts
        and skinny_gemm.chunk(target.sizes.mixed_dim // parts) == sizes.chunk
    )


_LIMITS: tuple[tuple[str, Callable[[KernelTarget], bool]], ...] = (
    ("needs a GPU of compute capability 9.0", lambda w: w.gpu == HOPPER),
    ("needs weights in bf16", lambda w: w.dtype is torch.bfloat16),
    ("needs a KV cache in bf16", lambda w: w.sizes.kv_bytes == 2),
    ("needs layers with parallel attention and dense MLP, without gains", lambda w: w.plain),
    (
        f"needs heads of {HEAD_DIM} dimensions, {ROTARY_DIM} of them rotated",
        lambda w: w.sizes.dim == w.sizes.num_heads * HEAD_DIM and w.sizes.rotary_dim == ROTARY_DIM,
    ),
    (
        f"needs an MLP of 2 to {BLOCKS_AT_ONCE} times the width",
        lambda w: w.sizes.ff_dim in [w.sizes.dim * n for n in range(2, BLOCKS_AT_ONCE + 1)],
    ),
    (
        f"needs a vocabulary of at least the width, a multiple of {BLOCK}",
        lambda w: w.sizes.vocab_size % BLOCK == 0 and w.sizes.vocab_size >= w.sizes.dim,
    ),
    (
        f"runs up to {MAX_PAGES} pages of {PAGE} positions a row",
        lambda w: w.sizes.page_size == PAGE and w.sizes.max_pages <= MAX_PAGES,
    ),
    (
        f"needs a multiprocessor for each {BLOCK} of the width",
        lambda w: w.sizes.dim // BLOCK <= w.processors,
    ),
    ("splits the sums of a layer's output differently from the captured kernels", _adds_alike),
    ("has no room in shared memory for the instructions of so many layers", _instructions_fit),
    (
        "needs memory for a second copy of the weights",
        lambda w: model_sizes(w.sizes, w.num_layers).weight_bytes * _SPARE <= w.free_bytes,
    ),
)


def unsupported_reason(target: KernelTarget) -> str | None:
    """Return the first limit that the model or its device exceeds, or None."""
    return next((text for text, holds in _LIMITS if not holds(target)), None)


def kernel_target(
    sizes: DecoderSizes, num_layers: int, device: torch.device, dtype: torch.dtype, *, plain: bool
) -> KernelTarget:
    if device.type != "cuda":
        return KernelTarget(sizes, num_layers, plain, dtype, None, 0, 0)
    properties = torch.cuda.get_device_properties(device)
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    count = properties.multi_processor_count
    return KernelTarget(sizes, num_layers, plain, dtype, gpu_of(device), count, free)


# ---------------------------------------------------------------- identity of measured times

PACKAGES = ("legato_engine.kernels.cuda", "legato_engine.kernels.megakernel")


def subject(
    sizes: DecoderSizes,
    num_layers: int,
    builds: Collection[Build],
    policy: BlockPolicy | None,
    device: torch.device,
) -> Mapping[str, str]:
    """Return what measured times depend on: GPU, driver, model sizes, kernel code."""
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
        "driver": str(checked(driver.cuDriverGetVersion())),
        "model": f"{sizes}, {num_layers} layers",
        "builds": ", ".join(f"{build.kind} {build.rows}" for build in builds),
        "drafts": "" if policy is None else f"{type(policy).__name__} of {policy.max_block}",
        "code": code_hash(),
    }


def code_hash() -> str:
    """Hash the kernels, their launch code and the megakernel's program."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in code_files(package):
            digest.update(f"{package}/{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def code_files(package: str) -> list[Path]:
    folder = Path(str(importlib.resources.files(package)))
    return [each for each in sorted(folder.rglob("*")) if each.suffix in (".py", ".cu", ".cuh")]


# ---------------------------------------------------------------- decoder


class MegakernelDecoder:
    """All builds that a model's launches need; launches must not overlap."""

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
        """Compile the `wanted` builds, with `values` and for rows that draft by a `policy`."""
        drafts, block = policy is not None, 0 if policy is None else policy.max_block
        self.max_rows = {
            kind: max(build.rows for build in wanted if build.kind is kind)
            for kind in sorted({build.kind for build in wanted})
        }
        self.program = build_program(sizes, RING_STAGES[1])
        """Program of words for 8 rows; the others differ in the ring, values and drafts."""
        weights = MegakernelWeights(self.program, layers, head, head_norm)

        def builds(of: ModelSizes, values: TwoLayerValues | None = None) -> list[MegakernelBuild]:
            kind = BatchKind.of(values=values is not None, drafts=drafts)
            tiles = sorted({-(-each.tokens(block) // 8) for each in wanted if each.kind is kind})
            return [
                MegakernelBuild(
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
        """Builds for 8 and 16 tokens, as far as they are wanted."""
        self.value_builds: list[MegakernelBuild] = []
        """Builds for launches in which some row's tokens may have values."""
        if values is not None:
            self.value_builds = builds(dataclasses.replace(of, values=value_dims(values)), values)
        made = (*self.builds, *self.value_builds)
        compile_ahead(
            SOURCE,
            [each.constants for each in made],
            capability.current_gpu().arch(own=True),
            folder=source_folder(),
        )
        for each in made:
            each.load()

    def run(
        self,
        rows: MegakernelRows,
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
    """List the builds for 8 and 16 tokens that `max_rows` rows need.

    Rows have `block` draft tokens each; some rows may have `values`, and no draft tokens.

    More rows run faster as captured loops, and so do more than two drafting rows.
    """
    drafts = block > 0
    kinds = [BatchKind.of(values=each, drafts=drafts) for each in (False, True)[: 1 + values]]
    builds = []
    for kind in kinds:
        limit, each = max_rows, 1 + block
        if kind is BatchKind.DRAFTS:
            limit = min(max_rows, _MAX_DRAFTING_ROWS)
        elif kind is BatchKind.BOTH:
            limit, each = max_rows + (max_rows - 1) * block, 1
        counts = {min(limit, 8 * tiles // each) for tiles in RING_STAGES} - {0}
        builds += [Build(kind, count) for count in sorted(counts)]
    return tuple(builds)


# ---------------------------------------------------------------- offer


def offer(
    sizes: DecoderSizes,
    layers: Sequence[DecoderLayer],
    head: Affine,
    head_norm: Affine,
    embedding: torch.Tensor,
    cache: StepCache,
    values: TwoLayerValues | None,
    max_rows: int,
    policy: BlockPolicy | None,
) -> MegakernelOffer | str:
    """Offer the megakernel for batches of up to `max_rows` rows, or return the reason why not.

    `values`: value heads of coordinates, if the model has them. `policy`: block sizes of drafts.
    """
    plain = all(isinstance(layer.mlp, DenseMlp) and layer.tau is None for layer in layers)
    target = kernel_target(sizes, len(layers), embedding.device, embedding.dtype, plain=plain)
    if reason := unsupported_reason(target):
        return reason
    if values is not None and values_obstacle(sizes, values) is not None:
        values = None
    block = 0 if policy is None else policy.max_block
    builds = builds_for(max_rows, values=values is not None, block=block)
    if not builds:
        return f"runs up to {MAX_TOKENS - 1} draft tokens a row, not {block}"

    def make(wanted: Collection[Build]) -> MegakernelDecoder:
        return MegakernelDecoder(
            model_sizes(sizes, len(layers)),
            layers,
            head,
            head_norm,
            embedding,
            cache,
            wanted=wanted,
            values=values,
            policy=policy,
        )

    about = subject(sizes, len(layers), builds, policy, embedding.device)
    return MegakernelOffer(about, builds, make)
