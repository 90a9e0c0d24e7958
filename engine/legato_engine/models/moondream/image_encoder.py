"""Moondream's vision encoder on a GPU, which also cuts images; every shape can be captured.

Shape legend: N crops, T tokens of a crop, P values of a patch or positions of an image, D vision
width, X text width, C image buffers, M pages.
"""

from __future__ import annotations

import torch

from legato_engine.kernels.accelerated import ImagePipeline, StitchPool
from legato_engine.kernels.cut_plan import MAX_WORDS
from legato_engine.kernels.image_staging import NUM_PIXEL_BYTES, HostImage, StagedImage, stage
from legato_engine.models.capabilities import Pinned
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.preprocess import WholeImage, crop_geometry, max_crops_of
from legato_engine.models.moondream.text import Text
from legato_engine.models.moondream.vision import Vision, normalised
from legato_engine.models.paged_cache import KVCache

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
