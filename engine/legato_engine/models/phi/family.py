"""Phi 1, 1.5 and 2 in transformers' format."""

from __future__ import annotations

import torch
from torch import nn

from legato_engine.kernels import ops
from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.layer_cache import LayerCache
from legato_engine.kernels.spans import AttentionMetadata, Span
from legato_engine.layers.cpu import cpu_map, cpu_norm
from legato_engine.layers.grouped_attention import Attend, GroupedAttention
from legato_engine.layers.mlp import MLP
from legato_engine.models.bundle import ModelBundle, ModelSource
from legato_engine.models.decoder import bundle
from legato_engine.models.decoder.config import (
    DecoderConfig,
    HubConfig,
    decoder_config,
    head_plan,
    partial_rotary,
    refuse_others,
)
from legato_engine.models.decoder.network import DecoderNetwork


class PhiBlock(nn.Module):
    """Parallel attention and MLP, added in one residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.self_attn = GroupedAttention(config.dim, config.heads)
        self.mlp = MLP(config.dim, config.ff_dim, config.dim)

    def forward(
        self,
        x: torch.Tensor,
        where: AttentionMetadata | Span,
        cache: LayerCache,
        attend: Attend,
    ) -> torch.Tensor:
        normed: torch.Tensor = self.input_layernorm(x)
        heads: torch.Tensor = self.self_attn(normed, where, cache, attend)
        mlp: torch.Tensor = self.mlp(normed)
        return ops.add3(x, heads, mlp)

    def cpu_layer(self) -> cpu.Layer:
        """This layer for a decoder on the CPU, once it is packed."""
        attention, mlp = self.self_attn, self.mlp
        return cpu.Layer(
            norm=cpu_norm(self.input_layernorm),
            qkv=cpu_map(attention.qkv),
            out=cpu_map(attention.o_proj),
            up=cpu_map(mlp.fc1),
            down=cpu_map(mlp.fc2),
        )


class PhiNetwork(DecoderNetwork):
    """All weights of a Phi."""

    def __init__(self, config: DecoderConfig) -> None:
        norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        super().__init__(config, PhiBlock, norm, head_bias=True)

    @staticmethod
    def checkpoint_name(name: str) -> str:
        if name.startswith("norm."):
            return f"model.final_layer{name}"
        return DecoderNetwork.checkpoint_name(name.replace(".o_proj.", ".dense."))


def find(source: ModelSource) -> ModelBundle:
    return bundle.find(source, bundle.Family({"phi": _config}, PhiNetwork))


def _config(config: HubConfig) -> DecoderConfig:
    implemented = {"hidden_act": "gelu_new", "qk_layernorm": False, "tie_word_embeddings": False}
    refuse_others(config, implemented)
    return decoder_config(
        config,
        norm_eps=config.layer_norm_eps,
        heads=head_plan(config, qkv_bias=True, out_bias=True),
        partial=partial_rotary(config),
    )
