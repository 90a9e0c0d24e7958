"""The refiner's network: a mask and features of a picture to a better mask.

A decoder like SAM-HQ's. Tokens, one for each of several masks and one that rates these, look at
the features of the last and of an early layer, to which the mask so far is added; features that
have looked back are brought to eight times the grid, and each mask's token, multiplied with them,
is a mask. The best rated one is the next mask so far.

Shape legend: B crops, T places of the grid (G by G), V vision width, E width, Q tokens, M masks,
P places of the grown grid, S a side of the mask.
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
_GROWN_HEADS = 4
_MASK_CHANNELS = ((16, 1), (8, 8), (4, 16), (1, 32))  # parts of the width, groups of its norm


class Looking(nn.Module):
    """Attention; parameters are laid out and named as in `nn.MultiheadAttention`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * dim))
        self.out_proj = nn.Linear(dim, dim)

    def forward(
        self, query_BQE: torch.Tensor, key_BTE: torch.Tensor, value_BTE: torch.Tensor
    ) -> torch.Tensor:
        """[B, Q, E]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).view(*x.shape[:2], self._num_heads, -1).transpose(1, 2)
            for x, weight, bias in zip(
                (query_BQE, key_BTE, value_BTE), weights, biases, strict=True
            )
        )
        # Few queries over many keys: torch's fused attention would give a head one block for all.
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        seen = scores.softmax(-1).to(v.dtype) @ v
        looked: torch.Tensor = self.out_proj(seen.transpose(1, 2).flatten(-2))
        return looked


class Exchange(nn.Module):
    """Tokens look at each other and at the image, and the image looks back."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.output_self_attn = Looking(dim, _NUM_HEADS)
        self.cross_attn_token_to_image = Looking(dim, _NUM_HEADS)
        self.cross_attn_image_to_token = Looking(dim, _NUM_HEADS)
        self.mlp = _perceptron(dim, _MLP_RATIO * dim, dim)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(dim) for _ in range(4))

    def forward(
        self,
        tokens_BQE: torch.Tensor,
        image_BTE: torch.Tensor,
        token_places: torch.Tensor,
        image_places: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and image behind it."""
        placed = tokens_BQE + token_places
        tokens_BQE = self.norm1(tokens_BQE + self.output_self_attn(placed, placed, tokens_BQE))
        seen = self.cross_attn_token_to_image(
            tokens_BQE + token_places, image_BTE + image_places, image_BTE
        )
        tokens_BQE = self.norm2(tokens_BQE + seen)
        tokens_BQE = self.norm3(tokens_BQE + self.mlp(tokens_BQE))
        seen = self.cross_attn_image_to_token(
            image_BTE + image_places, tokens_BQE + token_places, tokens_BQE
        )
        return tokens_BQE, self.norm4(image_BTE + seen)


class ChannelNorm(nn.Module):
    """Layer norm over the channels of [B, C, Y, X]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        normed: torch.Tensor = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return normed


class GroupNorm(nn.GroupNorm):
    """The same by sums that a whole device shares, where a group is large and there are few."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[B, C, Y, X]."""
        groups = input.reshape(len(input), self.num_groups, -1).float()
        variance, mean = torch.var_mean(groups, dim=-1, correction=0, keepdim=True)
        normed = ((groups - mean) * torch.rsqrt(variance + self.eps)).view(input.shape)
        return torch.addcmul(
            self.bias[:, None, None], normed.to(input.dtype), self.weight[:, None, None]
        )


class Fusion(nn.Module):
    """Early features beside late ones."""

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
        """[B, E, G, G]."""
        early_BTE = self.early_proj(early_BTV)
        early_BEGG = early_BTE.transpose(1, 2).reshape(late_BEGG.shape)
        fused: torch.Tensor = self.fusion(torch.cat([early_BEGG, late_BEGG], dim=1))
        return fused


class Head(nn.Module):
    """All weights; parameters are named as in the published file.

    `dim` is a multiple of 32.
    """

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
        self.transformer_blocks = nn.ModuleList(Exchange(dim) for _ in range(_NUM_LAYERS))
        self.final_token_to_image = Looking(dim, _NUM_HEADS)
        self.final_norm = nn.LayerNorm(dim)
        self.upsample = _growing(dim)
        grown = dim // 8
        self.final_q_proj = nn.Linear(dim, grown)
        self.final_attn_up = Looking(grown, _GROWN_HEADS)
        self.final_norm_up = nn.LayerNorm(grown)
        self.mask_mlps = nn.ModuleList(_perceptron(*[grown] * 4) for _ in range(num_masks))
        self.iou_head = _perceptron(dim, dim, dim, num_masks)

    def refine(
        self, late_BTV: torch.Tensor, early_BTV: torch.Tensor, mask_BSS: torch.Tensor, times: int
    ) -> torch.Tensor:
        """[B, S, S], 0 to 1; each time from what came of the last."""
        image_BEGG = self.fused(late_BTV, early_BTV)
        for _ in range(times):
            logits_BMSS, rating_BM = self(image_BEGG, mask_BSS)
            best_B1 = rating_BM.argmax(-1)[:, None, None, None]
            best_BSS = logits_BMSS.take_along_dim(best_B1, dim=1)[:, 0]
            mask_BSS = torch.sigmoid(best_BSS)
        return mask_BSS

    def fused(self, late_BTV: torch.Tensor, early_BTV: torch.Tensor) -> torch.Tensor:
        """[B, E, G, G]: both features as one, whatever the mask."""
        late_BVGG = late_BTV.transpose(1, 2).reshape(*late_BTV.shape[::2], *self.image_pe.shape[2:])
        late_BEGG = self.image_proj(late_BVGG)
        fused: torch.Tensor = self.hq_fusion(early_BTV, late_BEGG)
        return fused

    def forward(
        self, image_BEGG: torch.Tensor, mask_BSS: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, M, S, S] of the masks, and their ratings [B, M]."""
        hint = self.mask_encoder(mask_BSS[:, None])
        hint = F.interpolate(hint, size=image_BEGG.shape[2:], mode="bilinear")
        image_BTE = (image_BEGG + hint).flatten(2).transpose(1, 2)
        image_places = self.image_pe.flatten(2).transpose(1, 2)
        tokens_QE = torch.cat([self.mask_tokens, self.iou_token])
        tokens_BQE = tokens_QE.expand(len(image_BTE), -1, -1)
        for block in self.transformer_blocks:
            tokens_BQE, image_BTE = block(tokens_BQE, image_BTE, self.output_pe, image_places)
        seen = self.final_token_to_image(
            tokens_BQE + self.output_pe, image_BTE + image_places, image_BTE
        )
        tokens_BQE = self.final_norm(tokens_BQE + seen)
        grown = self.upsample(image_BTE.transpose(1, 2).reshape(image_BEGG.shape))
        masks = self._masks(tokens_BQE[:, : self._num_masks], grown)
        logits = F.interpolate(masks, size=mask_BSS.shape[1:], mode="bilinear")
        return logits, self.iou_head(tokens_BQE[:, self._num_masks])

    def _masks(self, tokens_BME: torch.Tensor, grown_BCYX: torch.Tensor) -> torch.Tensor:
        """[B, M, Y, X]."""
        places_BPC = grown_BCYX.flatten(2).transpose(1, 2)
        query_BMC = self.final_q_proj(tokens_BME)
        seen = self.final_attn_up(self.final_norm_up(query_BMC), places_BPC, places_BPC)
        query_BMC = query_BMC + seen
        each = [mlp(query_BMC[:, place]) for place, mlp in enumerate(self.mask_mlps)]
        masks_BMP = torch.stack(each, dim=1) @ grown_BCYX.flatten(2)
        return masks_BMP.view(*masks_BMP.shape[:2], *grown_BCYX.shape[2:])


def _perceptron(*dims: int) -> nn.Sequential:
    """Linear layers with gelus between them."""
    layers: list[nn.Module] = []
    for first, second in pairwise(dims):
        layers += [nn.Linear(first, second), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def _mask_encoder(dim: int) -> nn.Sequential:
    """Four halvings, `conv1` to `conv4`."""
    encoder, channels = nn.Sequential(), 1
    for number, (part, groups) in enumerate(_MASK_CHANNELS, start=1):
        halving = nn.Conv2d(channels, dim // part, 3, stride=2, padding=1)
        channels = dim // part
        norm = GroupNorm(min(groups, channels), channels)
        encoder.add_module(f"conv{number}", nn.Sequential(halving, norm, nn.GELU()))
    return encoder


def _growing(dim: int) -> nn.Sequential:
    """Three doublings, each of which halves the channels."""
    layers: list[nn.Module] = []
    for _ in range(3):
        half = dim // 2
        doubling = nn.ConvTranspose2d(dim, half, 2, stride=2)
        layers += [doubling, ChannelNorm(half), nn.GELU()]
        layers += [nn.Conv2d(half, half, 3, padding=1), ChannelNorm(half), nn.GELU()]
        dim = half
    return nn.Sequential(*layers)
