"""Where the resident kernel cannot run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from legato_engine.kernels.cuda import skinny_gemm
from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes
from legato_engine.kernels.cuda.resident import (
    MAX_PAGES,
    MAX_SHARED,
    RING_STAGES,
    model_sizes,
    shared_body,
)
from legato_engine.resident.instructions import WORD_BYTES, WORDS
from legato_engine.resident.operands import BLOCKS_AT_ONCE
from legato_engine.resident.program import most_instructions
from legato_engine.resident.sizes import BLOCK, HEAD_DIM, PAGE, ROTARY_DIM

_CAPABILITY = (9, 0)
_SPARE = 1.2  # of the weights' memory: packing needs a layer besides


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What a model wants to run, and on what."""

    sizes: DecoderSizes
    num_layers: int
    plain: bool  # every layer is a dense MLP beside attention, without gains
    dtype: torch.dtype
    capability: tuple[int, int] | None  # of the GPU; None: there is none
    processors: int
    free_bytes: int


def _instructions_fit(wish: Wish) -> bool:
    """Whether a thread block has memory for them beside its ring, in every build."""
    sizes = model_sizes(wish.sizes, wish.num_layers)
    body = max(shared_body(sizes, ring, 8 * tiles) for tiles, ring in RING_STAGES.items())
    return body + most_instructions(wish.num_layers) * WORDS * WORD_BYTES <= MAX_SHARED


def _adds_alike(wish: Wish) -> bool:
    sizes, parts = model_sizes(wish.sizes, wish.num_layers), wish.sizes.parts
    return (
        sizes.out_parts == parts and skinny_gemm.chunk(wish.sizes.mixed_dim // parts) == sizes.chunk
    )


_LIMITS: tuple[tuple[str, Callable[[Wish], bool]], ...] = (
    ("needs a GPU of compute capability 9.0", lambda w: w.capability == _CAPABILITY),
    ("computes in bf16", lambda w: w.dtype is torch.bfloat16),
    ("caches keys and values in bf16", lambda w: w.sizes.kv_bytes == 2),
    ("takes layers of attention beside a dense MLP, without gains", lambda w: w.plain),
    (
        f"takes heads of {HEAD_DIM} dimensions, {ROTARY_DIM} of them rotated",
        lambda w: w.sizes.dim == w.sizes.num_heads * HEAD_DIM and w.sizes.rotary_dim == ROTARY_DIM,
    ),
    (
        f"takes an MLP of 2 to {BLOCKS_AT_ONCE} times the width",
        lambda w: w.sizes.ff_dim in [w.sizes.dim * n for n in range(2, BLOCKS_AT_ONCE + 1)],
    ),
    (
        f"takes a vocabulary of at least the width, in blocks of {BLOCK}",
        lambda w: w.sizes.vocab_size % BLOCK == 0 and w.sizes.vocab_size >= w.sizes.dim,
    ),
    (
        f"takes up to {MAX_PAGES} pages of {PAGE} positions a row",
        lambda w: w.sizes.page_size == PAGE and w.sizes.max_pages <= MAX_PAGES,
    ),
    (
        f"needs a multiprocessor for each {BLOCK} of the width",
        lambda w: w.sizes.dim // BLOCK <= w.processors,
    ),
    ("adds up a layer's output in other parts than captured steps", _adds_alike),
    ("takes as many layers as a thread block has instructions for", _instructions_fit),
    (
        "needs memory for a second copy of the weights",
        lambda w: model_sizes(w.sizes, w.num_layers).weight_bytes * _SPARE <= w.free_bytes,
    ),
)


def obstacle(wish: Wish) -> str | None:
    """The first limit that a model on its device exceeds, in words, or None."""
    return next((text for text, holds in _LIMITS if not holds(wish)), None)


def wish(
    sizes: DecoderSizes, num_layers: int, device: torch.device, dtype: torch.dtype, *, plain: bool
) -> Wish:
    """What there is on `device`."""
    if device.type != "cuda":
        return Wish(sizes, num_layers, plain, dtype, None, 0, 0)
    properties = torch.cuda.get_device_properties(device)
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    capability = properties.major, properties.minor
    return Wish(sizes, num_layers, plain, dtype, capability, properties.multi_processor_count, free)
