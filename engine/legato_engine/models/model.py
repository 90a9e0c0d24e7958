"""The model seam: what the runtime needs of an architecture, and nothing of its skills' meaning.

Shape legend: T tokens, B rows, D text width, V vocabulary, P prefix positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from legato_engine.core import ImageInfo, Outline, Request
from legato_engine.models.paged_cache import DecodeBatch, KVCache, PrefillSpan
from legato_engine.models.step_kernels import StepKernels
from legato_engine.tasks import Constraint, Task

if TYPE_CHECKING:
    import torch  # frontends import this module, and they never load torch

    from legato_engine.layers.lora import AdapterBank, AdapterWeights
    from legato_engine.speculative.proposer import Proposer


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """A fine-tune on the host: what is added to the weights, for those requests that name it.

    `key` names the content (same file, same key).
    """

    key: str
    rank: int
    weights: AdapterWeights
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedImage:
    """A decoded picture, ready for the vision tower.

    `pixels` is the model's own layout (numpy uint8, crops first); `key` names the content (same
    picture, same key), it is what shared prefixes are keyed by.
    """

    key: str
    pixels: Any
    info: ImageInfo
    num_bytes: int
    num_crops: int = 0  # for a `ImageEncoder`; 0: it takes none, `prefix_embeddings` does


class ImageEncoder(Protocol):
    """Pictures' embeddings in steps of fixed shape, at fixed addresses; one picture at a time.

    It takes pictures whose `num_crops` is not 0, and none of them has more than `max_crops`.
    In the order of their calls: `stage` (host), `upload`, `cut`, `encode` for its first crops, for
    further ranges, that follow each other, `take`, `encode` and `give`, then `finish`. `cut`,
    `encode`, `finish` and `cache` can be captured.

    A picture has a place, where its pixels are staged and its embeddings stay until the next one
    of that place.
    """

    max_crops: int
    embeddings_CPD: torch.Tensor
    """Of the places: BOS and the picture."""

    def stage(self, place: int, image: PreparedImage) -> None:
        """See on the host to it that the picture is in pinned memory, until the place's next."""
        ...

    def upload(self, place: int) -> None:
        """Enqueue the copies."""
        ...

    def cut(self) -> None:
        """Enqueue: the crops of the picture uploaded last."""
        ...

    def take(self, first: int, stop: int) -> None:
        """Enqueue: crops `first` to `stop` become what `encode` reads as taken."""
        ...

    def encode(self, count: int, *, taken: bool) -> None:
        """Enqueue the vision tower over the first `count` crops, or over those that were taken."""
        ...

    def give(self, first: int, stop: int) -> None:
        """Enqueue: what `encode` made of the taken becomes the features of those crops."""
        ...

    def finish(self, place: int) -> torch.Tensor:
        """Enqueue the rest; [P, D] of BOS and the picture, that place's embeddings."""
        ...

    def cache(self, first: int, pages_CM: torch.Tensor, kv: KVCache) -> None:
        """Enqueue the decoder over the embeddings of C places from `first` on, in one pass.

        Their bits may differ from those of `cache_span` over one after another.
        """
        ...


class MaskRefiner(Protocol):
    """Makes outlines better, one at a time; `given` and `answer` are tensors at fixed addresses.

    In the order of their calls: `prepare` (any thread), then on the compute stream what `tensors`
    gives is copied into `given`, `refine` runs, which can be captured, and `finish` (any thread)
    reads a copy of `answer`. `prepare` and `finish` may raise anything: that outline stays as it
    is.
    """

    given: tuple[torch.Tensor, ...]
    answer: torch.Tensor

    def prepare(self, outline: Outline, image: PreparedImage) -> Any:
        """What is needed of a picture that a frontend made `keeping_images`."""
        ...

    def tensors(self, prepared: Any) -> tuple[torch.Tensor, ...]:
        """Host tensors like those of `given`."""
        ...

    def refine(self) -> None:
        """Enqueue: `given` becomes `answer`."""
        ...

    def finish(self, outline: Outline, prepared: Any, answer: Any) -> Outline:
        """The better outline, of an answer as a numpy array."""
        ...


