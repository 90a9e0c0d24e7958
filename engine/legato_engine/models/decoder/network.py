"""The decoder of all text families.

Shape legend: T tokens, B rows of one token, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from legato_engine.kernels import ops, packed_weights, row_ops
from legato_engine.kernels.layer_cache import LayerCache
from legato_engine.kernels.packed_weights import PackedWeight
from legato_engine.layers.gated_mlp import GatedMLP
from legato_engine.layers.grouped_attention import Attend, GroupedAttention
from legato_engine.layers.linear import Linear, pack_linears
from legato_engine.layers.rope import Rope
from legato_engine.models.decoder.config import DecoderConfig
from legato_engine.models.paged_attention import (
    span_attention,
    span_metadata,
    step_attention,
    step_metadata,
)
from legato_engine.models.paged_cache import DecodeBatch, KVCache, PrefillSpan


class GatedBlock(nn.Module):
    """Attention, then a gated MLP, each with an RMS norm and a residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.self_attn = GroupedAttention(config.dim, config.heads)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = GatedMLP(config.dim, config.ff_dim)

    def forward(
        self,
        x: torch.Tensor,
        where: ops.AttentionMetadata | ops.Span,
        cache: LayerCache,
        attend: Attend,
    ) -> torch.Tensor:
        """The storage of x may be reused."""
        _, normed = row_ops.add_rms_norm(x, None, self.input_layernorm)
        heads = self.self_attn(normed, where, cache, attend)
        x, normed = row_ops.add_rms_norm(x, heads, self.post_attention_layernorm)
        return self.mlp.onto(x, normed)


class DecoderNetwork(nn.Module):
    """All weights; `block` makes a layer with the signature of `GatedBlock.forward`.

    Modules are named as in Llama's checkpoints, apart from packed layers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        block: Callable[[DecoderConfig], nn.Module] = GatedBlock,
        norm: nn.Module | None = None,
        *,
        head_bias: bool = False,
    ) -> None:
        super().__init__()
        # Unlike the constructor this draws no noise, for which torch would load its compiler.
        embeddings = torch.empty(config.vocab_size, config.dim)
        self.embed_tokens = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]  # torch's
            embeddings, freeze=False
        )
        self.layers = nn.ModuleList(block(config) for _ in range(config.num_layers))
        self.norm = norm or nn.RMSNorm(config.dim, eps=config.norm_eps)
        if not config.tied_head:
            self.lm_head = Linear(config.dim, config.vocab_size, bias=head_bias)
        self.rope = Rope(
            config.rope_theta, config.rotary_dim, config.max_context, config.rope_scaling
        )
        self.config = config
        self._tied_head: PackedWeight | None = None

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """The stored name of a parameter or module."""
        return name if name.startswith("lm_head.") else f"model.{name}"

    def pack(self, kind: str) -> None:
        """Pack all linear maps on the CPU; a tied head is packed beside the embeddings."""
        head_kind = packed_weights.head_kind(kind)
        if self.config.tied_head:
            self._tied_head = packed_weights.pack(self.embed_tokens.weight, head_kind)
        else:
            self.lm_head.pack(head_kind)
        pack_linears(self, kind)

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        assert not span.bidirectional, "a text model has no bidirectional prefix"
        where, attend = span_metadata(span, self.rope), span_attention(span, x_TD.shape[0])
        return self._blocks(x_TD, where, kv, attend)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        where, attend = step_metadata(batch, kv, self.rope), step_attention(batch, kv)
        return self._blocks(x_BD, where, kv, attend)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        normed_BD = self.norm(hidden_BD)
        if self._tied_head is not None:
            return packed_weights.linear(normed_BD, self._tied_head, None).float()
        if self.config.tied_head:
            return ops.linear(normed_BD, self.embed_tokens.weight, None).float()
        logits_BV: torch.Tensor = self.lm_head(normed_BD)
        return logits_BV.float()

    def _blocks(
        self, x: torch.Tensor, where: ops.AttentionMetadata | ops.Span, kv: KVCache, attend: Attend
    ) -> torch.Tensor:
        for layer, block in enumerate(self.layers):
            x = block(x, where, kv.layer(layer), attend)
        return x
