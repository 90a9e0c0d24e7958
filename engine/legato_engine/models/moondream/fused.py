"""Moondream's decode step as kernels: the network's weights, handed to them by name.

Shape legend: B tokens, D text width, V vocabulary, R rows of the token state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
from torch import nn

from legato_engine.kernels.cuda import gained
from legato_engine.kernels.cuda.adapters import (
    LayerAdapters,
    LowRank,
    Map,
    Slots,
    StepAdapters,
)
from legato_engine.kernels.cuda.attention import Places
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    MAX_TOKENS,
    Decoder,
    DecoderSizes,
    LayerWeights,
    Part,
    Stages,
    supported,
)
from legato_engine.kernels.cuda.gained import (
    ExpertLayer,
    ExpertSizes,
    GainedDecoder,
    GainedLayer,
    GainedSizes,
    Gains,
)
from legato_engine.kernels.cuda.head import HeadWeights
from legato_engine.kernels.cuda.packing import fold_norm, pack, pack_beside, pair_rotated
from legato_engine.kernels.cuda.regions import (
    Bins,
    DecoderWeights,
    Embedder,
    EncoderWeights,
    MlpBins,
    NormedBins,
    RegionSizes,
    TokenInputs,
)
from legato_engine.kernels.cuda.sampling import PayloadReader, RowTensors
from legato_engine.layers.linear import Linear
from legato_engine.layers.lora import AdapterBank
from legato_engine.layers.mlp import MLP
from legato_engine.layers.moe import MoE
from legato_engine.models.model import KVCache, StepInputs
from legato_engine.models.moondream.config import Gelu, MoondreamConfig
from legato_engine.models.moondream.region import Region
from legato_engine.models.moondream.text import Text, TextBlock

Layers = Callable[
    [
        torch.Tensor,
        Places,
        torch.Tensor,
        torch.Tensor,
        tuple[torch.Tensor, torch.Tensor],
        Collection[Part],
        StepAdapters | None,
    ],
    None,
]
"""`Decoder.layers` of a network: its weights are known."""


class FusedMoondream:
    """A `models.model.StepKernels` over a network's text and region parts.

    `parts` are the kernels of its layers. `expert_LBK`: see `GainedDecoder`; None without experts.
    """

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
        self._decoder, self._layers = _layers(config, text, kv, stages)
        self.parts = self._decoder.parts
        self.expert_LBK: torch.Tensor | None = None
        if isinstance(self._decoder, GainedDecoder):
            self.expert_LBK = self._decoder.expert_LBK
        self._head = _normed_map([text.lm_head], text.post_ln)
        self._angles = text.rope.cos_PR, text.rope.sin_PR
        self._bank = adapters
        if adapters is not None:
            self._adapted = [
                _adapted(cast(TextBlock, block), adapters, layer)
                for layer, block in enumerate(text.blocks)
            ]
            ff_dim = config.text.ff_dim
            self._low_rank = LowRank(config.text.dim, ff_dim, adapters.max_rank, device)
        values = region_sizes(config)
        coord = EncoderWeights(region.coord_features, *_map(region.coord_encoder))
        size = EncoderWeights(region.size_features, *_map(region.size_encoder))
        self._embedder = Embedder(values, coord, size)
        self._bins = _bins(values, region, device)
        self._payloads = PayloadReader(
            coord_bins=values.coord_bins,
            coord_divisor=config.region.coord_divisor,
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
        self._embedder.embed(tokens, self._words_VD, hidden_BD)

    def layers(
        self,
        inputs: StepInputs,
        hidden_BD: torch.Tensor,
        parts: Collection[Part] = tuple(Part),
    ) -> None:
        """Run all layers on the residual stream; fewer `parts` are for measuring."""
        places = Places(
            inputs.row_B,
            inputs.position_B,
            inputs.fresh_B,
            inputs.page_table_RM,
            inputs.num_groups,
        )
        keys, values = self._kv.k_LNHSE, self._kv.v_LNHSE
        adapters = self._adapters(inputs)
        self._layers(hidden_BD, places, keys, values, self._angles, parts, adapters)

    def head(self, hidden_BD: torch.Tensor, logits_BV: torch.Tensor) -> None:
        """Fill the float32 logits of the residual stream."""
        self._decoder.head(hidden_BD, self._head, logits_BV)

    def bins(
        self, token_B: torch.Tensor, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 logits of coord and size bins; only those that a token needs are up to date."""
        self._bins.fill(token_B, hidden_BD)
        batch = token_B.shape[0]
        return self._bins.coord_bins_BN[:batch], self._bins.size_bins_BN[:batch]

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

    They know gains and experts together or neither.
    """
    text, region = config.text, config.region
    if (text.tau is None) != (text.moe is None):
        return False
    if text.moe is not None and not gained.supported(_expert_sizes(config, kv.k_LNHSE.dtype)):
        return False
    if region.inner_dim is not None and region.inner_dim % 64:
        return False
    fits = region.coord_bins % 64 == 0 and region.size_bins % 64 == 0
    fits = fits and region.coord_features % 4 == 0 and region.size_features % 4 == 0
    return fits and supported(decoder_sizes(config, kv), kv.k_LNHSE.device, kv.k_LNHSE.dtype)


def region_sizes(config: MoondreamConfig) -> RegionSizes:
    """The sizes of the region part."""
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


def gained_sizes(
    config: MoondreamConfig, decoder: DecoderSizes, expert_dtype: torch.dtype
) -> GainedSizes:
    """The sizes of a text part with gains and experts."""
    assert config.text.tau is not None, "only where there are gains"
    exact = config.text.tau.gelu is Gelu.EXACT
    return GainedSizes(decoder, _expert_sizes(config, expert_dtype), exact)


def _expert_sizes(config: MoondreamConfig, dtype: torch.dtype) -> ExpertSizes:
    moe = config.text.moe
    assert moe is not None, "only where there are experts"
    return ExpertSizes(moe.num_experts, moe.num_active, moe.inner_dim, dtype.itemsize)


def _layers(
    config: MoondreamConfig, text: Text, kv: KVCache, stages: Stages
) -> tuple[Decoder | GainedDecoder, Layers]:
    """The kernels, and how they run this network's layers."""
    device, sizes = text.wte.device, decoder_sizes(config, kv)
    blocks = [cast(TextBlock, block) for block in text.blocks]
    if config.text.tau is None:
        decoder = Decoder(sizes, device, stages)
        plain = [_layer(block, sizes, rotated=True) for block in blocks]
        return decoder, lambda x_BD, *rest: decoder.layers(x_BD, plain, *rest)
    expert_dtype = torch.float8_e4m3fn if text.has_fp8_experts else text.wte.dtype
    routed_sizes = gained_sizes(config, sizes, expert_dtype)
    routed = GainedDecoder(routed_sizes, len(blocks), device, stages)
    layers = [_gained_layer(block, sizes) for block in blocks]
    # Such models have no bank of adapters, and so none of their steps has any.
    return routed, lambda x_BD, *rest: routed.layers(x_BD, layers, *rest[:-1])


