"""Qwen 2, 2.5 (biases of queries, keys and values) and 3 (normed heads)."""

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

_IMPLEMENTED = {"hidden_act": "silu", "use_sliding_window": False}


def find(source: ModelSource) -> ModelBundle:
    configs = {"qwen2": _second, "qwen3": _third}
    return bundle.find(source, bundle.Family(configs, DecoderNetwork))


def _second(config: HubConfig) -> DecoderConfig:
    refuse_others(config, _IMPLEMENTED)
    heads = head_plan(config, qkv_bias=True, out_bias=False)
    return decoder_config(config, norm_eps=config.rms_norm_eps, heads=heads)


def _third(config: HubConfig) -> DecoderConfig:
    refuse_others(config, _IMPLEMENTED)
    heads = head_plan(
        config,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        norm_eps=config.rms_norm_eps,
    )
    return decoder_config(config, norm_eps=config.rms_norm_eps, heads=heads)
