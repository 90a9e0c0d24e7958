"""Refinement of outlines by vision features.

Shape legend: N = 1 crop, S its side, C channels, T tokens, V vision width.
"""

from __future__ import annotations

from pathlib import Path

import torch

from legato_engine.core.results import Outline
from legato_engine.errors import InvalidField
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.outlines import crop
from legato_engine.models.moondream.outlines.crop import Crop, Values
from legato_engine.models.moondream.outlines.weights import load_head
from legato_engine.models.moondream.preprocess import CroppedImage, WholeImage
from legato_engine.models.moondream.vision import Vision, normalised, patches


class MoondreamRefiner:
    """A `MaskRefiner` over a vision part and a mask head."""

    def __init__(self, config: MoondreamConfig, vision: Vision, path: Path) -> None:
        if config.refiner is None:
            raise InvalidField(f"{config.name} takes no refiner", field="refiner")
        like, side = vision.pos_emb, config.vision.crop_size
        self._settings = config.refiner
        self._patch_size = config.vision.patch_size
        self._side = side
        self._vision = vision
        self._head = load_head(path, config.vision, like)
        self._pixels_NSSC = torch.zeros((1, side, side, 3), dtype=torch.uint8, device=like.device)
        self._mask_SS = torch.zeros((side, side), dtype=torch.uint8, device=like.device)
        self.given: tuple[torch.Tensor, ...] = (self._pixels_NSSC, self._mask_SS)
        self.answer = torch.zeros((side, side), dtype=torch.float32, device=like.device)

    def prepare(self, outline: Outline, image: PreparedImage) -> Crop:
        pixels: CroppedImage | WholeImage = image.pixels
        assert pixels.original is not None, "the frontend did not keep the image"
        return crop.cut(outline, pixels.original, self._side)

    def tensors(self, prepared: Crop) -> tuple[torch.Tensor, ...]:
        pixels_SSC, mask_SS = map(torch.from_numpy, (prepared.pixels_SSC, prepared.mask_SS))
        return pixels_SSC[None], mask_SS

    def refine(self) -> None:
        pixels = normalised(self._pixels_NSSC, self._vision.pos_emb.dtype)
        patches_NTP = patches(pixels, self._patch_size)
        early_NTV, late_NTV = self._vision.encode_tapped(patches_NTP, self._settings.early_block)
        mask_NSS = self._mask_SS[None].to(late_NTV.dtype)
        refined_NSS = self._head.refine(late_NTV, early_NTV, mask_NSS, self._settings.iterations)
        self.answer.copy_(refined_NSS[0])

    def finish(self, outline: Outline, prepared: Crop, answer: Values) -> Outline:
        return crop.outlined(outline.label, prepared, answer)
