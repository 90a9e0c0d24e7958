"""Moondream on a device.

Shape legend: T tokens, B rows, D text width, V vocabulary, P prefix positions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from legato_engine.kernels import packed_weights
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.reference_certainty import existence
from legato_engine.layers.linear import pack_linears
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.capabilities import (
    Adapter,
    Capabilities,
    ImageEncoder,
    MaskRefiner,
    Pinned,
)
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.adapters import bank_sizes, parse_adapter
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.constraints import constraint_table
from legato_engine.models.moondream.decode_step import MoondreamStep
from legato_engine.models.moondream.draft import read_draft
from legato_engine.models.moondream.preprocess import CroppedImage
from legato_engine.models.moondream.region import Region
from legato_engine.models.moondream.step_sizes import has_kernels
from legato_engine.models.moondream.text import Text
from legato_engine.models.moondream.vision import Vision
from legato_engine.models.paged_cache import Chunk, DecodeBatch, KVCache, PrefillSpan
from legato_engine.models.step_kernels import StepKernels
from legato_engine.speculative.proposer import Proposer


class Network(nn.Module):
    """All weights, named as in published checkpoints without `model.`."""

    def __init__(self, config: MoondreamConfig) -> None:
        super().__init__()
        self.vision = Vision(config.vision, config.text.dim)
        self.text = Text(config.text)
        self.region = Region(config.region, config.text.dim)

    def pack(self, kind: str, library: Library | None) -> None:
        """Pack all linear maps on the CPU, the rotations being there."""
        self.text.lm_head.pack(packed_weights.head_kind(kind), library)
        pack_linears(self, kind, library)
        if library is not None:
            self.text.use_library(library)
            self.vision.use_library(library)

    @property
    def runs_by_library(self) -> bool:
        return self.text.runs_by_library and self.vision.runs_by_library


class MoondreamModel:
    """A `Model` with all `Capabilities` over a loaded, frozen `Network`."""

    def __init__(self, config: MoondreamConfig, network: Network) -> None:
        text = config.text
        self.constraints = constraint_table(config)
        self.num_layers = text.num_layers
        self.num_kv_heads = text.num_heads
        self.head_dim = text.head_dim
        self.vocab_size = text.vocab_size
        self.width = text.dim
        self.max_context = text.max_context
        self.dtype = network.text.wte.dtype
        self.kv_scale_L2 = network.text.kv_scales()
        self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
        self.bos_token = config.tokens.bos
        self._config = config
        self._network = network
        self._tokens = config.tokens
        self._device = network.text.wte.device
        network.text.fill(self._device)

    @property
    def capabilities(self) -> Capabilities:
        encodes = self._device.type == "cuda" and self.dtype is torch.bfloat16
        return Capabilities(
            values=self,
            adapters=self,
            step=self,
            images=self if encodes else None,
            drafts=self,
            refiners=self,
            chunks=self if self._config.text.moe is None else None,
            own_threads=self._network.runs_by_library,
        )

    def prefix_embeddings(self, image: PreparedImage | None) -> torch.Tensor:
        bos = self._tokens.bos
        bos_1D = self._network.text.wte[bos : bos + 1]
        if image is None:
            return bos_1D
        crops: CroppedImage = image.pixels
        image_TD = self._network.vision(self._upload(crops), crops.tiling)
        return torch.cat([bos_1D, image_TD])

    def embed(self, token_ids_T: torch.Tensor, payload_T2: torch.Tensor) -> torch.Tensor:
        region = self._network.region
        words_TD = self._network.text.wte[token_ids_T]
        coords_TD = region.encode_coord(payload_T2[:, :1])
        sizes_TD = region.encode_size(payload_T2)
        kind_T1 = token_ids_T[:, None]
        x_TD = torch.where(kind_T1 == self._tokens.coord, coords_TD, words_TD)
        return torch.where(kind_T1 == self._tokens.size, sizes_TD, x_TD)

    def prefill(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> torch.Tensor:
        return self._network.text.prefill(x_TD, span, kv)

    def prefill_chunk(self, x_TD: torch.Tensor, chunk: Chunk, kv: KVCache) -> torch.Tensor:
        return self._network.text.chunk(x_TD, chunk, kv)

    def cache_span(self, x_TD: torch.Tensor, span: PrefillSpan, kv: KVCache) -> None:
        self._network.text.cache_span(x_TD, span, kv)

    def decode(self, x_BD: torch.Tensor, batch: DecodeBatch, kv: KVCache) -> torch.Tensor:
        return self._network.text.decode(x_BD, batch, kv)

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return self._network.text.logits(hidden_BD)

    def values(
        self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor, logits_BV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Payloads: (value, 0) of a coord token, (width, height) of a size token."""
        region, tokens = self._network.region, self._tokens
        coord_B, near_coord_B = region.decode_coord(hidden_BD)
        size_B2, near_size_B = region.decode_size(hidden_BD)
        is_coord_B, is_size_B = token_ids_B == tokens.coord, token_ids_B == tokens.size
        coord_B2 = torch.stack([coord_B, torch.zeros_like(coord_B)], dim=-1)
        payload_B2 = torch.where(is_coord_B[:, None], coord_B2, 0.0)
        payload_B2 = torch.where(is_size_B[:, None], size_B2, payload_B2)
        near_B = torch.where(is_coord_B, near_coord_B, torch.where(is_size_B, near_size_B, 1.0))
        existence_B = existence(logits_BV, token_ids_B, tokens.eos)
        existence_B = torch.where(is_coord_B | is_size_B, existence_B, 1.0)
        return payload_B2, torch.stack([existence_B, near_B], dim=-1)

    def payload_logprobs(
        self, hidden_BD: torch.Tensor, token_ids_B: torch.Tensor, payload_B2: torch.Tensor
    ) -> torch.Tensor:
        """Of a coord's bin, or of both bins of a size."""
        region = self._network.region
        coord_B = region.coord_logprobs(hidden_BD, payload_B2[:, 0])
        size_B = region.size_logprobs(hidden_BD, payload_B2)
        logprob_B = torch.where(token_ids_B == self._tokens.coord, coord_B, 0.0)
        return torch.where(token_ids_B == self._tokens.size, size_B, logprob_B)

    def adapter_bank(self, num_slots: int, max_rank: int) -> AdapterBank:
        sizes, like = bank_sizes(self._config.text), self._network.text.wte
        return AdapterBank(sizes, num_slots=num_slots, max_rank=max_rank, like=like)

    def read_adapter(self, data: bytes, key: str, max_rank: int) -> Adapter:
        weights = parse_adapter(data, self._config, max_rank, self.dtype)
        if self._device.type != "cpu":
            weights = weights.pinned()
        num_bytes = sum(tensor.nbytes for tensor in weights.tensors)
        return Adapter(key, weights.rank, weights, num_bytes)

    def draft_proposer(self, path: Path, kv: KVCache) -> Proposer:
        return read_draft(path, self._config, self._network.text, kv)

    def mask_refiner(self, path: Path) -> MaskRefiner:
        from legato_engine.models.moondream.outlines.refiner import MoondreamRefiner

        return MoondreamRefiner(self._config, self._network.vision, path)

    def step_kernels(self, kv: KVCache, adapters: AdapterBank | None) -> StepKernels | None:
        if not has_kernels(self._config, kv, self.dtype):
            return None
        text, region = self._network.text, self._network.region
        return MoondreamStep(self._config, text, region, kv, adapters)

    def image_encoder(self, pinned: Pinned, num_images: int) -> ImageEncoder:
        from legato_engine.models.moondream.image_encoder import MoondreamImageEncoder

        vision, text = self._network.vision, self._network.text
        return MoondreamImageEncoder(self._config, vision, text, pinned, num_images)

    def _upload(self, crops: CroppedImage) -> torch.Tensor:
        """Page-locked first, so that the host does not wait."""
        pixels = torch.from_numpy(crops.pixels_NHWC)
        if self._device.type == "cpu":
            return pixels
        return pixels.pin_memory().to(self._device, non_blocking=True)
