"""Weights for the kernels of a decode step."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from legato_engine.kernels.low_rank import ExpertMap, ExpertSlots, LowRankMap, MlpSlots
from legato_engine.kernels.parameters import (
    Affine,
    DecoderLayer,
    DenseMlp,
    ExpertMlp,
    TauWeights,
)
from legato_engine.kernels.step import AdapterStep, DecoderSizes, ExpertSlotSet
from legato_engine.kernels.value_heads import (
    MlpDecoders,
    NormedDecoders,
    ValueEncoder,
    ValueHeads,
)
from legato_engine.layers.linear import Linear
from legato_engine.layers.lora import AdapterBank
from legato_engine.layers.mlp import MLP
from legato_engine.layers.moe import MoE
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.region import Region
from legato_engine.models.moondream.step_sizes import expert_sizes, value_sizes
from legato_engine.models.moondream.text import Text, TextBlock


def affine(layer: nn.LayerNorm | Linear) -> Affine:
    return Affine(layer.weight, layer.bias)


def decoder_layers(text: Text) -> list[DecoderLayer]:
    return [_decoder_layer(cast(TextBlock, block)) for block in text.blocks]


def expert_dtype(text: Text) -> torch.dtype:
    return torch.float8_e4m3fn if text.has_fp8_experts else text.wte.dtype


def value_heads(config: MoondreamConfig, text: Text, region: Region) -> ValueHeads:
    return ValueHeads(
        value_sizes(config),
        ValueEncoder(region.coord_features, affine(region.coord_encoder)),
        ValueEncoder(region.size_features, affine(region.size_encoder)),
        _value_decoders(region),
        text.wte,
    )


def adapter_step(
    config: MoondreamConfig, text: Text, sizes: DecoderSizes, bank: AdapterBank
) -> AdapterStep:
    layers = zip(range(bank.num_mlps), text.blocks, strict=False)
    mlps = [_mlp_slots(cast(TextBlock, block), bank, layer) for layer, block in layers]
    experts = _expert_slots(config, text, bank)
    return AdapterStep(sizes, mlps, bank.rank_S, bank.max_rank, experts)


def _decoder_layer(block: TextBlock) -> DecoderLayer:
    attention, mlp, tau = block.attn, block.mlp, block.attn.tau
    weights: DenseMlp | ExpertMlp
    if isinstance(mlp, MoE):
        weights = ExpertMlp(affine(mlp.router), mlp.fc1.weights(), mlp.fc2.weights())
    else:
        weights = _dense(mlp)
    return DecoderLayer(
        norm=affine(block.ln),
        qkv=affine(attention.qkv),
        proj=affine(attention.proj),
        mlp=weights,
        tau=None if tau is None else TauWeights(tau.wqwv, tau.gain_PH),
    )


def _dense(mlp: MLP) -> DenseMlp:
    return DenseMlp(affine(mlp.fc1), affine(mlp.fc2))


def _value_decoders(region: Region) -> MlpDecoders | NormedDecoders:
    coord, size = region.coord_decoder, region.size_decoder
    if isinstance(coord, MLP) and isinstance(size, MLP):
        return MlpDecoders(_dense(coord), _dense(size))
    assert isinstance(coord, Linear), "both decoders have one form"
    assert isinstance(size, Linear), "both decoders have one form"
    assert region.ln is not None, "single maps read a norm"
    return NormedDecoders(affine(region.ln), affine(coord), affine(size))


def _mlp_slots(block: TextBlock, bank: AdapterBank, layer: int) -> MlpSlots:
    fc1_a, fc1_b, fc2_a, fc2_b = (tensor[layer] for tensor in bank.weights.mlps.tensors)
    return MlpSlots(affine(block.ln), LowRankMap(fc1_a, fc1_b), LowRankMap(fc2_a, fc2_b))


def _expert_slots(config: MoondreamConfig, text: Text, bank: AdapterBank) -> ExpertSlotSet | None:
    experts = bank.weights.experts
    if experts is None:
        return None
    layers = {
        layer: ExpertSlots(ExpertMap(up_a, up_b), ExpertMap(down_a, down_b))
        for layer, (up_a, up_b, down_a, down_b) in enumerate(
            zip(*experts.tensors, strict=True), bank.num_mlps
        )
    }
    sizes = expert_sizes(config, expert_dtype(text))
    return ExpertSlotSet(sizes, layers, bank.expert_rank_S, experts.fc1_a_LSRD.shape[-2])
