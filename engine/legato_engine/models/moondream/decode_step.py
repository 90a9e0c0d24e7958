"""Moondream's decode step by kernels.

Shape legend: B tokens, D text width, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from legato_engine.kernels.parameters import DenseMlp
from legato_engine.kernels.resident import (
    ResidentDecoder,
    builds_for,
    model_sizes,
    obstacle,
    subject,
    values_obstacle,
)
from legato_engine.kernels.resident_builds import Build
from legato_engine.kernels.resident_launch import ResidentOffer
from legato_engine.kernels.step import (
    DEFAULT_STAGES,
    MAX_TOKENS,
    DecoderStep,
    Part,
    Stages,
    StepAdapters,
    StepCache,
    StepPositions,
)
from legato_engine.kernels.value_heads import RowTensors, SampledTokens, TokenInputs
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.region import Region
from legato_engine.models.moondream.step_sizes import decoder_sizes, tau_sizes
from legato_engine.models.moondream.step_weights import (
    adapter_step,
    affine,
    decoder_layers,
    expert_dtype,
    value_heads,
)
from legato_engine.models.moondream.text import Text
from legato_engine.models.paged_cache import KVCache
from legato_engine.models.step_kernels import StepInputs
from legato_engine.speculative.block_policy import BlockPolicy


class MoondreamStep:
    """A `StepKernels` over text and region parts."""

    def __init__(
        self,
        config: MoondreamConfig,
        text: Text,
        region: Region,
        kv: KVCache,
        adapters: AdapterBank | None = None,
        stages: Stages = DEFAULT_STAGES,
    ) -> None:
        self._sizes = sizes = decoder_sizes(config, kv)
        self._text = text
        angles = text.rope.cos_PR, text.rope.sin_PR
        self._cache = StepCache(kv.k_LNHSE, kv.v_LNHSE, kv.scale_L2, *angles)
        self._decoder = DecoderStep(
            sizes if config.text.tau is None else tau_sizes(config, sizes, expert_dtype(text)),
            decoder_layers(text),
            affine(text.lm_head),
            affine(text.post_ln),
            self._cache,
            stages,
        )
        self._values = value_heads(config, text, region)
        self._adapter_step = None
        if adapters is not None:
            self._adapter_step = adapter_step(config, text, sizes, adapters)
        self.parts = self._decoder.parts
        self.expert_LBK = self._decoder.expert_LBK

    def forward(
        self, inputs: StepInputs, hidden_BD: torch.Tensor, logits_BV: torch.Tensor | None
    ) -> None:
        for part in _passes(hidden_BD.shape[0]):
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
        self._decoder.layers(hidden_BD, positions, parts, self._adapters(inputs))

    def head(self, hidden_BD: torch.Tensor, logits_BV: torch.Tensor) -> None:
        self._decoder.head(hidden_BD, logits_BV)

    def bins(
        self, token_B: torch.Tensor, hidden_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 logits of coord and size bins; only those that a token needs are up to date."""
        return self._values.bins(token_B, hidden_BD)

    def values(self, state: RowTensors, sampled: SampledTokens) -> None:
        """Write the values of coord and size tokens; zeros and certainties of 1 for others."""
        for part in _passes(sampled.hidden_BD.shape[0]):
            self._values.read(state, sampled.part(part))

    def resident(self, max_rows: int, policy: BlockPolicy | None = None) -> ResidentOffer | str:
        text = self._text
        layers = decoder_layers(text)
        plain = all(isinstance(layer.mlp, DenseMlp) and layer.tau is None for layer in layers)
        if reason := obstacle(self._sizes, len(layers), text.wte, plain=plain):
            return reason
        values = self._values.two_layers
        has_values = values is not None and values_obstacle(self._sizes, values) is None
        block = 0 if policy is None else policy.max_block
        builds = builds_for(max_rows, values=has_values, block=block)

        def make(wanted: Collection[Build]) -> ResidentDecoder:
            return ResidentDecoder(
                model_sizes(self._sizes, len(layers)),
                layers,
                affine(text.lm_head),
                affine(text.post_ln),
                text.wte,
                self._cache,
                wanted=wanted,
                values=values if has_values else None,
                policy=policy,
            )

        about = subject(self._sizes, len(layers), builds, policy, text.wte.device)
        return ResidentOffer(about, builds, make)

    def _adapters(self, inputs: StepInputs) -> StepAdapters | None:
        if inputs.adapter_slot_R is None:
            return None
        assert self._adapter_step is not None, "adapters need a bank"
        return self._adapter_step.step(inputs.adapter_slot_R)


def _passes(batch: int) -> list[slice]:
    return [slice(i, min(i + MAX_TOKENS, batch)) for i in range(0, batch, MAX_TOKENS)]
