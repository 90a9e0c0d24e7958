"""A text decoder on a device: the tensor half behind `models.model.Model`.

Shape legend: T tokens, B rows, D text width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from legato_engine.errors import AdapterUnusable, InvalidField
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.decoder.frontend import FREE
from legato_engine.models.decoder.network import DecoderNetwork
from legato_engine.models.model import Adapter, ImageEncoder, MaskRefiner, PreparedImage
from legato_engine.models.paged_cache import DecodeBatch, KVCache, PrefillSpan
from legato_engine.models.step_kernels import StepKernels
from legato_engine.speculative.proposer import Proposer


class DecoderModel:
    """A `models.model.Model` over a network that is loaded and frozen."""

    def __init__(self, network: DecoderNetwork) -> None:
        config = network.config
        self.constraints = FREE
        self.num_layers = config.num_layers
        self.num_kv_heads = config.heads.num_kv_heads
        self.head_dim = config.heads.head_dim
        self.vocab_size = config.vocab_size
        self.width = config.dim
        self.max_context = config.max_context
        self.dtype = network.embed_tokens.weight.dtype
        self.kv_scale_L2: torch.Tensor | None = None
        self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
        self.bos_token = 0  # of no use: the prefix is empty
        self._network = network
        self._device = network.embed_tokens.weight.device
        network.rope.fill(self._device)

    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        """[0, D]: a prompt begins as its tokenizer says."""
        return torch.empty(0, self.width, dtype=self.dtype, device=self._device)

    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        """[T, D]: token embeddings."""
        x_TD: torch.Tensor = self._network.embed_tokens(token_ids_T)
        return x_TD

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        """[T, D] final residual stream; writes keys and values of the span."""
        return self._network.prefill(x_TD, span, kv)

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        """The same writes."""
        self._network.prefill(x_TD, span, kv)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        """[B, D] final residual stream."""
        return self._network.decode(x_BD, batch, kv)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """[B, V] float32."""
        return self._network.logits(hidden_BD)

    def payload(self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor) -> torch.Tensor:
        """[B, 2] float32 zeros: no token carries a value."""
        return torch.zeros(len(token_ids_B), 2, device=self._device)

    def payload_logprobs(
        self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor, payload_B2: torch.Tensor
    ) -> torch.Tensor:
        """[B] float32 zeros."""
        return torch.zeros(len(token_ids_B), device=self._device)

    def adapter_bank(self, num_slots: int, max_rank: int) -> AdapterBank | None:
        """None: there are no adapters."""
        return None

    def read_adapter(self, data: bytes, key: str, max_rank: int) -> Adapter:
        """Never asked for without a bank."""
        raise AdapterUnusable("this model takes no adapters")

    def draft_proposer(self, path: Path, kv: KVCache) -> Proposer:
        """There are none."""
        raise InvalidField("this model takes no draft", field="draft")

    def mask_refiner(self, path: Path) -> MaskRefiner:
        """There are no outlines."""
        raise InvalidField("this model takes no refiner", field="refiner")

    def step_kernels(self, kv: KVCache, adapters: AdapterBank | None) -> StepKernels | None:
        """None: torch's own operations run on every device."""
        return None

    def image_encoder(
        self, pinned: Callable[[tuple[int, ...], torch.dtype], torch.Tensor], num_images: int
    ) -> ImageEncoder | None:
        """None: there are no pictures."""
        return None
