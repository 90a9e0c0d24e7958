"""The decoder of all text families.

Shape legend: T tokens, B rows of one token, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import nn

from legato_engine.kernels import ops, packed_weights, row_ops
from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.cpu.weights import PanelWeight
from legato_engine.kernels.layer_cache import LayerCache
from legato_engine.kernels.packed_weights import PackedWeight
from legato_engine.kernels.spans import AttentionMetadata, Span
from legato_engine.layers.cpu import cpu_map, cpu_norm
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
        where: AttentionMetadata | Span,
        cache: LayerCache,
        attend: Attend,
    ) -> torch.Tensor:
        """The storage of x may be reused."""
        _, normed = row_ops.add_rms_norm(x, None, self.input_layernorm)
        heads = self.self_attn(normed, where, cache, attend)
        x, normed = row_ops.add_rms_norm(x, heads, self.post_attention_layernorm)
        return self.mlp.onto(x, normed)

    def cpu_layer(self) -> cpu.Layer:
        """This layer for a decoder on the CPU, once it is packed."""
        attention, mlp = self.self_attn, self.mlp
        return cpu.Layer(
            norm=cpu_norm(self.input_layernorm),
            qkv=cpu_map(attention.qkv),
            out=cpu_map(attention.o_proj),
            up=cpu_map(mlp.gate_up),
            down=cpu_map(mlp.down_proj),
            next_norm=cpu_norm(self.post_attention_layernorm),
            query_norm=cpu_norm(attention.q_norm) if attention.norms_heads else None,
            key_norm=cpu_norm(attention.k_norm) if attention.norms_heads else None,
        )


class _Block(Protocol):
    def cpu_layer(self) -> cpu.Layer: ...


class DecoderNetwork(nn.Module):
    """All weights; `block` makes a layer with the methods of `GatedBlock`.

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
        self._on_cpu: cpu.Decoder | None = None

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """The stored name of a parameter or module."""
        return name if name.startswith("lm_head.") else f"model.{name}"

    def pack(self, kind: str, library: Library | None) -> None:
        """Pack all linear maps on the CPU, the rotations being there.

        A tied head is packed beside the embeddings, and with a `library` in their place.
        """
        head_kind = packed_weights.head_kind(kind)
        if self.config.tied_head:
            embeddings_VD = self.embed_tokens.weight
            self._tied_head = packed_weights.pack(embeddings_VD, head_kind, library)
            if library is not None:
                empty = embeddings_VD.new_empty(0)
                self.embed_tokens.weight = nn.Parameter(empty, requires_grad=False)
        else:
            self.lm_head.pack(head_kind, library)
        pack_linears(self, kind, library)
        if library is not None and self.config.heads.head_dim % cpu.LANES == 0:
            self._on_cpu = self._cpu_decoder(library)

    @property
    def runs_by_library(self) -> bool:
        return self._on_cpu is not None

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        x_TD: torch.Tensor
        if isinstance(self._tied_head, PanelWeight):
            x_TD = self._tied_head.rows(token_ids_T).to(self.embed_tokens.weight.dtype)
        else:
            x_TD = self.embed_tokens(token_ids_T)
        return x_TD

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        assert not span.bidirectional, "a text model has no bidirectional prefix"
        if self._on_cpu is not None:
            rows = cpu.Rows(kv.k_LNHSE, kv.v_LNHSE)
            return self._on_cpu.span(x_TD, span.start, span.pages_M, rows, bidirectional=False)
        where, attend = span_metadata(span, self.rope), span_attention(span, x_TD.shape[0])
        return self._blocks(x_TD, where, kv, attend)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        if self._on_cpu is not None:
            rows = cpu.Rows(kv.k_LNHSE, kv.v_LNHSE)
            return self._on_cpu.decode(x_BD, batch.positions_B, batch.page_table_BM, rows)
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
        self, x: torch.Tensor, where: AttentionMetadata | Span, kv: KVCache, attend: Attend
    ) -> torch.Tensor:
        for layer, block in enumerate(self.layers):
            x = block(x, where, kv.layer(layer), attend)
        return x

    def _cpu_decoder(self, library: Library) -> cpu.Decoder:
        heads = self.config.heads
        gated = isinstance(self.layers[0], GatedBlock)
        sizes = cpu.Sizes(heads.num_heads, heads.num_kv_heads, heads.head_dim, gated)
        layers = [cast(_Block, block).cpu_layer() for block in self.layers]
        return cpu.Decoder(library, layers, sizes, (self.rope.cos_PR, self.rope.sin_PR))
