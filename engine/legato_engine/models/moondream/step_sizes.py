"""Moondream's sizes for its kernels."""

from __future__ import annotations

import torch

from legato_engine.kernels.step import (
    DecoderSizes,
    ExpertSizes,
    TauSizes,
    supports_decoder,
    supports_experts,
)
from legato_engine.kernels.value_heads import ValueSizes
from legato_engine.models.moondream.config import Gelu, MoondreamConfig
from legato_engine.models.moondream.region import coord_reach, size_reach
from legato_engine.models.paged_cache import KVCache


def decoder_sizes(config: MoondreamConfig, kv: KVCache) -> DecoderSizes:
    text = config.text
    return DecoderSizes(
        dim=text.dim,
        ff_dim=text.ff_dim,
        num_heads=text.num_heads,
        rotary_dim=text.rotary_dim,
        vocab_size=text.vocab_size,
        page_size=kv.page_size,
        max_pages=-(-text.max_context // kv.page_size),
        kv_bytes=kv.k_LNHSE.element_size(),
    )


def has_kernels(config: MoondreamConfig, kv: KVCache, dtype: torch.dtype) -> bool:
    """Whether kernels run this model on the device of its KV cache.

    They support gains and experts together or neither, and keys of e4m3 only with both.
    """
    text, region = config.text, config.region
    if (text.tau is None) != (text.moe is None):
        return False
    if kv.scale_L2 is not None and text.tau is None:
        return False
    if text.moe is not None and not supports_experts(expert_sizes(config, dtype)):
        return False
    if region.inner_dim is not None and region.inner_dim % 64:
        return False
    fits = region.coord_bins % 64 == 0 and region.size_bins % 64 == 0
    fits = fits and region.coord_features % 4 == 0 and region.size_features % 4 == 0
    return fits and supports_decoder(decoder_sizes(config, kv), kv.k_LNHSE.device, dtype)


def value_sizes(config: MoondreamConfig) -> ValueSizes:
    region = config.region
    return ValueSizes(
        dim=config.text.dim,
        inner_dim=region.inner_dim,
        scalar_features=region.coord_features,
        pair_features=region.size_features,
        scalar_bins=region.coord_bins,
        pair_bins=2 * region.size_bins,
        scalar_divisor=region.coord_divisor,
        scalar_token=config.tokens.coord,
        pair_token=config.tokens.size,
        end_token=config.tokens.eos,
        scalar_reach=coord_reach(region.coord_bins),
        pair_reach=size_reach(region.size_bins),
        vocab=config.text.vocab_size,
    )


def tau_sizes(
    config: MoondreamConfig, decoder: DecoderSizes, expert_dtype: torch.dtype
) -> TauSizes:
    assert config.text.tau is not None, "only for a text part with gains"
    exact = config.text.tau.gelu is Gelu.EXACT
    return TauSizes(decoder, expert_sizes(config, expert_dtype), exact)


def expert_sizes(config: MoondreamConfig, dtype: torch.dtype) -> ExpertSizes:
    moe = config.text.moe
    assert moe is not None, "only for a text part with experts"
    return ExpertSizes(moe.num_experts, moe.num_active, moe.inner_dim, dtype.itemsize)
