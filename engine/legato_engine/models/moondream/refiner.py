"""Refinement of outlines by vision features.

Shape legend: H, W pixels of an image or crop, S side of the refiner's input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from legato_engine.errors import InvalidField
from legato_engine.models import checkpoint
from legato_engine.models.checkpoint import TensorHeader, plan
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream import outline_shapes
from legato_engine.models.moondream.config import MoondreamConfig, VisionConfig
from legato_engine.models.moondream.outline_shapes import Mask
from legato_engine.models.moondream.preprocess import CroppedImage, Pixels, WholeImage
from legato_engine.models.moondream.vision import Vision, normalised, patches
from legato_engine.models.untrusted import refusing
from legato_engine.types import ImageBox, MaskOutline

Values = npt.NDArray[np.float32]

_MARGIN = 0.25  # of the box, on each side
_SAMPLES = 3  # of a pixel, along each side of it
_FINENESS = 2  # traced pixels, at most, per pixel of the result along each side
_MIN_SHARE = 0.0015  # of the image; smaller islands and holes are dropped
_TOLERANCE = 0.75  # pixels of the crop, or of the refiner's input if that is coarser
_DIGITS = 4


class NotRefinable(Exception):
    """The outline cannot be refined, or the refined mask has no outline."""


@dataclasses.dataclass(frozen=True, slots=True)
class Crop:
    """`extent` (height, width) pixels from (`left`, `top`) of an image of `size`.

    `pixels_SSC` (uint8 RGB) and `mask_SS` (uint8, 0 or 1) are the refiner's input.
    """

    size: tuple[int, int]
    left: int
    top: int
    extent: tuple[int, int]
    pixels_SSC: Pixels
    mask_SS: Pixels


def cut(outline: MaskOutline, image_HWC: Pixels, side: int) -> Crop:
    """Cut out the outline's box with a margin, and draw its mask."""
    height, width = image_HWC.shape[:2]
    box = outline.box
    left, right = _grown(box.x_min, box.x_max, width)
    top, bottom = _grown(box.y_min, box.y_max, height)
    extent = (bottom - top, right - left)
    if min(extent) < 1:
        raise NotRefinable("the outline's box is empty")
    # The crop's pixels that the input samples.
    rows, columns = (np.arange(side) * count // side for count in extent)
    mask_SS = _drawn(outline, (height, width), rows + top, columns + left)
    if not mask_SS.any():
        raise NotRefinable("the outline encloses nothing")
    part_HWC = image_HWC[top:bottom, left:right]
    return Crop(
        size=(height, width),
        left=left,
        top=top,
        extent=extent,
        pixels_SSC=np.rint(resized(part_HWC, (side, side))).astype(np.uint8),
        mask_SS=mask_SS.astype(np.uint8),
    )


def outlined(label: str, crop: Crop, share_SS: Values) -> MaskOutline:
    """Trace the refiner's result, the probability of each pixel."""
    if not np.isfinite(share_SS).all():
        raise NotRefinable("the refiner's mask is not finite")
    height, width = crop.size
    side = share_SS.shape[0]
    traced = tuple(min(count, _FINENESS * side) for count in crop.extent)
    # Pixels per traced pixel, x and y.
    pixels = np.array([crop.extent[1] / traced[1], crop.extent[0] / traced[0]])
    mask_HW = resized(share_SS, traced) > 0.5
    mask_HW = outline_shapes.cleaned(mask_HW, max(1.0, _MIN_SHARE * height * width / pixels.prod()))
    ys, xs = (np.flatnonzero(mask_HW.any(axis=axis)) for axis in (1, 0))
    if not len(ys):
        raise NotRefinable("the refiner's mask is empty")
    low, high = np.array([xs[0], ys[0]]), np.array([xs[-1], ys[-1]]) + 1
    tolerance = _TOLERANCE * max(1.0, max(traced) / side)
    drawn = [outline_shapes.fit(ring, tolerance) for ring in outline_shapes.trace(mask_HW)]
    corner, size = np.array([crop.left, crop.top]), np.array([width, height])
    (x_min, y_min), (x_max, y_max) = (
        ((corner + at * pixels) / size).tolist() for at in (low, high)
    )
    box = ImageBox(x_min=x_min, y_min=y_min, x_max=x_max, y_max=y_max)
    path = " ".join(_text(curve, low, high - low) for curve in drawn)
    return MaskOutline(path=path, box=box, label=label, coarse=False)


def resized(values: npt.NDArray[np.generic], size: tuple[int, int]) -> Values:
    """Interpolate linearly between pixel centres, without antialiasing."""
    result = values
    for axis in range(2):
        count = values.shape[axis]
        position = (np.arange(size[axis]) + 0.5) * (count / size[axis]) - 0.5
        position = np.clip(position, 0, count - 1)
        first = np.minimum(position.astype(np.int64), max(count - 2, 0))
        shape = [1] * values.ndim
        shape[axis] = -1
        share = (position - first).astype(np.float32).reshape(shape)
        near = np.take(result, first, axis).astype(np.float32)
        far = np.take(result, np.minimum(first + 1, count - 1), axis).astype(np.float32)
        result = near + (far - near) * share
    return result.astype(np.float32, copy=False)


def _grown(low: float, high: float, count: int) -> tuple[int, int]:
    low, high = low * count, high * count
    margin = (high - low) * _MARGIN
    return max(0, int(low - margin)), min(count, int(high + margin))


def _drawn(
    outline: MaskOutline,
    size: tuple[int, int],
    rows: npt.NDArray[np.int64],
    columns: npt.NDArray[np.int64],
) -> Mask:
    """Mark pixels that the outline covers by more than half."""
    box, extent = outline.box, (size[1], size[0])
    low = np.array([box.x_min, box.y_min]) * extent
    stretch = np.array([box.x_max, box.y_max]) * extent - low
    samples = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    xs, ys = ((pixels[:, None] + samples).ravel() for pixels in (columns, rows))
    polygons = [ring * stretch + low for ring in outline_shapes.polygons(outline.path)]
    within = outline_shapes.enclosed(polygons, xs, ys).reshape(
        len(rows), _SAMPLES, len(columns), _SAMPLES
    )
    mask: Mask = within.sum(axis=(1, 3), dtype=np.int8) > _SAMPLES * _SAMPLES // 2
    return mask


def _text(
    curve: outline_shapes.Curve, corner: npt.NDArray[np.int64], extent: npt.NDArray[np.int64]
) -> str:
    def written(points: outline_shapes.Points) -> str:
        shares = (points - corner) / extent
        return " ".join(f"{_number(x)},{_number(y)}" for x, y in shares.tolist())

    strokes = (
        f"{'L' if stroke.is_line else 'C'} {written(stroke.points)}" for stroke in curve.strokes
    )
    return " ".join([f"M {written(curve.start[None])}", *strokes, "z"])


def _number(value: float) -> str:
    return f"{value:z.{_DIGITS}f}".rstrip("0").rstrip(".")


# ---------------------------------------------------------------- head

# The refiner's network, a mask decoder like SAM-HQ's.
#
# Features of an early and of the last vision block are fused, and the current mask is added. Mask
# tokens and an IoU token exchange attention with them. The product of the upsampled features with
# each mask token is a mask; that of the highest predicted IoU is the next iteration's.
#
# Shape legend: B crops, T cells of the grid (G by G), V vision width, E width, Q tokens, M masks, P
# cells of the upsampled grid, S side of the mask.

_NUM_HEADS = 8
_NUM_LAYERS = 2
_MLP_RATIO = 8
_GROUPS = 32
_UPSAMPLED_HEADS = 4
_MASK_CHANNELS = ((16, 1), (8, 8), (4, 16), (1, 32))  # divisor of the width, groups of the norm


class MaskAttention(nn.Module):
    """Attention with the parameters of `nn.MultiheadAttention`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def forward(
        self, query_BQE: torch.Tensor, key_BTE: torch.Tensor, value_BTE: torch.Tensor
    ) -> torch.Tensor:
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).view(*x.shape[:2], self._num_heads, -1).transpose(1, 2)
            for x, weight, bias in zip(
                (query_BQE, key_BTE, value_BTE), weights, biases, strict=True
            )
        )
        # Not torch's fused attention: with few queries, it has one thread block per head.
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        seen = scores.softmax(-1).to(v.dtype) @ v
        out: torch.Tensor = self.out_proj(seen.transpose(1, 2).flatten(-2))
        return out


class TwoWayBlock(nn.Module):
    """Attention of tokens to themselves and the image, an MLP, and attention back."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.output_self_attn = MaskAttention(dim, _NUM_HEADS)
        self.cross_attn_token_to_image = MaskAttention(dim, _NUM_HEADS)
        self.cross_attn_image_to_token = MaskAttention(dim, _NUM_HEADS)
        self.mlp = _mlp(dim, _MLP_RATIO * dim, dim)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(dim) for _ in range(4))

    def forward(
        self,
        tokens_BQE: torch.Tensor,
        image_BTE: torch.Tensor,
        token_pe: torch.Tensor,
        image_pe: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query = tokens_BQE + token_pe
        tokens_BQE = self.norm1(tokens_BQE + self.output_self_attn(query, query, tokens_BQE))
        seen = self.cross_attn_token_to_image(
            tokens_BQE + token_pe, image_BTE + image_pe, image_BTE
        )
        tokens_BQE = self.norm2(tokens_BQE + seen)
        tokens_BQE = self.norm3(tokens_BQE + self.mlp(tokens_BQE))
        seen = self.cross_attn_image_to_token(
            image_BTE + image_pe, tokens_BQE + token_pe, tokens_BQE
        )
        return tokens_BQE, self.norm4(image_BTE + seen)


class ChannelNorm(nn.Module):
    """Layer norm over the channels of [B, C, Y, X]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return normed


class GroupNorm(nn.GroupNorm):
    """Group norm whose sums use the whole device even for few, large groups."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        groups = input.reshape(len(input), self.num_groups, -1).float()
        variance, mean = torch.var_mean(groups, dim=-1, correction=0, keepdim=True)
        normed = ((groups - mean) * torch.rsqrt(variance + self.eps)).view(input.shape)
        return torch.addcmul(
            self.bias[:, None, None], normed.to(input.dtype), self.weight[:, None, None]
        )


class Fusion(nn.Module):
    """Fuses early and late features."""

    def __init__(self, vision_dim: int, dim: int) -> None:
        super().__init__()
        self.early_proj = nn.Sequential(nn.Linear(vision_dim, dim), nn.LayerNorm(dim), nn.GELU())
        self.fusion = nn.Sequential(
            nn.Conv2d(2 * dim, dim, 1),
            GroupNorm(_GROUPS, dim),
            nn.GELU(),
            nn.Conv2d(dim, dim, 3, padding=1),
            GroupNorm(_GROUPS, dim),
            nn.GELU(),
        )

    def forward(self, early_BTV: torch.Tensor, late_BEGG: torch.Tensor) -> torch.Tensor:
        early_BTE = self.early_proj(early_BTV)
        early_BEGG = early_BTE.transpose(1, 2).reshape(late_BEGG.shape)
        fused: torch.Tensor = self.fusion(torch.cat([early_BEGG, late_BEGG], dim=1))
        return fused


class MaskHead(nn.Module):
    """All weights, named as in the published file; `dim` is a multiple of 32."""

    def __init__(self, vision_dim: int, grid: int, dim: int, num_masks: int) -> None:
        super().__init__()
        self._num_masks = num_masks
        self.image_proj = nn.Conv2d(vision_dim, dim, 1)
        self.image_pe = nn.Parameter(torch.empty(1, dim, grid, grid))
        self.hq_fusion = Fusion(vision_dim, dim)
        self.mask_encoder = _mask_encoder(dim)
        self.mask_tokens = nn.Parameter(torch.empty(num_masks, dim))
        self.iou_token = nn.Parameter(torch.empty(1, dim))
        self.output_pe = nn.Parameter(torch.empty(num_masks + 1, dim))
        self.transformer_blocks = nn.ModuleList(TwoWayBlock(dim) for _ in range(_NUM_LAYERS))
        self.final_token_to_image = MaskAttention(dim, _NUM_HEADS)
        self.final_norm = nn.LayerNorm(dim)
        self.upsample = _upsampling(dim)
        up_dim = dim // 8
        self.final_q_proj = nn.Linear(dim, up_dim)
        self.final_attn_up = MaskAttention(up_dim, _UPSAMPLED_HEADS)
        self.final_norm_up = nn.LayerNorm(up_dim)
        self.mask_mlps = nn.ModuleList(_mlp(*[up_dim] * 4) for _ in range(num_masks))
        self.iou_head = _mlp(dim, dim, dim, num_masks)

    def refine(
        self, late_BTV: torch.Tensor, early_BTV: torch.Tensor, mask_BSS: torch.Tensor, times: int
    ) -> torch.Tensor:
        """[B, S, S], 0 to 1, after `times` iterations."""
        image_BEGG = self.fused(late_BTV, early_BTV)
        for _ in range(times):
            logits_BMSS, iou_BM = self(image_BEGG, mask_BSS)
            best_B1 = iou_BM.argmax(-1)[:, None, None, None]
            best_BSS = logits_BMSS.take_along_dim(best_B1, dim=1)[:, 0]
            mask_BSS = torch.sigmoid(best_BSS)
        return mask_BSS

    def fused(self, late_BTV: torch.Tensor, early_BTV: torch.Tensor) -> torch.Tensor:
        """[B, E, G, G], without the mask."""
        late_BVGG = late_BTV.transpose(1, 2).reshape(*late_BTV.shape[::2], *self.image_pe.shape[2:])
        late_BEGG = self.image_proj(late_BVGG)
        fused: torch.Tensor = self.hq_fusion(early_BTV, late_BEGG)
        return fused

    def forward(
        self, image_BEGG: torch.Tensor, mask_BSS: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mask logits [B, M, S, S] and predicted IoU [B, M]."""
        mask_embedding = self.mask_encoder(mask_BSS[:, None])
        mask_embedding = F.interpolate(mask_embedding, size=image_BEGG.shape[2:], mode="bilinear")
        image_BTE = (image_BEGG + mask_embedding).flatten(2).transpose(1, 2)
        image_pe = self.image_pe.flatten(2).transpose(1, 2)
        tokens_QE = torch.cat([self.mask_tokens, self.iou_token])
        tokens_BQE = tokens_QE.expand(len(image_BTE), -1, -1)
        for block in self.transformer_blocks:
            tokens_BQE, image_BTE = block(tokens_BQE, image_BTE, self.output_pe, image_pe)
        seen = self.final_token_to_image(
            tokens_BQE + self.output_pe, image_BTE + image_pe, image_BTE
        )
        tokens_BQE = self.final_norm(tokens_BQE + seen)
        upsampled = self.upsample(image_BTE.transpose(1, 2).reshape(image_BEGG.shape))
        masks = self._masks(tokens_BQE[:, : self._num_masks], upsampled)
        logits = F.interpolate(masks, size=mask_BSS.shape[1:], mode="bilinear")
        return logits, self.iou_head(tokens_BQE[:, self._num_masks])

    def _masks(self, tokens_BME: torch.Tensor, upsampled_BCYX: torch.Tensor) -> torch.Tensor:
        cells_BPC = upsampled_BCYX.flatten(2).transpose(1, 2)
        query_BMC = self.final_q_proj(tokens_BME)
        seen = self.final_attn_up(self.final_norm_up(query_BMC), cells_BPC, cells_BPC)
        query_BMC = query_BMC + seen
        each = [mlp(query_BMC[:, index]) for index, mlp in enumerate(self.mask_mlps)]
        masks_BMP = torch.stack(each, dim=1) @ upsampled_BCYX.flatten(2)
        return masks_BMP.view(*masks_BMP.shape[:2], *upsampled_BCYX.shape[2:])


def _mlp(*dims: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first, second in pairwise(dims):
        layers += [nn.Linear(first, second), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def _mask_encoder(dim: int) -> nn.Sequential:
    encoder, channels = nn.Sequential(), 1
    for number, (part, groups) in enumerate(_MASK_CHANNELS, start=1):
        halving = nn.Conv2d(channels, dim // part, 3, stride=2, padding=1)
        channels = dim // part
        norm = GroupNorm(min(groups, channels), channels)
        encoder.add_module(f"conv{number}", nn.Sequential(halving, norm, nn.GELU()))
    return encoder


def _upsampling(dim: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(3):
        half = dim // 2
        doubling = nn.ConvTranspose2d(dim, half, 2, stride=2)
        layers += [doubling, ChannelNorm(half), nn.GELU()]
        layers += [nn.Conv2d(half, half, 3, padding=1), ChannelNorm(half), nn.GELU()]
        dim = half
    return nn.Sequential(*layers)


# ---------------------------------------------------------------- weights

_KEY = "head"  # of a pickled file's dict
_PICKLED = (".pt", ".pth")
_DIM, _NUM_MASKS = 256, 4  # of a file without mask tokens
_DIM_STEP = 32


def load_head(path: Path, vision: VisionConfig, like: torch.Tensor) -> MaskHead:
    """Load a head, on the device and in the dtype of `like`.

    The file is .safetensors, or a .pt dict of tensors, possibly as its entry `head`; it determines
    width and number of masks.
    """
    stored = _read(path)
    dim, num_masks = _sizes(path, stored)
    with torch.device("meta"):
        head = MaskHead(vision.dim, vision.grid, dim, num_masks).to(like.dtype)
    headers = [
        TensorHeader(name, path, tuple(each.shape), each.dtype) for name, each in stored.items()
    ]
    try:
        moves = plan(head, headers, lambda name: name)
    except InvalidField as error:
        raise _unusable(path, f"is no refiner for this model: {error}") from None
    for move in moves:
        tensor = stored[move.header.name].to(like.device, like.dtype, copy=True)
        checkpoint.assign(head, move.destination.name, tensor)
    return head.eval()


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    content: object
    with refusing(str(path), "refiner"):
        if path.suffix in _PICKLED:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        else:
            content = load_file(path)
    if isinstance(content, dict) and isinstance(content.get(_KEY), dict):
        content = content[_KEY]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in content.items()
    ):
        raise _unusable(path, "is no dict of tensors by name, nor has one as `head`")
    return content


def _sizes(path: Path, stored: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    tokens = stored.get("mask_tokens")
    if tokens is None or tokens.dim() != 2:
        return _DIM, _NUM_MASKS
    num_masks, dim = tokens.shape
    if dim == 0 or dim % _DIM_STEP:
        raise _unusable(path, f"has a width of {dim}, which is no multiple of {_DIM_STEP}")
    return dim, num_masks


def _unusable(path: Path, problem: str) -> InvalidField:
    return InvalidField(f"{path} {problem}", field="refiner")


# ---------------------------------------------------------------- refiner

# Shape legend: N = 1 crop, S its side, C channels, T tokens, V vision width.


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

    def prepare(self, outline: MaskOutline, image: PreparedImage) -> Crop:
        pixels: CroppedImage | WholeImage = image.pixels
        assert pixels.original is not None, "the frontend did not keep the image"
        return cut(outline, pixels.original, self._side)

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

    def finish(self, outline: MaskOutline, prepared: Crop, answer: Values) -> MaskOutline:
        return outlined(outline.label, prepared, answer)