class Model(Protocol):
    """An architecture with its weights on a device. All methods run on the compute stream.

    Pure functions of their arguments and the weights: no allocation is remembered, no host reads of
    device values, so decode can be captured as a graph.
    """

    constraints: tuple[Constraint, ...]  # index 0 is free
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    width: int
    max_context: int
    num_parameters: int
    bos_token: int  # of a model whose prefix is not empty
    dtype: torch.dtype
    kv_scale_L2: torch.Tensor | None  # of its `KVCache`, float32; None: that has the model's dtype

    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        """[P, D]: BOS followed by the image's embeddings; just BOS without an image, or nothing.

        As many as the frontend's `prefix_length`.
        """
        ...

    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        """[T, D]: token embeddings; value-carrying tokens are replaced by their encoded payload."""
        ...

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        """[T, D] final residual stream; writes K and V of the span into its pages."""
        ...

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        """Write what `prefill` writes, where nobody reads what it returns."""
        ...

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        """[B, D] final residual stream; row b attends to positions 0..positions_B[b]."""
        ...

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """[B, V] float32."""
        ...

    def payload(self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor) -> torch.Tensor:
        """[B, 2] float32: the value that goes with each sampled token, zero for plain tokens."""
        ...

    def payload_logprobs(
        self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor, payload_B2: torch.Tensor
    ) -> torch.Tensor:
        """[B] float32: log-probability of what `payload` gave; zero for plain tokens."""
        ...

    def adapter_bank(self, num_slots: int, max_rank: int) -> AdapterBank | None:
        """Room for adapters on the device, to be named by `DecodeBatch` and `PrefillSpan`.

        None for a model that takes none; `read_adapter` then refuses all.
        """
        ...

    def read_adapter(self, data: bytes, key: str, max_rank: int) -> Adapter:
        """An adapter's file; safe on any thread, and apart from the compute stream.

        Raises `AdapterUnusable` saying what does not fit this model.
        """
        ...

    def draft_proposer(self, path: Path, kv: KVCache) -> Proposer:
        """The draft of a file, that guesses this model's next tokens from what is in its cache.

        Raises `InvalidField` saying why the file or the model cannot have it.
        """
        ...

    def mask_refiner(self, path: Path) -> MaskRefiner:
        """The refiner of outlines whose weights are in a file.

        Raises `InvalidField` saying why the file or the model cannot have it.
        """
        ...

    def step_kernels(self, kv: KVCache, adapters: AdapterBank | None) -> StepKernels | None:
        """`embed`, `decode`, `logits` and `payload` as kernels, where the device can run them."""
        ...

    def image_encoder(
        self, pinned: Callable[[tuple[int, ...], torch.dtype], torch.Tensor], num_images: int
    ) -> ImageEncoder | None:
        """`prefix_embeddings` for pictures left whole; None where only the host can cut them."""
        ...


class ModelFrontend(Protocol):
    """The half of a model that never touches the device: pictures and skills.

    Where it takes no images, `prepare_image` is never called, and `make_task` is told of requests
    that bring one all the same.
    """

    name: str
    takes_images: bool
    tasks: tuple[str, ...]
    constraints: tuple[Constraint, ...]

    def prepare_image(self, image_rgb: Any, key: str, info: ImageInfo) -> PreparedImage:
        """Resize and tile a decoded picture (a PIL RGB image); called on worker threads."""
        ...

    def resizing_on_device(self) -> ModelFrontend:
        """The same half, with pictures left to a device that encodes them."""
        ...

    def keeping_images(self) -> ModelFrontend:
        """The same half, whose prepared images hold on to their pictures as decoded."""
        ...

    def prefix_length(self, has_image: bool) -> int:
        """Positions of the shared prefix: BOS plus image tokens, or 1.

        0 in a family without BOS, whose prompts begin as they like.
        """
        ...

    def make_task(self, request: Request) -> Task:
        """The skill's state machine for a request, its sampling resolved, the seed included.

        Raises `InvalidField`, `TaskUnsupported` or `PromptTooLong`.
        """
        ...
