"""A network's weights in the layouts of its kernels: packed, folded, or as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from legato_engine.kernels.cuda.adapters import LayerAdapters, Map
from legato_engine.kernels.cuda.decoder_sizes import DecoderSizes, LayerWeights
from legato_engine.kernels.cuda.expert_adapters import ExpertSlots
from legato_engine.kernels.cuda.head import HeadWeights
from legato_engine.kernels.cuda.packing import fold_norm, pack, pack_beside, pair_rotated
from legato_engine.kernels.cuda.tau_decoder import ExpertLayer, Gains, TauLayer
from legato_engine.kernels.cuda.value_heads import (
    Bins,
    DecoderWeights,
    MlpBins,
    NormedBins,
    RegionSizes,
)
from legato_engine.kernels.low_rank import ExpertMap
from legato_engine.layers.linear import Linear
from legato_engine.layers.lora import AdapterBank
from legato_engine.layers.mlp import MLP
from legato_engine.layers.moe import MoE
from legato_engine.models.moondream.region import Region
from legato_engine.models.moondream.text import TextBlock


def plain_layer(block: TextBlock, sizes: DecoderSizes, *, rotated: bool) -> LayerWeights:
    """Pack a layer; `rotated`: the first product also rotates queries and keys, by pairs."""
    attention, mlp = block.attn, block.mlp
    assert isinstance(mlp, MLP), "layers with experts are another kind"
    weights, folded = fold_norm(*_together([attention.qkv, mlp.fc1]), weight_and_bias(block.ln))
    if rotated:
        order = torch.arange(len(weights), device=weights.device)
        paired = pair_rotated(sizes.num_heads, weights.device)
        order[: len(paired)] = paired
        weights = weights[order]
    return LayerWeights(
        weights_in=pack(weights),
        folded_in=folded,
        weights_out=pack_beside([attention.proj.weight, mlp.fc2.weight], sizes.parts),
        proj_bias=attention.proj.bias,
        fc2_bias=mlp.fc2.bias,
    )


def tau_layer(block: TextBlock, sizes: DecoderSizes) -> TauLayer:
    """Pack a layer with tau, and with experts if it has them."""
    attention, mlp = block.attn, block.mlp
    assert attention.tau is not None, "the layer has no tau"
    gains = Gains(attention.tau.wqwv, attention.tau.gain_PH)
    if not isinstance(mlp, MoE):
        return TauLayer(gains, plain_layer(block, sizes, rotated=False))
    first = normed_map([attention.qkv, mlp.router], block.ln)
    maps = ExpertLayer(
        weights_in=first.weights,
        folded_in=first.folded,
        norm=weight_and_bias(block.ln),
        up=mlp.fc1.weights(),
        down=mlp.fc2.weights(),
        proj_DD=attention.proj.weight,
        proj_bias=attention.proj.bias,
    )
    return TauLayer(gains, maps)


def weight_and_bias(layer: nn.LayerNorm | Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight and bias; of a norm, scale and shift."""
    return layer.weight, layer.bias


def mlp_slots(block: TextBlock, bank: AdapterBank, layer: int) -> LayerAdapters:
    """Return a bank's slots for a layer with an MLP."""
    fc1_a, fc1_b, fc2_a, fc2_b = (tensor[layer] for tensor in bank.weights.mlps.tensors)
    return LayerAdapters(weight_and_bias(block.ln), Map(fc1_a, fc1_b), Map(fc2_a, fc2_b))


def expert_slots(bank: AdapterBank, first_layer: int) -> dict[int, ExpertSlots]:
    """Return a bank's slots by layer with experts, from `first_layer` on."""
    assert bank.weights.experts is not None, "the bank has no experts"
    layers = zip(*bank.weights.experts.tensors, strict=True)
    return {
        layer: ExpertSlots(ExpertMap(up_a, up_b), ExpertMap(down_a, down_b))
        for layer, (up_a, up_b, down_a, down_b) in enumerate(layers, first_layer)
    }


def _together(maps: Sequence[Linear]) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate layers of the same input."""
    return torch.cat([map_.weight for map_ in maps]), torch.cat([map_.bias for map_ in maps])


def normed_map(maps: Sequence[Linear], norm: nn.LayerNorm) -> HeadWeights:
    """Fold a norm into the layers that read it, and pack them as one."""
    weights, folded = fold_norm(*_together(maps), weight_and_bias(norm))
    return HeadWeights(pack(weights), folded)


def value_bins(sizes: RegionSizes, region: Region, device: torch.device) -> Bins:
    """Pack the decoders of coordinates and sizes, MLPs or single layers."""
    coord, size = region.coord_decoder, region.size_decoder
    if isinstance(coord, MLP) and isinstance(size, MLP):
        parts = sizes.parts
        return MlpBins(sizes, _decoder(coord, parts), _decoder(size, parts), device)
    assert isinstance(coord, Linear), "both have one form"
    assert isinstance(size, Linear), "both have one form"
    assert region.ln is not None, "single maps stand behind a norm"
    return NormedBins(sizes, normed_map([coord, size], region.ln), device)


def _decoder(mlp: MLP, parts: int) -> DecoderWeights:
    return DecoderWeights(
        fc1_weights=pack(mlp.fc1.weight),
        fc1_bias=mlp.fc1.bias,
        fc2_weights=pack(mlp.fc2.weight, parts),
        fc2_bias=mlp.fc2.bias,
    )
