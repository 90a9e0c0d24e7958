"""Llama 1 to 3 and models with its configuration."""

from __future__ import annotations

from legato_engine.models.bundle import ModelBundle, ModelSource
from legato_engine.models.decoder import bundle
from legato_engine.models.decoder.config import (
    DecoderConfig,
    HubConfig,
    decoder_config,
    head_plan,
    refuse_others,
)
from legato_engine.models.decoder.network import DecoderNetwork


def find(source: ModelSource) -> ModelBundle:
    return bundle.find(source, bundle.Family({"llama": _config}, DecoderNetwork))


def _config(config: HubConfig) -> DecoderConfig:
    refuse_others(config, {"hidden_act": "silu", "mlp_bias": False})
    return decoder_config(
        config,
        norm_eps=config.rms_norm_eps,
        heads=head_plan(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
    )
