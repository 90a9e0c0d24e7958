"""Moondream on a device.

Shape legend: N crops, T tokens of a crop, P values of a patch or positions of an image, D vision
width, X text width, C image buffers, M pages.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from legato_engine.errors import AdapterUnusable, InvalidField
from legato_engine.kernels import packed_weights
from legato_engine.kernels.accelerated import ImagePipeline, StitchPool
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.images import MAX_WORDS, NUM_PIXEL_BYTES, HostImage, StagedImage, stage
from legato_engine.kernels.map_codes import KINDS
from legato_engine.kernels.proposer import Proposer
from legato_engine.kernels.reference import existence
from legato_engine.layers.linear import pack_linears
from legato_engine.layers.lora import AdapterBank
from legato_engine.models.base import (
    Adapter,
    ImageEncoder,
    MaskRefiner,
    Model,
    Pinned,
    StepKernels,
)
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.adapters import bank_sizes, parse_adapter
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.decode_step import MoondreamStep, has_kernels
from legato_engine.models.moondream.draft import read_draft
from legato_engine.models.moondream.preprocess import (
    CroppedImage,
    WholeImage,
    crop_geometry,
    max_crops_of,
)
from legato_engine.models.moondream.region import RegionCoder
from legato_engine.models.moondream.tasks import constraint_table
from legato_engine.models.moondream.text import Text
from legato_engine.models.moondream.vision import Vision, normalised
from legato_engine.models.paged_attention import KVCache

_LEVELS = 256
_VALUES_PER_LOAD = 8  # unaligned rows of patches would be copied first


class MoondreamImageEncoder:
    """An `ImageEncoder` over vision and text parts; bfloat16 on CUDA."""

    def __init__(
        self,
        config: MoondreamConfig,
        vision: Vision,
        text: Text,
        pinned: Pinned,
        num_images: int,
    ) -> None:
        sizes, device, dtype = config.vision, text.wte.device, text.wte.dtype
        self.max_crops = max_crops_of(sizes)
        geometry = crop_geometry(sizes)
        self._vision, self._text = vision, text
        levels = torch.arange(_LEVELS, dtype=torch.uint8, device=device)
        self._pipeline = ImagePipeline(geometry, normalised(levels, dtype))
        self._stitch = StitchPool(geometry)
        self._hosts = [
            HostImage(pinned((NUM_PIXEL_BYTES,), torch.uint8), pinned((MAX_WORDS,), torch.int32))
            for _ in range(num_images)
        ]
        self._staged: list[StagedImage | None] = [None] * num_images

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        vision.patch_emb.widen(_VALUES_PER_LOAD)
        vision.count_apart()
        text.count_apart()
        self._num_values = 3 * sizes.patch_size**2
        self._patches_NTP = zeros(self.max_crops, sizes.num_tokens, vision.patch_emb.in_features)
        self._gathered_NTP = torch.zeros_like(self._patches_NTP)
        self._features_NTD = zeros(self.max_crops, sizes.num_tokens, sizes.dim)
        self._gathered_features_NTD = torch.zeros_like(self._features_NTD)
        self._joined_TD = zeros(sizes.num_tokens, 2 * sizes.dim)
        self.embeddings_CPD = zeros(num_images, config.prefix_length, config.text.dim)
        self.embeddings_CPD[:, 0] = text.wte[config.tokens.bos]

    def stage(self, index: int, image: PreparedImage) -> None:
        pixels: WholeImage = image.pixels
        self._staged[index] = stage(pixels.pixels_HWC, pixels.plan, self._hosts[index])

    def upload(self, index: int) -> None:
        staged = self._staged[index]
        assert staged is not None, f"image buffer {index} is uploaded before it is staged"
        self._pipeline.upload(self._hosts[index], staged)

    def cut(self) -> None:
        self._pipeline.cut(self._patches_NTP[..., : self._num_values])

    def gather(self, first: int, stop: int) -> None:
        self._gathered_NTP[: stop - first].copy_(self._patches_NTP[first:stop])

    def encode(self, count: int, *, gathered: bool) -> None:
        patches_NTP = self._gathered_NTP if gathered else self._patches_NTP
        features_NTD = self._gathered_features_NTD if gathered else self._features_NTD
        self._vision.encode_patches(patches_NTP[:count], out_NTD=features_NTD[:count])

    def scatter(self, first: int, stop: int) -> None:
        self._features_NTD[first:stop].copy_(self._gathered_features_NTD[: stop - first])

    def finish(self, index: int) -> torch.Tensor:
        self._stitch(self._features_NTD, self._pipeline.tiling, self._joined_TD)
        embeddings_PX = self.embeddings_CPD[index]
        embeddings_PX[1:].copy_(self._vision.proj_mlp(self._joined_TD))
        return embeddings_PX

    def cache(self, first: int, pages_CM: torch.Tensor, kv: KVCache) -> None:
        x_CPX = self.embeddings_CPD[first : first + len(pages_CM)]
        self._text.cache_stacked(x_CPX, pages_CM, kv)


# ---------------------------------------------------------------- model

# Shape legend: T tokens, B rows, D text width, V vocabulary, P prefix positions.


class Network(nn.Module):
    """All weights, named as in published checkpoints without `model.`."""

    def __init__(self, config: MoondreamConfig) -> None:
        super().__init__()
        self.vision = Vision(config.vision, config.text.dim)
        self.text = Text(config.text)
        self.region = RegionCoder(config.region, config.text.dim)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())

    def pack(self, kind: str, library: Library | None) -> None:
        """Pack all linear maps on the CPU, the rotations being there."""
        self.text.lm_head.pack(packed_weights.head_kind(kind), library)
        pack_linears(self, kind, library)
        if library is not None:
            self.text.use_library(library)
            self.vision.use_library(library)

    def quantise(self, name: str) -> None:
        """Pack the decoder's maps on a GPU as fp8, int8 or int4; the loaded ones are freed.

        Raises:
            InvalidField: no kernels read this model's maps so.
        """
        if reason := self.text.cannot_quantise(KINDS[name]):
            instead = "weight_dtype model" if self.text.head is None else "the original checkpoint"
            raise InvalidField(f"weight_dtype {name} {reason}; use {instead}", field="weight_dtype")
        self.text.quantise(KINDS[name])

    @property
    def runs_by_library(self) -> bool:
        return self.text.runs_by_library and self.vision.on_cpu is not None


class MoondreamModel(Model):
    """A model with all optional capabilities over a loaded, frozen `Network`."""

    has_value_heads = True

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
        self.num_parameters = network.num_parameters
        self.bos_token = config.tokens.bos
        self.has_prefill_chunks = network.text.has_chunks
        self._config = config
        self._network, self._decoder = network, network.text
        self._tokens = config.tokens
        self._device = network.text.wte.device
        network.text.fill(self._device)

    @property
    def own_threads(self) -> bool:
        return self._network.runs_by_library

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
        """Return the log-probability of a coordinate's bin, or of both bins of a size."""
        region = self._network.region
        coord_B = region.coord_logprobs(hidden_BD, payload_B2[:, 0])
        size_B = region.size_logprobs(hidden_BD, payload_B2)
        logprob_B = torch.where(token_ids_B == self._tokens.coord, coord_B, 0.0)
        return torch.where(token_ids_B == self._tokens.size, size_B, logprob_B)

    def adapter_bank(self, num_slots: int, max_rank: int) -> AdapterBank:
        sizes, like = bank_sizes(self._config.text), self._network.text.wte
        return AdapterBank(sizes, num_slots=num_slots, max_rank=max_rank, like=like)

    def read_adapter(self, data: bytes, key: str, max_rank: int, settings: bytes = b"") -> Adapter:
        if settings:
            raise AdapterUnusable("a PEFT folder; this model takes NAME.safetensors and NAME.pt")
        weights = parse_adapter(data, self._config, max_rank, self.dtype)
        return Adapter.on_host(key, weights, self._device)

    def draft_proposer(self, path: Path, kv: KVCache) -> Proposer:
        return read_draft(path, self._config, self._network.text, kv)

    def mask_refiner(self, path: Path) -> MaskRefiner:
        from legato_engine.models.moondream.refiner import MoondreamRefiner

        return MoondreamRefiner(self._config, self._network.vision, path)

    def step_kernels(self, kv: KVCache, adapters: AdapterBank | None) -> StepKernels | None:
        text, region = self._network.text, self._network.region
        if not has_kernels(self._config, kv, self.dtype, text.kinds):
            return None
        return MoondreamStep(self._config, text, region, kv, adapters)

    def image_encoder(self, pinned: Pinned, num_images: int) -> ImageEncoder | None:
        if self._device.type != "cuda" or self.dtype is not torch.bfloat16:
            return None
        if not self.has_prefill_chunks:
            return None  # captured prefixes read nothing on the host either
        vision, text = self._network.vision, self._network.text
        return MoondreamImageEncoder(self._config, vision, text, pinned, num_images)

    def _upload(self, crops: CroppedImage) -> torch.Tensor:
        """Page-locked first, so that the host does not wait."""
        pixels = torch.from_numpy(crops.pixels_NHWC)
        if self._device.type == "cpu":
            return pixels
        return pixels.pin_memory().to(self._device, non_blocking=True)
