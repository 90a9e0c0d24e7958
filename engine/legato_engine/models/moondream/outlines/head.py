"""The refiner's network, a mask decoder like SAM-HQ's.

Features of an early and of the last vision block are fused, and the current mask is added. Mask
tokens and an IoU token exchange attention with them. The product of the upsampled features with
each mask token is a mask; that of the highest predicted IoU is the next iteration's.

Shape legend: B crops, T cells of the grid (G by G), V vision width, E width, Q tokens, M masks, P
cells of the upsampled grid, S side of the mask.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

_NUM_HEADS = 8
_NUM_LAYERS = 2
_MLP_RATIO = 8
_GROUPS = 32
_UPSAMPLED_HEADS = 4
_MASK_CHANNELS = ((16, 1), (8, 8), (4, 16), (1, 32))  # divisor of the width, groups of the norm


class Attention(nn.Module):
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
        self.output_self_attn = Attention(dim, _NUM_HEADS)
        self.cross_attn_token_to_image = Attention(dim, _NUM_HEADS)
        self.cross_attn_image_to_token = Attention(dim, _NUM_HEADS)
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


class Head(nn.Module):
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
        self.final_token_to_image = Attention(dim, _NUM_HEADS)
        self.final_norm = nn.LayerNorm(dim)
        self.upsample = _upsampling(dim)
        up_dim = dim // 8
        self.final_q_proj = nn.Linear(dim, up_dim)
        self.final_attn_up = Attention(up_dim, _UPSAMPLED_HEADS)
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
