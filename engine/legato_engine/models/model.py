"""The model seam: what the runtime needs of an architecture, and nothing of its skills' meaning.

Shape legend: T tokens, B rows, D text width, V vocabulary, P prefix positions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from legato_engine.core import ImageInfo, Request
from legato_engine.tasks import Constraint, Task

if TYPE_CHECKING:
    import torch  # frontends import this module, and they never load torch


@dataclasses.dataclass(slots=True)
class KVCache:
    """Paged keys and values of all layers.

    `k_LNSHE`, `v_LNSHE`: layer, page, slot within page, kv head, head dim. Page 0 is scratch: rows
    that pad a batch write there and nobody reads it.
    """

    k_LNSHE: torch.Tensor
    v_LNSHE: torch.Tensor

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.k_LNSHE.shape[2]


@dataclasses.dataclass(slots=True)
class DecodeBatch:
    """Where B single-token rows stand: `positions_B` int64 and `page_table_BM` int64 page ids."""

    positions_B: torch.Tensor
    page_table_BM: torch.Tensor


@dataclasses.dataclass(slots=True)
class PrefillSpan:
    """T consecutive positions of one sequence, from `start`; `pages_M` int64 covers 0..start+T.

    `bidirectional`: all T positions see each other (image prefix, `start` 0); otherwise causal.
    """

    start: int
    pages_M: torch.Tensor
    bidirectional: bool


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
    dtype: torch.dtype

    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        """[P, D]: BOS followed by the image's embeddings; just BOS without an image."""
        ...

    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        """[T, D]: token embeddings; value-carrying tokens are replaced by their encoded payload."""
        ...

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        """[T, D] final residual stream; writes K and V of the span into its pages."""
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


class ModelFrontend(Protocol):
    """The half of a model that never touches the device: pictures and skills."""

    name: str
    tasks: tuple[str, ...]
    constraints: tuple[Constraint, ...]

    def prepare_image(self, image_rgb: Any, key: str, info: ImageInfo) -> PreparedImage:
        """Resize and tile a decoded picture (a PIL RGB image); called on worker threads."""
        ...

    def prefix_length(self, has_image: bool) -> int:
        """Positions of the shared prefix: BOS plus image tokens, or 1."""
        ...

    def make_task(self, request: Request) -> Task:
        """The skill's state machine for a request, its sampling resolved, the seed included.

        Raises `InvalidField`, `TaskUnsupported` or `PromptTooLong`.
        """
        ...
