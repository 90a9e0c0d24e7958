"""Moondream's decode step by kernels: sizes, weights, launches."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch

from legato_engine.kernels.accelerated import RowTensors, SampledTokens
from legato_engine.kernels.decode_loop import MegakernelOffer
from legato_engine.kernels.map_codes import WeightKind
from legato_engine.kernels.parameters import (
    DecoderLayer,
    DenseMlp,
    ExpertMap,
    ExpertSlots,
    LowRankMap,
    MlpSlots,
)
from legato_engine.kernels.step import (
    DEFAULT_STAGES,
    DecoderSizes,
    ExpertLowRank,
    ExpertSizes,
    LowRankMaps,
    MlpBins,
    NormedBins,
    Part,
    Stages,
    StepCache,
    StepPositions,
    TauSizes,
    TokenInputs,
    ValueEncoder,
    ValueHeads,
    ValueSizes,
    packed_decoder,
    packed_head,
    step_decoder,
    supports_decoder,
    supports_experts,
)
from legato_engine.layers.linear import Linear
from legato_engine.layers.lora import AdapterBank
from legato_engine.layers.mlp import MLP
from legato_engine.models.base import StepInputs
from legato_engine.models.moondream.config import Gelu, MoondreamConfig
from legato_engine.models.moondream.region import RegionCoder, coord_reach, size_reach
from legato_engine.models.moondream.text import Text, TextBlock, WeightKinds, affine
from legato_engine.models.paged_attention import KVCache
from legato_engine.speculation import BlockPolicy

_PLAIN = WeightKinds()


def decoder_sizes(
    config: MoondreamConfig, kv: KVCache, kinds: WeightKinds = _PLAIN
) -> DecoderSizes:
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
        weight_kind=kinds.maps,
        head_kind=kinds.head,
    )


def has_kernels(
    config: MoondreamConfig,
    kv: KVCache,
    dtype: torch.dtype,
    kinds: WeightKinds = _PLAIN,
) -> bool:
    """Return whether kernels run this model on the device of its KV cache.

    They support gains and experts together or neither.
    """
    text, region = config.text, config.region
    if (text.tau is None) != (text.moe is None):
        return False
    sizes = decoder_sizes(config, kv, kinds)
    if text.moe is not None and not supports_experts(tau_sizes(config, sizes, kinds.experts)):
        return False
    if region.inner_dim is not None and region.inner_dim % 64:
        return False
    fits = region.coord_bins % 64 == 0 and region.size_bins % 64 == 0
    fits = fits and region.coord_features % 4 == 0 and region.size_features % 4 == 0
    return fits and supports_decoder(sizes, kv.k_LNHSE.device, dtype)


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


def tau_sizes(config: MoondreamConfig, decoder: DecoderSizes, expert_kind: WeightKind) -> TauSizes:
    assert config.text.tau is not None, "only for a text part with gains"
    exact = config.text.tau.gelu is Gelu.EXACT
    return TauSizes(decoder, expert_sizes(config, expert_kind), exact)


def expert_sizes(config: MoondreamConfig, kind: WeightKind) -> ExpertSizes:
    moe = config.text.moe
    assert moe is not None, "only for a text part with experts"
    return ExpertSizes(moe.num_experts, moe.num_active, moe.inner_dim, kind)


# ---------------------------------------------------------------- step weights


def decoder_layers(text: Text) -> list[DecoderLayer]:
    return [cast(TextBlock, block).parameters_for_kernels() for block in text.blocks]


def value_heads(config: MoondreamConfig, text: Text, region: RegionCoder) -> ValueHeads:
    sizes = value_sizes(config)
    return ValueHeads(
        sizes,
        ValueEncoder(region.coord_features, affine(region.coord_encoder)),
        ValueEncoder(region.size_features, affine(region.size_encoder)),
        _value_bins(region, sizes),
        text.wte,
    )


def low_rank_maps(text: Text, sizes: DecoderSizes, bank: AdapterBank) -> LowRankMaps:
    layers = zip(range(bank.weights.num_layers), text.blocks, strict=False)
    mlps = [_mlp_slots(cast(TextBlock, block), bank, layer) for layer, block in layers]
    return LowRankMaps(sizes.dim, sizes.ff_dim, mlps, bank.rank_S, bank.max_rank)


def _dense(mlp: MLP) -> DenseMlp:
    return DenseMlp(affine(mlp.fc1), affine(mlp.fc2))


def _value_bins(region: RegionCoder, sizes: ValueSizes) -> MlpBins | NormedBins:
    coord, size, device = region.coord_decoder, region.size_decoder, region.coord_features.device
    if isinstance(coord, MLP) and isinstance(size, MLP):
        scalar, pair = (packed_decoder(_dense(each), sizes.parts) for each in (coord, size))
        return MlpBins(sizes, scalar, pair, device)
    assert isinstance(coord, Linear), "both decoders have one form"
    assert isinstance(size, Linear), "both decoders have one form"
    assert region.ln is not None, "single maps read a norm"
    weights = packed_head([affine(coord), affine(size)], affine(region.ln))
    return NormedBins(sizes, weights, device)


def _mlp_slots(block: TextBlock, bank: AdapterBank, layer: int) -> MlpSlots:
    maps = bank.weights.maps
    fc1, fc2 = (LowRankMap(*(each[layer] for each in maps[name])) for name in ("fc1", "fc2"))
    return MlpSlots(block.norm, fc1, fc2)


def expert_low_rank(config: MoondreamConfig, text: Text, bank: AdapterBank) -> ExpertLowRank | None:
    experts = bank.weights.experts
    if not experts:
        return None
    ups, downs = (
        [ExpertMap(*slots) for slots in zip(*experts[name], strict=True)] for name in ("fc1", "fc2")
    )
    layers = {
        layer: ExpertSlots(up, down)
        for layer, (up, down) in enumerate(zip(ups, downs, strict=True), bank.weights.num_layers)
    }
    sizes = expert_sizes(config, text.kinds.experts)
    capacity = experts["fc1"].a_LSRI.shape[-2]
    return ExpertLowRank(config.text.dim, sizes, layers, bank.expert_rank_S, capacity)


# ---------------------------------------------------------------- decode step

# Shape legend: B tokens, D text width, V vocabulary, R rows.


class MoondreamStep:
    """A `StepKernels` over text and region parts."""

    def __init__(
        self,
        config: MoondreamConfig,
        text: Text,
        region: RegionCoder,
        kv: KVCache,
        adapters: AdapterBank | None = None,
        stages: Stages = DEFAULT_STAGES,
    ) -> None:
        kinds = text.kinds
        self._sizes = sizes = decoder_sizes(config, kv, kinds)
        self._text = text
        angles = text.rope.cos_PR, text.rope.sin_PR
        self._cache = StepCache(kv.k_LNHSE, kv.v_LNHSE, kv.scale_L2, *angles)
        quantised = text.quantised_head
        self._decoder = step_decoder(
            sizes if config.text.tau is None else tau_sizes(config, sizes, kinds.experts),
            decoder_layers(text),
            packed_head([affine(text.lm_head)], affine(text.post_ln))
            if quantised is None
            else quantised.weights,
            self._cache,
            stages,
            None if adapters is None else low_rank_maps(text, sizes, adapters),
            None if adapters is None else expert_low_rank(config, text, adapters),
        )
        self._values = value_heads(config, text, region)
        self.max_tokens = min(self._decoder.max_tokens, self._values.max_tokens)
        self.parts = self._decoder.parts
        self.expert_LBK = self._decoder.expert_LBK

    def forward(
        self, inputs: StepInputs, hidden_BD: torch.Tensor, logits_BV: torch.Tensor | None
    ) -> None:
        for part in self._passes(hidden_BD.shape[0]):
            some = inputs.part(part)
            self.embed(some, hidden_BD[part])
            self.layers(some, hidden_BD[part])
            if logits_BV is not None:
                self.head(hidden_BD[part], logits_BV[part])

    def embed(self, inputs: StepInputs, hidden_BD: torch.Tensor) -> None:
        tokens = TokenInputs(
            inputs.source_B,
            inputs.token_R,
            inputs.payload_R2,
            inputs.prompt_token_B,
            inputs.prompt_payload_B2,
        )
        self._values.embed(tokens, hidden_BD)

    def layers(
        self,
        inputs: StepInputs,
        hidden_BD: torch.Tensor,
        parts: Collection[Part] = tuple(Part),
    ) -> None:
        """Run all layers; fewer `parts` are for measuring."""
        positions = StepPositions(
            inputs.row_B,
            inputs.position_B,
            inputs.fresh_B,
            inputs.page_table_RM,
            inputs.num_groups,
        )
        self._decoder.layers(hidden_BD, positions, parts, inputs.adapter_slot_R)

    def head(self, hidden_BD: torch.Tensor, logits_BV: torch.Tensor) -> None:
        self._decoder.head(hidden_BD, logits_BV)

    def bins(
        self, token_B: torch.Tensor, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 logits of coord and size bins; only those that a token needs are up to date."""
        return self._values.bins(token_B, hidden_BD)

    def values(self, state: RowTensors, sampled: SampledTokens) -> None:
        """Write the values of coord and size tokens; zeros and certainties of 1 for others."""
        for part in self._passes(sampled.hidden_BD.shape[0]):
            self._values.read(state, sampled.part(part))

    def offer_megakernel(
        self, max_rows: int, policy: BlockPolicy | None = None
    ) -> MegakernelOffer | str:
        try:
            from legato_engine.kernels.megakernel.offer import offer
        except ModuleNotFoundError:
            return "is not part of this installation"
        text = self._text
        if text.quantised_head is not None:
            return "reads the checkpoint's tensors, which one copy of packed weights replaces"
        return offer(
            self._sizes,
            decoder_layers(text),
            affine(text.lm_head),
            affine(text.post_ln),
            text.wte,
            self._cache,
            self._values.two_layers,
            max_rows,
            policy,
        )

    def _passes(self, batch: int) -> list[slice]:
        """Cut a batch into as few launches as fit the GPU's shared memory, of whole tiles alike."""
        count = -(-batch // self.max_tokens)
        each = -(-batch // (8 * count)) * 8
        return [slice(i, min(i + each, batch)) for i in range(0, batch, each)]
