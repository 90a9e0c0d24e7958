"""The seam between the runtime and an architecture.

Shape legend: T tokens, B rows, D text width, V vocabulary, P prefix positions, L layers.
"""

from __future__ import annotations

from typing import Protocol

import torch

from legato_engine.models.capabilities import Capabilities
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.paged_cache import DecodeBatch, KVCache, PrefillSpan
from legato_engine.tasks import Constraint


class Model(Protocol):
    """An architecture with its weights on a device. All methods run on the compute stream.

    Methods are pure functions of arguments and weights. `decode` and `logits` keep no allocation
    and read no device value on the host, so they can be captured.
    """

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

    @property
    def capabilities(self) -> Capabilities: ...

    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        """[P, D]: BOS and the image; P is the frontend's `prefix_length`."""
        ...

    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        """[T, D]: embeddings, or the encoded payload of a token with a value."""
        ...

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        """[T, D] final residual stream; writes the span's keys and values."""
        ...

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        """Write what `prefill` writes, without the residual stream."""
        ...

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        """[B, D] final residual stream; row b attends to positions 0..positions_B[b]."""
        ...

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """[B, V] float32."""
        ...
