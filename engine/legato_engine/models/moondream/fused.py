"""Moondream's decode step as kernels: the network's weights, handed to them by name.

Shape legend: B tokens, D text width, V vocabulary, R rows of the token state.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from torch import nn

from legato_engine.kernels.cuda.adapters import (
    LayerAdapters,
    LowRank,
    Map,
    Slots,
    StepAdapters,
)
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    MAX_TOKENS,
    Decoder,
    DecoderSizes,
    HeadWeights,
    LayerWeights,
    Part,
    Places,
    Stages,
    supported,
)
from legato_engine.kernels.cuda.packing import fold_norm, pack, pack_beside, pair_rotated
from legato_engine.kernels.cuda.regions import Regions, RegionSizes, TokenInputs, ValueWeights
from legato_engine.kernels.cuda.sampling import PayloadReader, RowTensors
from legato_engine.layers.linear import Linear
from legato_engine.layers.lora import AdapterBank
from legato_engine.layers.mlp import MLP
from legato_engine.models.model import KVCache, StepInputs
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.region import Region
from legato_engine.models.moondream.text import Text, TextBlock


class FusedMoondream:
    """A `models.model.StepKernels` over a network's text and region parts."""

    def __init__(
        self,
        config: MoondreamConfig,
        text: Text,
        region: Region,
        kv: KVCache,
        adapters: AdapterBank | None = None,
        stages: Stages = DEFAULT_STAGES,
    ) -> None:
        device = text.wte.device
        self._kv = kv
        self._words_VD = text.wte
        sizes, values = decoder_sizes(config, kv), region_sizes(config)
        self._layers = [_layer(cast(TextBlock, block), sizes) for block in text.blocks]
        weights, folded = fold_norm(text.lm_head.weight, text.lm_head.bias, _norm(text.post_ln))
        self._head = HeadWeights(pack(weights), folded)
        self._angles = text.rope.cos_PR, text.rope.sin_PR
        self._decoder = Decoder(sizes, device, stages)
        self._bank = adapters
        if adapters is not None:
            self._adapted = [
                _adapted(cast(TextBlock, block), adapters, layer)
                for layer, block in enumerate(text.blocks)
            ]
            self._low_rank = LowRank(sizes.dim, sizes.ff_dim, adapters.max_rank, device)
        coord, size = _values(region, values.parts)
        self._regions = Regions(values, coord, size, device)
        self._payloads = PayloadReader(
            coord_bins=values.coord_bins,
            size_bins=values.size_bins,
            coord=values.coord_token,
            size=values.size_token,
        )

    def forward(self, inputs: StepInputs, hidden_BD: torch.Tensor, logits_BV: torch.Tensor) -> None:
        """Run B tokens; fills `hidden_BD` and the float32 `logits_BV`."""
        for part in _passes(hidden_BD.shape[0]):
            some = inputs.part(part)
            self.embed(some, hidden_BD[part])
            self.layers(some, hidden_BD[part])
            self.head(hidden_BD[part], logits_BV[part])

    def embed(self, inputs: StepInputs, hidden_BD: torch.Tensor) -> None:
        """Fill the residual stream with the tokens' words and values."""
        tokens = TokenInputs(
            inputs.source_B,
            inputs.token_R,
            inputs.payload_R2,
            inputs.prompt_token_B,
            inputs.prompt_payload_B2,
        )
        self._regions.embed(tokens, self._words_VD, hidden_BD)

    def layers(
        self,
        inputs: StepInputs,
        hidden_BD: torch.Tensor,
        parts: Collection[Part] = tuple(Part),
    ) -> None:
        """Run all layers on the residual stream; fewer `parts` are for measuring."""
        places = Places(inputs.row_B, inputs.position_B, inputs.fresh_B, inputs.page_table_RM)
        keys, values = self._kv.k_LNHSE, self._kv.v_LNHSE
        adapters = self._adapters(inputs)
        angles = self._angles
        self._decoder.layers(hidden_BD, self._layers, places, keys, values, angles, parts, adapters)

    def head(self, hidden_BD: torch.Tensor, logits_BV: torch.Tensor) -> None:
        """Fill the float32 logits of the residual stream."""
        self._decoder.head(hidden_BD, self._head, logits_BV)

    def bins(
        self, token_B: torch.Tensor, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 logits of coord and size bins; only those that a token needs are up to date."""
        self._regions.bins(token_B, hidden_BD)
        batch = token_B.shape[0]
        return self._regions.coord_bins_BC[:batch], self._regions.size_bins_BC[:batch]

    def payload(
        self,
        state: RowTensors,
        hidden_BD: torch.Tensor,
        token_B: torch.Tensor,
        row_B: torch.Tensor,
        payload_B2: torch.Tensor,
    ) -> None:
        """Write the values of coord and size tokens, here and in their rows; zero for others."""
        for part in _passes(hidden_BD.shape[0]):
            coord_BN, size_BS = self.bins(token_B[part], hidden_BD[part])
            self._payloads.read(state, coord_BN, size_BS, row_B[part], payload_B2[part])

    def _adapters(self, inputs: StepInputs) -> StepAdapters | None:
        if inputs.adapter_slot_R is None:
            return None
        assert self._bank is not None, "adapters need a bank"
        slots = Slots(inputs.adapter_slot_R, self._bank.rank_S)
        return StepAdapters(self._low_rank, self._adapted, slots)


def _passes(batch: int) -> list[slice]:
    """Slices of a batch, as large as one pass of the weights can serve."""
    return [slice(i, min(i + MAX_TOKENS, batch)) for i in range(0, batch, MAX_TOKENS)]


def decoder_sizes(config: MoondreamConfig, kv: KVCache) -> DecoderSizes:
    """The text part's sizes over this KV cache."""
    text = config.text
    return DecoderSizes(
        dim=text.dim,
        ff_dim=text.ff_dim,
        num_heads=text.num_heads,
        rotary_dim=text.rotary_dim,
        vocab_size=text.vocab_size,
        page_size=kv.page_size,
        max_pages=-(-text.max_context // kv.page_size),
    )


def can_fuse(config: MoondreamConfig, kv: KVCache) -> bool:
    """Whether the kernels run this model on the device of its KV cache.

    They know neither gains nor experts nor heads without an inner layer, and one divisor of coords.
    """
    text, region = config.text, config.region
    if text.tau is not None or text.moe is not None or region.coord_reaches_one:
        return False
    if region.inner_dim is None:
        return False
    fits = region.inner_dim % 64 == 0 and region.coord_bins % 64 == 0 and region.size_bins % 64 == 0
    fits = fits and region.coord_features % 4 == 0 and region.size_features % 4 == 0
    return fits and supported(decoder_sizes(config, kv), kv.k_LNHSE.device, kv.k_LNHSE.dtype)


def region_sizes(config: MoondreamConfig) -> RegionSizes:
    """The sizes of the region part."""
    region = config.region
    assert region.inner_dim is not None, "`can_fuse` refuses such heads"
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


def _layer(block: TextBlock, sizes: DecoderSizes) -> LayerWeights:
    attention, mlp = block.attn, block.mlp
    assert isinstance(mlp, MLP), "`can_fuse` refuses experts"
    weights, folded = fold_norm(
        torch.cat([attention.qkv.weight, mlp.fc1.weight]),
        torch.cat([attention.qkv.bias, mlp.fc1.bias]),
        _norm(block.ln),
    )
    order = torch.arange(len(weights), device=weights.device)
    rotated = pair_rotated(sizes.num_heads, weights.device)
    order[: len(rotated)] = rotated
    return LayerWeights(
        weights_in=pack(weights[order]),
        folded_in=folded,
        weights_out=pack_beside([attention.proj.weight, mlp.fc2.weight], sizes.parts),
        proj_bias=attention.proj.bias,
        fc2_bias=mlp.fc2.bias,
    )


def _adapted(block: TextBlock, bank: AdapterBank, layer: int) -> LayerAdapters:
    fc1_a, fc1_b, fc2_a, fc2_b = (tensor[layer] for tensor in bank.weights.tensors)
    return LayerAdapters(_norm(block.ln), Map(fc1_a, fc1_b), Map(fc2_a, fc2_b))


def _norm(norm: nn.LayerNorm) -> tuple[torch.Tensor, torch.Tensor]:
    return norm.weight, norm.bias


def _values(region: Region, parts: int) -> tuple[ValueWeights, ValueWeights]:
    """The coord's and the size's weights."""
    coord = _value(region.coord_features, region.coord_encoder, region.coord_decoder, parts)
    return coord, _value(region.size_features, region.size_encoder, region.size_decoder, parts)


def _value(
    features: torch.Tensor, encoder: Linear, decoder: MLP | Linear, parts: int
) -> ValueWeights:
    assert isinstance(decoder, MLP), "`can_fuse` refuses heads without an inner layer"
    return ValueWeights(
        features=features,
        encoder_weight=encoder.weight,
        encoder_bias=encoder.bias,
        fc1_weights=pack(decoder.fc1.weight),
        fc1_bias=decoder.fc1.bias,
        fc2_weights=pack(decoder.fc2.weight, parts),
        fc2_bias=decoder.fc2.bias,
    )
