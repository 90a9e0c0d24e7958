"""A decoder's parameters in the layouts of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from legato_engine.kernels.cuda.decoder import DecoderSizes, HeadWeights, LayerWeights
from legato_engine.kernels.cuda.skinny_gemm import fold_norm, pack, pack_beside, pair_rotated
from legato_engine.kernels.cuda.tau_decoder import ExpertLayer, TauLayer
from legato_engine.kernels.parameters import Affine, DecoderLayer, DenseMlp


def packed_layer(layer: DecoderLayer, sizes: DecoderSizes, *, rotated: bool) -> LayerWeights:
    """Pack a layer with an MLP.

    `rotated` puts the rows of each rotated pair where the first map's kernel rotates them.
    """
    assert isinstance(layer.mlp, DenseMlp), "a layer with experts has another layout"
    weights, folded = folded_first(layer, layer.mlp)
    if rotated:
        order = torch.arange(len(weights), device=weights.device)
        paired = pair_rotated(sizes.num_heads, weights.device)
        order[: len(paired)] = paired
        weights = weights[order]
    return LayerWeights(
        weights_in=pack(weights),
        folded_in=folded,
        weights_out=pack_beside([layer.mlp.fc2.weight, layer.proj.weight], sizes.parts),
        proj_bias=layer.proj.bias,
        fc2_bias=layer.mlp.fc2.bias,
    )


def folded_first(layer: DecoderLayer, mlp: DenseMlp) -> tuple[torch.Tensor, torch.Tensor]:
    """Both first maps with the norm folded in, as one: apart, their sums would round otherwise."""
    return fold_norm(*_stacked([layer.qkv, mlp.fc1]), layer.norm)


def packed_tau_layer(layer: DecoderLayer, sizes: DecoderSizes) -> TauLayer:
    """Pack a layer with gains; experts stay where they are."""
    assert layer.tau is not None, "a layer without gains has another layout"
    if isinstance(layer.mlp, DenseMlp):
        return TauLayer(layer.tau, packed_layer(layer, sizes, rotated=False))
    first = packed_head([layer.qkv, layer.mlp.router], layer.norm)
    maps = ExpertLayer(
        weights_in=first.weights,
        folded_in=first.folded,
        norm=layer.norm,
        up=layer.mlp.up,
        down=layer.mlp.down,
        proj_DD=layer.proj.weight,
        proj_bias=layer.proj.bias,
    )
    return TauLayer(layer.tau, maps)


def packed_head(maps: Sequence[Affine], norm: Affine) -> HeadWeights:
    """Pack maps of the same normed inputs as one, of raw inputs."""
    weights, folded = fold_norm(*_stacked(maps), norm)
    return HeadWeights(pack(weights), folded)


def _stacked(maps: Sequence[Affine]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([each.weight for each in maps]), torch.cat([each.bias for each in maps])
