"""Interfaces of models on a device: the model, its optional capabilities, step kernels.

Shape legend: B tokens, R rows, M pages of a row, D text width, V vocabulary.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from legato_engine.kernels.proposer import Proposer
from legato_engine.layers.lora import AdapterBank, AdapterWeights
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.paged_attention import Chunk, DecodeBatch, KVCache, PrefillSpan
from legato_engine.sequence import Constraint
from legato_engine.types import MaskOutline

if TYPE_CHECKING:
    from legato_engine.kernels.accelerated import RowTensors, SampledTokens
    from legato_engine.kernels.decode_loop import MegakernelOffer
    from legato_engine.speculation import BlockPolicy


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """B tokens of a step at fixed addresses, int64 but for payloads.

    Token b is `token_R[source_B[b]]`, the newest sampled token of that row, with its payload; with
    source -1 it is `prompt_token_B[b]`. `row_B`: rows of the page table. `fresh_B`: the first
    position of its sequence that this step writes; above its position for a padding token, whose
    results are undefined. `adapter_slot_R` None: no row has an adapter.

    Adjacent tokens of one row form groups that read keys and values once. The step is laid out for
    `num_groups` of them, which affects only speed.
    """

    source_B: torch.Tensor
    row_B: torch.Tensor
    position_B: torch.Tensor
    fresh_B: torch.Tensor
    prompt_token_B: torch.Tensor
    prompt_payload_B2: torch.Tensor
    token_R: torch.Tensor
    payload_R2: torch.Tensor
    page_table_RM: torch.Tensor
    adapter_slot_R: torch.Tensor | None = None
    num_groups: int = 1 << 30

    def part(self, of: slice) -> StepInputs:
        tokens = {name: getattr(self, name)[of] for name in _BY_TOKEN}
        return dataclasses.replace(self, **tokens)


_BY_TOKEN = (
    *("source_B", "row_B", "position_B", "fresh_B"),
    *("prompt_token_B", "prompt_payload_B2"),
)


class StepKernels(Protocol):
    """A whole decode step as a few kernels, over fixed addresses.

    A token's bits do not depend on the batch. Steps share scratch memory, so two must not run at
    the same time.
    """

    def forward(
        self, inputs: StepInputs, hidden_BD: torch.Tensor, logits_BV: torch.Tensor | None
    ) -> None:
        """Fill the final residual stream and the float32 logits, if given; write K and V."""

    def values(self, state: RowTensors, sampled: SampledTokens) -> None:
        """Write the tokens' payloads, also to their rows' state, and their certainties."""

    def offer_megakernel(
        self, max_rows: int, policy: BlockPolicy | None = None
    ) -> MegakernelOffer | str:
        """Offer the megakernel for up to `max_rows` rows, or return the reason why not.

        Rows draft by the `policy` if given.
        """


# ---------------------------------------------------------------- capabilities

# Shape legend: B rows, C images, P prefix positions, D text width, M pages.

Pinned = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates page-locked host memory: `Device.pinned`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """A fine-tune on the host; `key` names the content."""

    key: str
    rank: int
    weights: AdapterWeights
    num_bytes: int

    @classmethod
    def on_host(cls, key: str, weights: AdapterWeights, device: torch.device) -> Adapter:
        """Make an adapter to be written to that device, page-locked for a GPU."""
        if device.type != "cpu":
            weights = weights.pinned()
        num_bytes = sum(tensor.nbytes for tensor in weights.tensors)
        return cls(key, weights.rank, weights, num_bytes)


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

    def upload(self, index: int) -> None: ...

    def cut(self) -> None:
        """Cut the image uploaded last."""

    def gather(self, first: int, stop: int) -> None:
        """Copy crops to where `encode` reads `gathered` ones."""

    def encode(self, count: int, *, gathered: bool) -> None:
        """Encode the first `count` crops, or the gathered ones."""

    def scatter(self, first: int, stop: int) -> None:
        """Copy features of gathered crops back."""

    def finish(self, index: int) -> torch.Tensor:
        """[P, D] of BOS and the image, in the buffer."""

    def cache(self, first: int, pages_CM: torch.Tensor, kv: KVCache) -> None:
        """Run the decoder over C buffers from `first`, in one pass.

        The bits may differ from those of `Model.cache_span`.
        """


class MaskRefiner(Protocol):
    """Refines outlines, one at a time; `given` and `answer` have fixed addresses.

    Calls, in order: `prepare` (any thread); on the compute stream a copy of `tensors` into `given`,
    then `refine`, which can be captured; `finish` (any thread) on a copy of `answer`. If `prepare`
    or `finish` raises, the outline stays unrefined.
    """

    given: tuple[torch.Tensor, ...]
    answer: torch.Tensor

    def prepare(self, outline: MaskOutline, image: PreparedImage) -> Any:
        """Crop an image of a frontend that is `keeping_images`."""

    def tensors(self, prepared: Any) -> tuple[torch.Tensor, ...]:
        """Host tensors of the shapes and dtypes of `given`."""

    def refine(self) -> None: ...

    def finish(self, outline: MaskOutline, prepared: Any, answer: Any) -> MaskOutline:
        """`answer` is a numpy array."""


# ---------------------------------------------------------------- model

# Shape legend: T tokens, B rows, D text width, V vocabulary, P prefix positions, L layers, N tokens
# of an image, K features of each.


class Decoder(Protocol):
    """Layers and head of a model, as the methods of `Model` with these names."""

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor: ...

    def chunk(self, x_TD: torch.Tensor, chunk: Chunk, kv: KVCache) -> torch.Tensor: ...

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None: ...

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor: ...

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor: ...


class Model(abc.ABC):
    """An architecture with its weights on a device. All methods run on the compute stream.

    Methods are pure functions of arguments and weights. `decode` and `logits` keep no allocation
    and read no device value on the host, so they can be captured.

    Methods that are not abstract are optional capabilities, by default absent.
    """

    _decoder: Decoder  # runs prompts and steps
    constraints: tuple[Constraint, ...]  # index 0 allows every token
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    width: int
    max_context: int
    num_parameters: int
    bos_token: int  # unused by a model whose prefix is empty
    dtype: torch.dtype
    kv_scale_L2: torch.Tensor | None  # float32 scales of an e4m3 `KVCache`; None: `dtype`, unscaled

    has_value_heads: bool = False
    """`values` and `payload_logprobs` read tokens with a value."""

    has_visual_prompts: bool = False
    """`encode_image` gives the features of images between a prompt's tokens (`VisualRows`)."""

    max_image_tokens: int = 0
    """Tokens of the largest image in a prompt."""

    image_token_bytes: int = 0
    """Bytes of the features of one of them."""

    has_prefill_chunks: bool = False
    """`prefill_chunk` runs prompts in passes of fixed shape."""

    @abc.abstractmethod
    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        """[P, D]: BOS and the image; P is the frontend's `prefix_length`."""

    @abc.abstractmethod
    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        """[T, D]: embeddings, or the encoded payload of a token with a value."""

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        """[T, D] final residual stream; writes the span's keys and values."""
        return self._decoder.prefill(x_TD, span, kv)

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        """Write what `prefill` writes, without the residual stream."""
        self._decoder.cache_span(x_TD, span, kv)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        """[B, D] final residual stream; row b attends to positions 0..positions_B[b]."""
        return self._decoder.decode(x_BD, batch, kv)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """[B, V] float32."""
        return self._decoder.logits(hidden_BD)

    # ------------------------------------------------------------ optional

    @property
    def own_threads(self) -> bool:
        """Return whether it computes on the CPU with threads of its own, so torch needs one."""
        return False

    def encode_image(self, image: PreparedImage) -> Generator[None, None, torch.Tensor]:
        """[N, K, D]: features of the image's N tokens (`VisualRows`).

        Each `next` computes one of `VisualPrompt.pieces_per_image`.
        """
        raise NotImplementedError

    def values(
        self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor, logits_BV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Payloads, zero for plain tokens, and certainties (`Certainty`), one for them.

        Both [B, 2] float32; `logits_BV` are constrained.
        """
        raise NotImplementedError

    def payload_logprobs(
        self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor, payload_B2: torch.Tensor
    ) -> torch.Tensor:
        """[B] float32 of the payloads that `values` returned, zero for plain tokens."""
        raise NotImplementedError

    def prefill_chunk(self, x_TD: torch.Tensor, chunk: Chunk, kv: KVCache) -> torch.Tensor:
        """[T, D], as `prefill`, without reading a device value on the host."""
        return self._decoder.chunk(x_TD, chunk, kv)

    def adapter_bank(self, num_slots: int, max_rank: int) -> AdapterBank | None:
        """Allocate the bank of low-rank adapters; None if the model takes none."""
        return None

    def read_adapter(self, data: bytes, key: str, max_rank: int, settings: bytes = b"") -> Adapter:
        """Parse an adapter's tensors and a folder's settings, without the compute stream.

        On any thread.

        Raises:
            AdapterUnusable: they do not fit.
        """
        raise NotImplementedError

    def step_kernels(self, kv: KVCache, adapters: AdapterBank | None) -> StepKernels | None:
        """Return kernels for a whole decode step; None without any for this device and cache."""
        return None

    def image_encoder(self, pinned: Pinned, num_images: int) -> ImageEncoder | None:
        """Return the device's image encoder; None if `prefix_embeddings` embeds images."""
        return None

    def draft_proposer(self, path: Path, kv: KVCache) -> Proposer | None:
        """Read a draft that proposes tokens from this KV cache; None if the model takes none.

        Raises:
            InvalidField: the file does not fit the model.
        """
        return None

    def mask_refiner(self, path: Path) -> MaskRefiner | None:
        """Read the weights of a refiner of outlines; None if the model takes none.

        Raises:
            InvalidField: the file does not fit the model.
        """
        return None
