"""A decode step to measure: a model with random weights, its kernels, and random contexts.

Shape legend: B tokens, D text width, V vocabulary, R rows of the token state and the page table, M
pages per row; a weight of experts has X experts, O outputs and I inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from legato_engine.kernels import pages
from legato_engine.kernels.cuda.attention import GROUP
from legato_engine.kernels.cuda.decoder import Stages
from legato_engine.kernels.map_codes import GROUP as GROUP_INPUTS
from legato_engine.kernels.map_codes import KINDS, WeightKind, format_of
from legato_engine.layers.mlp import ExpertLinear
from legato_engine.models.base import StepInputs
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.decode_step import MoondreamStep, has_kernels
from legato_engine.models.moondream.model import MoondreamModel, Network
from legato_engine.models.moondream.presets import (
    legato_tiny_config,
    moondream2_config,
    moondream3_config,
)
from legato_engine.models.moondream.text import WeightKinds
from legato_engine.models.moondream.weights import random_weights
from legato_engine.models.paged_attention import KVCache
from legato_engine.runtime.kv_pool import kv_dtype

# ---------------------------------------------------------------- byte floor

# The byte floor of a decode step: the bytes that it must read over the bandwidth.
#
# Shape legend: L layers, B tokens, K experts that a token chose.

BANDWIDTH = 4.68e12  # bytes a second that one H200 reads at most


def context_bytes(config: MoondreamConfig, rows: int, position: int, kv_bytes: int = 2) -> int:
    """Count the bytes of keys and values that a step must read; elements have `kv_bytes`."""
    text = config.text
    return text.num_layers * 2 * text.dim * position * rows * kv_bytes


def floor_ms(
    config: MoondreamConfig, cached: int, touched: Sequence[int], kinds: WeightKinds
) -> float:
    """Return the milliseconds to read weights, and `cached` bytes of keys and values.

    `touched` are the experts that a step reads, by layer.
    """
    text = config.text
    maps, head, experts = (each.stage_bytes(GROUP_INPUTS) / (16 * GROUP_INPUTS) for each in kinds)
    weights = text.vocab_size * text.dim * head
    for layer in range(text.num_layers):
        weights += 4 * text.dim**2 * maps
        if text.tau is not None:
            weights += 6 * text.num_heads * text.dim * 2
        if text.moe is None or layer < text.moe.first_layer:
            weights += 2 * text.dim * text.ff_dim * maps
        else:
            rows = 1 if kinds.maps is WeightKind.BF16 else 2  # of a logit
            weights += rows * text.moe.num_experts * text.dim * maps
            weights += touched[layer] * 3 * text.dim * text.moe.inner_dim * experts
    return (weights + cached) / BANDWIDTH * 1e3


def experts_touched(config: MoondreamConfig, expert_LBK: torch.Tensor | None) -> list[int]:
    """Count the experts that a step's tokens chose, by layer; 0 for layers without experts."""
    text = config.text
    if expert_LBK is None or text.moe is None:
        return [0] * text.num_layers
    first = text.moe.first_layer
    return [0] * first + [len(layer.unique()) for layer in expert_LBK[first:]]


# ---------------------------------------------------------------- step bench

