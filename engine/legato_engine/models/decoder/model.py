"""A text decoder on a device.

Shape legend: T tokens, B rows, D text width, V vocabulary.
"""

from __future__ import annotations

import torch

from legato_engine.models.capabilities import Capabilities
from legato_engine.models.decoder.frontend import FREE
from legato_engine.models.decoder.network import DecoderNetwork
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.paged_cache import DecodeBatch, KVCache, PrefillSpan


class DecoderModel:
    """A `Model` over a loaded, frozen network, without optional capabilities."""

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
        self.bos_token = 0  # unused: the prefix is empty
        self._network = network
        self._device = network.embed_tokens.weight.device
        network.rope.fill(self._device)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(own_threads=self._network.runs_by_library)

    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        """[0, D]: the tokenizer puts BOS into the prompt."""
        return torch.empty(0, self.width, dtype=self.dtype, device=self._device)

    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        return self._network.embed(token_ids_T)

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        return self._network.prefill(x_TD, span, kv)

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        self._network.prefill(x_TD, span, kv)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        return self._network.decode(x_BD, batch, kv)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return self._network.logits(hidden_BD)
