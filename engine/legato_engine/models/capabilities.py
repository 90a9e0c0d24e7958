"""What a model may offer beyond `Model`: one protocol per capability.

Shape legend: B rows, C images, P prefix positions, D text width, M pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from legato_engine.core.results import Outline
from legato_engine.layers.lora import AdapterBank, AdapterWeights
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.paged_cache import Chunk, KVCache
from legato_engine.models.step_kernels import StepKernels
from legato_engine.speculative.proposer import Proposer

Pinned = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates page-locked host memory: `Device.pinned`."""


class ValueHeads(Protocol):
    """Heads that read the value (a coordinate, a size) of a sampled token."""

    def values(
        self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor, logits_BV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Payloads, zero for plain tokens, and certainties (`Certainty`), one for them.

        Both [B, 2] float32; `logits_BV` are constrained.
        """
        ...

    def payload_logprobs(
        self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor, payload_B2: torch.Tensor
    ) -> torch.Tensor:
        """[B] float32 of the payloads that `values` returned, zero for plain tokens."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """A fine-tune on the host; `key` names the content."""

    key: str
    rank: int
    weights: AdapterWeights
    num_bytes: int


class AdapterSupport(Protocol):
    """Low-rank adapters, chosen by row."""

    def adapter_bank(self, num_slots: int, max_rank: int) -> AdapterBank: ...

    def read_adapter(self, data: bytes, key: str, max_rank: int) -> Adapter:
        """Parse an adapter file, on any thread, without the compute stream.

        Raises:
            AdapterUnusable: the file does not fit.
        """
        ...


class AcceleratedStep(Protocol):
    """Kernels for a whole decode step."""

    def step_kernels(self, kv: KVCache, adapters: AdapterBank | None) -> StepKernels | None:
        """None if the kernels cannot run on the device or the cache."""
        ...


class ChunkedPrefill(Protocol):
    """Prompts in passes of fixed shape."""

    def prefill_chunk(self, x_TD: torch.Tensor, chunk: Chunk, kv: KVCache) -> torch.Tensor:
        """[T, D], as `Model.prefill`, without reading a device value on the host."""
        ...


class ImageEncoder(Protocol):
    """Embeds images in steps of fixed shape at fixed addresses, one image at a time.

    Calls for an image of up to `max_crops` crops, in order: `stage` (on the host), `upload`, `cut`,
    `encode` of the first crops; for each further range, ascending, `gather`, `encode`, `scatter`;
    then `finish`. `cut`, `encode`, `finish` and `cache` can be captured.

    `index` selects a buffer, which holds pixels and embeddings until its next image.
    """

    max_crops: int
    embeddings_CPD: torch.Tensor
    """By image buffer: BOS and the image."""

    def stage(self, index: int, image: PreparedImage) -> None:
        """Put the image into pinned memory."""
        ...

    def upload(self, index: int) -> None: ...

    def cut(self) -> None:
        """Cut the image uploaded last."""
        ...

    def gather(self, first: int, stop: int) -> None:
        """Copy crops to where `encode` reads `gathered` ones."""
        ...

    def encode(self, count: int, *, gathered: bool) -> None:
        """Encode the first `count` crops, or the gathered ones."""
        ...

    def scatter(self, first: int, stop: int) -> None:
        """Copy features of gathered crops back."""
        ...

    def finish(self, index: int) -> torch.Tensor:
        """[P, D] of BOS and the image, in the buffer."""
        ...

    def cache(self, first: int, pages_CM: torch.Tensor, kv: KVCache) -> None:
        """Run the decoder over C buffers from `first`, in one pass.

        The bits may differ from those of `Model.cache_span`.
        """
        ...


class ImageEncoding(Protocol):
    """Image encoding on the device."""

    def image_encoder(self, pinned: Pinned, num_images: int) -> ImageEncoder: ...


class DraftReader(Protocol):
    """Drafts trained for this model."""

    def draft_proposer(self, path: Path, kv: KVCache) -> Proposer:
        """Read a draft that proposes tokens from this KV cache.

        Raises:
            InvalidField: the file does not fit the model.
        """
        ...


class MaskRefiner(Protocol):
    """Refines outlines, one at a time; `given` and `answer` have fixed addresses.

    Calls, in order: `prepare` (any thread); on the compute stream a copy of `tensors` into `given`,
    then `refine`, which can be captured; `finish` (any thread) on a copy of `answer`. If `prepare`
    or `finish` raises, the outline stays unrefined.
    """

    given: tuple[torch.Tensor, ...]
    answer: torch.Tensor

    def prepare(self, outline: Outline, image: PreparedImage) -> Any:
        """Crop an image of a frontend that is `keeping_images`."""
        ...

    def tensors(self, prepared: Any) -> tuple[torch.Tensor, ...]:
        """Host tensors of the shapes and dtypes of `given`."""
        ...

    def refine(self) -> None: ...

    def finish(self, outline: Outline, prepared: Any, answer: Any) -> Outline:
        """`answer` is a numpy array."""
        ...


class RefinerReader(Protocol):
    """Refiners of outlines trained for this model."""

    def mask_refiner(self, path: Path) -> MaskRefiner:
        """Read a refiner's weights.

        Raises:
            InvalidField: the file does not fit the model.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a loaded model; None for each that it lacks."""

    values: ValueHeads | None = None
    adapters: AdapterSupport | None = None
    step: AcceleratedStep | None = None
    images: ImageEncoding | None = None
    drafts: DraftReader | None = None
    refiners: RefinerReader | None = None
    chunks: ChunkedPrefill | None = None
    own_threads: bool = False
    """It computes on the CPU with threads of its own, and torch needs one."""
