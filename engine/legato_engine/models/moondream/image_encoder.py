"""Moondream's vision tower on a GPU: pictures are cut there, and every shape can be captured.

Shape legend: N crops, T tokens of a crop, P values of a patch (of a picture: its positions), D
vision width, X text width, C places of pictures, M pages of a sequence.
"""

from __future__ import annotations

import torch

from legato_engine.kernels.cuda.image_pipeline import (
    NUM_PIXEL_BYTES,
    HostImage,
    ImagePipeline,
    StagedImage,
    StitchPool,
    stage,
)
from legato_engine.kernels.cut_plan import MAX_WORDS
from legato_engine.models.capabilities import Pinned
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.preprocess import WholeImage, crop_geometry, most_crops
from legato_engine.models.moondream.text import Text
from legato_engine.models.moondream.vision import Vision, normalised
from legato_engine.models.paged_cache import KVCache

_LEVELS = 256
_VALUES_PER_LOAD = 8  # rows of patches that begin elsewhere would be copied first


class MoondreamImageEncoder:
    """A `models.capabilities.ImageEncoder` over a network's vision and text; bfloat16 on CUDA."""

    def __init__(
        self,
        config: MoondreamConfig,
        vision: Vision,
        text: Text,
        pinned: Pinned,
        num_images: int,
    ) -> None:
        sizes, device, dtype = config.vision, text.wte.device, text.wte.dtype
        self.max_crops = most_crops(sizes)
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
        self._taken_NTP = torch.zeros_like(self._patches_NTP)
        self._features_NTD = zeros(self.max_crops, sizes.num_tokens, sizes.dim)
        self._given_NTD = torch.zeros_like(self._features_NTD)
        self._joined_TD = zeros(sizes.num_tokens, 2 * sizes.dim)
        self.embeddings_CPD = zeros(num_images, config.prefix_length, config.text.dim)
        self.embeddings_CPD[:, 0] = text.wte[config.tokens.bos]

    def stage(self, place: int, image: PreparedImage) -> None:
        """The plan and, unless the pixels are there, a copy of them in pinned memory."""
        picture: WholeImage = image.pixels
        self._staged[place] = stage(picture.pixels_HWC, picture.plan, self._hosts[place])

    def upload(self, place: int) -> None:
        """Two copies, as long as the picture needs."""
        staged = self._staged[place]
        assert staged is not None, "uploaded before it was staged"
        self._pipeline.upload(self._hosts[place], staged)

    def cut(self) -> None:
        """The patches of all its crops."""
        self._pipeline.cut(self._patches_NTP[..., : self._num_values])

    def take(self, first: int, stop: int) -> None:
        """Some crops' patches, to where every range begins."""
        self._taken_NTP[: stop - first].copy_(self._patches_NTP[first:stop])

    def encode(self, count: int, *, taken: bool) -> None:
        """The vision tower, from patches to features or from what was taken to what is given."""
        patches_NTP = self._taken_NTP if taken else self._patches_NTP
        features_NTD = self._given_NTD if taken else self._features_NTD
        self._vision.encode_patches(patches_NTP[:count], out_NTD=features_NTD[:count])

    def give(self, first: int, stop: int) -> None:
        """What was made of a range becomes its crops' features."""
        self._features_NTD[first:stop].copy_(self._given_NTD[: stop - first])

    def finish(self, place: int) -> torch.Tensor:
        """[P, X]: BOS, then the stitched, pooled and projected picture."""
        self._stitch(self._features_NTD, self._pipeline.tiling, self._joined_TD)
        embeddings_PX = self.embeddings_CPD[place]
        embeddings_PX[1:].copy_(self._vision.proj_mlp(self._joined_TD))
        return embeddings_PX

    def cache(self, first: int, pages_CM: torch.Tensor, kv: KVCache) -> None:
        """The decoder over the pictures' positions, in one pass."""
        x_CPX = self.embeddings_CPD[first : first + len(pages_CM)]
        self._text.cache_stacked(x_CPX, pages_CM, kv)