def _layer(block: TextBlock, sizes: DecoderSizes, *, rotated: bool) -> LayerWeights:
    """`rotated`: the first map's kernel turns queries and keys, pairs of dimensions at a time."""
    attention, mlp = block.attn, block.mlp
    assert isinstance(mlp, MLP), "layers with experts are another kind"
    weights, folded = fold_norm(*_together([attention.qkv, mlp.fc1]), _map(block.ln))
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


def _gained_layer(block: TextBlock, sizes: DecoderSizes) -> GainedLayer:
    attention, mlp = block.attn, block.mlp
    assert attention.tau is not None, "only where there are gains"
    gains = Gains(attention.tau.wqwv, attention.tau.gain_PH)
    if not isinstance(mlp, MoE):
        return GainedLayer(gains, _layer(block, sizes, rotated=False))
    first = _normed_map([attention.qkv, mlp.router], block.ln)
    maps = ExpertLayer(
        weights_in=first.weights,
        folded_in=first.folded,
        norm=_map(block.ln),
        up=mlp.fc1.weights(),
        down=mlp.fc2.weights(),
        proj_DD=attention.proj.weight,
        proj_bias=attention.proj.bias,
    )
    return GainedLayer(gains, maps)


def _map(layer: nn.LayerNorm | Linear) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.weight, layer.bias


def _adapted(block: TextBlock, bank: AdapterBank, layer: int) -> LayerAdapters:
    fc1_a, fc1_b, fc2_a, fc2_b = (tensor[layer] for tensor in bank.weights.tensors)
    return LayerAdapters(_map(block.ln), Map(fc1_a, fc1_b), Map(fc2_a, fc2_b))


def _together(maps: Sequence[Linear]) -> tuple[torch.Tensor, torch.Tensor]:
    """Several maps of the same inputs as one."""
    return torch.cat([map_.weight for map_ in maps]), torch.cat([map_.bias for map_ in maps])


def _normed_map(maps: Sequence[Linear], norm: nn.LayerNorm) -> HeadWeights:
    """Maps of the same normed inputs as one of the raw ones."""
    weights, folded = fold_norm(*_together(maps), _map(norm))
    return HeadWeights(pack(weights), folded)


def _bins(sizes: RegionSizes, region: Region, device: torch.device) -> Bins:
    coord, size = region.coord_decoder, region.size_decoder
    if isinstance(coord, MLP) and isinstance(size, MLP):
        parts = sizes.parts
        return MlpBins(sizes, _decoder(coord, parts), _decoder(size, parts), device)
    assert isinstance(coord, Linear), "both have one form"
    assert isinstance(size, Linear), "both have one form"
    assert region.ln is not None, "single maps stand behind a norm"
    return NormedBins(sizes, _normed_map([coord, size], region.ln), device)


def _decoder(mlp: MLP, parts: int) -> DecoderWeights:
    return DecoderWeights(
        fc1_weights=pack(mlp.fc1.weight),
        fc1_bias=mlp.fc1.bias,
        fc2_weights=pack(mlp.fc2.weight, parts),
        fc2_bias=mlp.fc2.bias,
    )
