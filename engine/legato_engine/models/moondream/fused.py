"""Moondream's decode step as kernels over the network's weights.

Shape legend: B tokens, D text width, V vocabulary, R rows of the token state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

import torch

from legato_engine.kernels.cuda.adapters import StepAdapters
from legato_engine.kernels.cuda.attention import Places
from legato_engine.kernels.cuda.decoder import (
    DEFAULT_STAGES,
    MAX_TOKENS,
    Decoder,
    Part,
    Stages,
)
from legato_engine.kernels.cuda.layer_boundary import LayerBoundary
from legato_engine.kernels.cuda.sampling import PayloadReader, RowTensors
from legato_engine.kernels.cuda.tau_decoder import TauDecoder
from legato_engine.kernels.cuda.value_heads import Embedder, EncoderWeights, TokenInputs
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.fused_adapters import FusedAdapters
from legato_engine.models.moondream.fused_sizes import (
    decoder_sizes,
    region_sizes,
    tau_sizes,
)
from legato_engine.models.moondream.fused_weights import (
    normed_map,
    plain_layer,
    tau_layer,
    value_bins,
    weight_and_bias,
)
from legato_engine.models.moondream.region import Region
from legato_engine.models.moondream.text import Text, TextBlock
from legato_engine.models.paged_cache import KVCache
from legato_engine.models.step_kernels import StepInputs

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
"""`Decoder.layers` with the network's weights bound."""


class FusedMoondream:
    """`StepKernels` over a network's text and region parts.

    `parts` are the kernels of a layer. `expert_LBK`: see `TauDecoder`; None without experts.
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
        if isinstance(self._decoder, TauDecoder):
            self.expert_LBK = self._decoder.expert_LBK
        self._head = normed_map([text.lm_head], text.post_ln)
        self._angles = text.rope.cos_PR, text.rope.sin_PR
        self._adapted = FusedAdapters(config, text, adapters) if adapters is not None else None
        values = region_sizes(config)
        coord = EncoderWeights(region.coord_features, *weight_and_bias(region.coord_encoder))
        size = EncoderWeights(region.size_features, *weight_and_bias(region.size_encoder))
        self._embedder = Embedder(values, coord, size)
        self._bins = value_bins(values, region, device)
        self._payloads = PayloadReader(
            coord_bins=values.coord_bins,
            coord_divisor=config.region.coord_divisor,
            size_bins=values.size_bins,
            coord=values.coord_token,
            size=values.size_token,
        )

    def forward(
        self, inputs: StepInputs, hidden_BD: torch.Tensor, logits_BV: torch.Tensor | None
    ) -> None:
        """Run B tokens; fill `hidden_BD` and the float32 `logits_BV`, if given."""
        for part in _passes(hidden_BD.shape[0]):
            some = inputs.part(part)
            self.embed(some, hidden_BD[part])
            self.layers(some, hidden_BD[part])
            if logits_BV is not None:
                self.head(hidden_BD[part], logits_BV[part])

    def embed(self, inputs: StepInputs, hidden_BD: torch.Tensor) -> None:
        """Fill the residual stream with the embeddings of tokens and values."""
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
        """Run all layers on the residual stream; select `parts` to measure them."""
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
        """Compute float32 logits of coord and size bins; of each token only those that it needs."""
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
        """Write the values of coord and size tokens to `payload_B2` and their rows' state."""
        for part in _passes(hidden_BD.shape[0]):
            coord_BN, size_BS = self.bins(token_B[part], hidden_BD[part])
            self._payloads.read(state, coord_BN, size_BS, row_B[part], payload_B2[part])

    def _adapters(self, inputs: StepInputs) -> StepAdapters | None:
        if inputs.adapter_slot_R is None:
            return None
        assert self._adapted is not None, "adapters need a bank"
        return self._adapted.step(inputs.adapter_slot_R)


def _passes(batch: int) -> list[slice]:
    """Split a batch into slices that fit one pass over the weights."""
    return [slice(i, min(i + MAX_TOKENS, batch)) for i in range(0, batch, MAX_TOKENS)]


def _layers(
    config: MoondreamConfig, text: Text, kv: KVCache, stages: Stages
) -> tuple[Decoder | TauDecoder, Layers]:
    """Build the kernels, and the function that runs this network's layers by them."""
    device, sizes = text.wte.device, decoder_sizes(config, kv)
    blocks = [cast(TextBlock, block) for block in text.blocks]
    if config.text.tau is None:
        decoder = Decoder(sizes, device, stages, LayerBoundary(sizes, len(blocks), device))
        plain = [plain_layer(block, sizes, rotated=True) for block in blocks]
        return decoder, lambda x_BD, *rest: decoder.layers(x_BD, plain, *rest)
    expert_dtype = torch.float8_e4m3fn if text.has_fp8_experts else text.wte.dtype
    routed_sizes = tau_sizes(config, sizes, expert_dtype)
    routed = TauDecoder(routed_sizes, len(blocks), device, stages, kv.scale_L2)
    layers = [tau_layer(block, sizes) for block in blocks]
    return routed, lambda x_BD, *rest: routed.layers(x_BD, layers, *rest)