MODELS = {
    "moondream2": moondream2_config,
    "moondream3": moondream3_config,
    "moondream3-fp8": moondream3_config,
    "moondream3-fp8-kv8": moondream3_config,
    "moondream3-int8": moondream3_config,
    "moondream3-int4": moondream3_config,
    "moondream3-int4-kv8": moondream3_config,
    "moondream3-e4m3": moondream3_config,
    "moondream3-e4m3-kv8": moondream3_config,
    "legato-tiny": legato_tiny_config,
}
BATCHES = (1, 2, 4, 8, 16, 24, 32)  # that the service has
PAGE = 16
CONTEXT = 850
KV_SCALE = 0.02
ROWS = 34
DEVICE = torch.device("cuda")


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model with random weights, its kernels, and a KV cache of random contexts."""

    config: MoondreamConfig
    network: Network
    model: MoondreamModel
    kernels: MoondreamStep
    kv: KVCache
    table_RM: torch.Tensor
    position: int  # the last of the first row
    rows: int  # that have pages; the last of them is the padding's

    @classmethod
    def make(cls, name: str) -> Bench:
        """Build everything on the GPU, with pages in random order."""
        config = MODELS[name.removesuffix("-kv8").partition("-")[0]]()
        network = random_weights(config, 0, DEVICE, torch.bfloat16)
        if (weights := next((kind for kind in KINDS if kind in name), None)) is not None:
            network.quantise(weights)
        if "e4m3" in name:  # only experts, as their publisher does
            for layer in network.modules():
                if isinstance(layer, ExpertLinear):
                    layer.quantise(format_of(WeightKind.E4M3))
        if name.endswith("kv8"):
            network.text.use_fp8_kv()
            for tensor_name, tensor in network.text.state_dict().items():
                if tensor_name.endswith(("k_scale", "v_scale")):
                    tensor.fill_(KV_SCALE)
        position = min(CONTEXT, config.text.max_context - 1)
        return cls._over(config, network, position, ROWS)

    @classmethod
    def _over(cls, config: MoondreamConfig, network: Network, position: int, rows: int) -> Bench:
        """Return the model with pages for `rows` rows up to a position."""
        model, text = MoondreamModel(config, network), config.text
        num_pages, scales = position // PAGE + 1, model.kv_scale_L2
        shape = (text.num_layers, rows * num_pages + 1, text.num_heads, PAGE, text.head_dim)
        keys, values = (torch.empty(shape, dtype=kv_dtype(model), device=DEVICE) for _ in range(2))
        for layer in (*keys, *values):
            random = torch.randn(layer.shape, dtype=torch.bfloat16, device=DEVICE)
            layer.copy_(pages.quantise(random, None if scales is None else scales[0, 0]))
        kv = KVCache(keys, values, model.kv_scale_L2)
        kinds = network.text.kinds
        assert has_kernels(config, kv, torch.bfloat16, kinds), "this GPU or model has no kernels"
        kernels = MoondreamStep(config, network.text, network.region, kv)
        most_pages = -(-text.max_context // PAGE)
        table_RM = torch.zeros(ROWS, most_pages, dtype=torch.int64, device=DEVICE)
        dealt = torch.randperm(rows * num_pages, device=DEVICE) + 1
        table_RM[:rows, :num_pages] = dealt.view(rows, num_pages)
        return cls(config, network, model, kernels, kv, table_RM, position, rows)

    def at(self, position: int, rows: int) -> Bench:
        """Return the same model with as many rows at another position."""
        return self._over(self.config, self.network, position, rows)

    def with_stages(self, stages: Stages) -> Bench:
        """Return the same model with rings of other depths."""
        network = self.network
        text, region = network.text, network.region
        kernels = MoondreamStep(self.config, text, region, self.kv, stages=stages)
        return dataclasses.replace(self, kernels=kernels)

    def inputs(self, rows: int, tokens: int = 1) -> StepInputs:
        """Return `tokens` tokens of each of `rows` at the benchmark's context, in a random order.

        Padded to a batch size of the service; the last row is the padding's.
        """
        text, special = self.config.text, self.config.tokens
        token_R = torch.randint(10, text.vocab_size, (ROWS,), device=DEVICE)
        token_R[::3], token_R[1::3] = special.coord, special.size
        count = rows * tokens
        batch = next(batch for batch in BATCHES if batch >= count)
        at_B = torch.arange(batch, device=DEVICE)
        is_real_B, index_B = at_B < count, at_B // tokens
        row_B = torch.randperm(self.rows - 1, device=DEVICE)[index_B % (self.rows - 1)]
        row_B = row_B.masked_fill(~is_real_B, self.rows - 1)
        fresh_B = self.position - tokens + 1 - index_B
        return StepInputs(
            source_B=row_B,
            row_B=row_B,
            position_B=(fresh_B + at_B % tokens).masked_fill(~is_real_B, 0),
            fresh_B=fresh_B.masked_fill(~is_real_B, 1),
            prompt_token_B=torch.zeros_like(row_B),
            prompt_payload_B2=torch.zeros(batch, 2, device=DEVICE),
            token_R=token_R,
            payload_R2=torch.rand(ROWS, 2, device=DEVICE),
            page_table_RM=self.table_RM,
            num_groups=rows * -(-tokens // GROUP),
        )

    def empty(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uninitialised hidden state and logits."""
        text = self.config.text
        hidden_BD = torch.full((batch, text.dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        return hidden_BD, torch.full((batch, text.vocab_size), torch.nan, device=DEVICE)
