"""Sizes that Moondream's kernels are compiled for, and whether they support a model."""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda import tau_decoder_stages
from legato_engine.kernels.cuda.decoder import supported
from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes
from legato_engine.kernels.cuda.tau_decoder_stages import ExpertSizes, TauSizes
from legato_engine.kernels.cuda.value_heads import RegionSizes
from legato_engine.models.moondream.config import Gelu, MoondreamConfig
from legato_engine.models.paged_cache import KVCache


def decoder_sizes(config: MoondreamConfig, kv: KVCache) -> DecoderSizes:
    """Return the decoder's sizes over this KV cache."""
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


def can_fuse(config: MoondreamConfig, kv: KVCache, dtype: torch.dtype) -> bool:
    """Whether the kernels support this model on the device of its KV cache.

    They support tau and experts only together, and e4m3 keys only with both.
    """
    text, region = config.text, config.region
    if (text.tau is None) != (text.moe is None):
        return False
    if kv.scale_L2 is not None and text.tau is None:
        return False
    if text.moe is not None and not tau_decoder_stages.supported(expert_sizes(config, dtype)):
        return False
    if region.inner_dim is not None and region.inner_dim % 64:
        return False
    fits = region.coord_bins % 64 == 0 and region.size_bins % 64 == 0
    fits = fits and region.coord_features % 4 == 0 and region.size_features % 4 == 0
    return fits and supported(decoder_sizes(config, kv), kv.k_LNHSE.device, dtype)


def region_sizes(config: MoondreamConfig) -> RegionSizes:
    """Return the sizes of the region part."""
    region = config.region
    return RegionSizes(
        dim=config.text.dim,
        inner_dim=region.inner_dim,
        coord_features=region.coord_features,
        size_features=region.size_features,
        coord_bins=region.coord_bins,
        size_bins=2 * region.size_bins,
        coord_token=config.tokens.coord,
        size_token=config.tokens.size,
    )


def tau_sizes(
    config: MoondreamConfig, decoder: DecoderSizes, expert_dtype: torch.dtype
) -> TauSizes:
    """Return the sizes of a decoder with tau and experts."""
    assert config.text.tau is not None, "the model has no tau"
    exact = config.text.tau.gelu is Gelu.EXACT
    return TauSizes(decoder, expert_sizes(config, expert_dtype), exact)


def expert_sizes(config: MoondreamConfig, dtype: torch.dtype) -> ExpertSizes:
    """Return the sizes of the experts, e4m3 or not by `dtype`."""
    moe = config.text.moe
    assert moe is not None, "the model has no experts"
    return ExpertSizes(moe.num_experts, moe.num_active, moe.inner_dim, dtype.itemsize)
