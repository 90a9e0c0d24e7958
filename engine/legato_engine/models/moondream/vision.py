"""The vision encoder: crops to the image's embeddings.

Shape legend: N crops, G patches on a side, T = G * G tokens, D vision width, X text width, P values
of a patch, Y and W sides of the stitched grid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from legato_engine.kernels import ops
from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.cpu.library import Library
from legato_engine.layers.attention import Attention
from legato_engine.layers.cpu import ungated_decoder, ungated_layer
from legato_engine.layers.fp8 import Centres, Fp8Attention, Fp8MLP
from legato_engine.layers.linear import Linear, Sum, TileCounters
from legato_engine.layers.mlp import MLP
from legato_engine.models.moondream.config import VisionConfig

_PLAIN_BLOCKS = 4 / 9
"""Fraction of the blocks that stay as they are without calibration: errors of the first weigh most.

Moondream 2's random weights then have half of the error that all blocks in e4m3 have.
"""


class VisionBlock(nn.Module):
    """Sequential pre-norm block over the tokens of a crop.

    The residual stream is one or two terms, so that the next norm can be fused with their sum.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.dim)
        self.attn: Attention | Fp8Attention = Attention(config.dim, config.num_heads)
        self.ln2 = nn.LayerNorm(config.dim)
        self.mlp: MLP | Fp8MLP = MLP(config.dim, config.ff_dim, config.dim)

    def forward(self, x_NTD: torch.Tensor, y_NTD: torch.Tensor | None) -> Sum:
        """Compute the block; the sum may overwrite x."""
        x_NTD, heads = self.attn.after_norm(x_NTD, y_NTD, self.ln1)
        terms = self.attn.join_onto(x_NTD, ops.full_attention(*heads))
        return self.mlp.after_norm(*terms, self.ln2)

    def cpu_layer(self) -> cpu.CpuLayer | None:
        """Return this block for the CPU's kernels, once it is packed; None in e4m3."""
        if not isinstance(self.attn, Attention) or not isinstance(self.mlp, MLP):
            return None
        return ungated_layer(self.ln1, self.attn.qkv, self.attn.proj, self.mlp, self.ln2)

    @property
    def tall(self) -> list[Linear]:
        """Layers with the most output tiles, unless e4m3."""
        tall = list[Linear]()
        if isinstance(self.attn, Attention):
            tall.append(self.attn.qkv)
        if isinstance(self.mlp, MLP):
            tall.append(self.mlp.fc1)
        return tall

    def input_means(self, x_NTD: torch.Tensor) -> tuple[torch.Tensor, Centres]:
        """Compute the block as it was loaded, and the mean inputs of its layers."""
        assert isinstance(self.attn, Attention), "already e4m3"
        assert isinstance(self.mlp, MLP), "already e4m3"
        first_NTD = self.ln1(x_NTD)
        heads_NTD = ops.full_attention(*self.attn.split(first_NTD)).flatten(-2)
        x_NTD = x_NTD + self.attn.proj(heads_NTD)
        second_NTD = self.ln2(x_NTD)
        hidden_NTF = self.mlp.fc1.gelu(second_NTD)
        inputs = (first_NTD, heads_NTD, second_NTD, hidden_NTF)
        means = Centres(*(each.float().flatten(0, -2).mean(0) for each in inputs))
        return x_NTD + self.mlp.fc2(hidden_NTF), means

    def use_fp8(self, num_heads: int, centres: Centres) -> None:
        assert isinstance(self.attn, Attention), "already e4m3"
        assert isinstance(self.mlp, MLP), "already e4m3"
        self.attn = Fp8Attention(self.attn, num_heads, self.ln1, centres)
        self.mlp = Fp8MLP(self.mlp, self.ln2, centres)


class Vision(nn.Module):
    """The encoder and its projector."""

    def __init__(self, config: VisionConfig, text_dim: int) -> None:
        super().__init__()
        self._config = config
        self.patch_emb = Linear(3 * config.patch_size**2, config.dim)
        self.pos_emb = nn.Parameter(torch.empty(1, config.num_tokens, config.dim))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.post_ln = nn.LayerNorm(config.dim)
        self.proj_mlp = MLP(2 * config.dim, config.proj_inner_dim, text_dim)
        self._counters: TileCounters | None = None
        self.on_cpu: cpu.CpuDecoder | None = None

    def use_library(self, library: Library) -> None:
        """Run blocks that are packed for it in one call for each crop, unless they are in e4m3."""
        layers = [block.cpu_layer() for block in self._vision_blocks()]
        heads, none = self._config.num_heads, torch.empty(1, 0)
        dims = self._config.dim // heads
        self.on_cpu = ungated_decoder(library, layers, heads, dims, (none, none))

    def forward(self, pixels_NHWC: torch.Tensor, tiling: tuple[int, int]) -> torch.Tensor:
        """[T, X] of uint8 crops: the whole image, then `tiling` (rows, columns) tiles."""
        features_NTD = self.encode(pixels_NHWC)
        whole_TD = features_NTD[0]
        local_TD = whole_TD if tiling == (1, 1) else self.reconstruct(features_NTD[1:], tiling)
        return self.proj_mlp(torch.cat([whole_TD, local_TD], dim=-1))

    def input_means(self, pixels_NHWC: torch.Tensor) -> list[Centres]:
        """Compute the mean inputs of each block's layers, before any is in e4m3."""
        pixels = normalised(pixels_NHWC, self.pos_emb.dtype)
        x_NTD = self.patch_emb(patches(pixels, self._config.patch_size)) + self.pos_emb
        means = list[Centres]()
        for block in self._vision_blocks():
            x_NTD, of_block = block.input_means(x_NTD)
            means.append(of_block)
        return means

    def use_fp8(
        self, plain_blocks: int | None = None, centres: Sequence[Centres] | None = None
    ) -> None:
        """Quantise blocks after the first `plain_blocks` in place, layer by layer, after loading.

        The projector stays: its two layers add as much error as nine blocks and take 1 % of the
        time.

        Raises:
            InvalidField: the device or a layer does not allow it.
        """
        if plain_blocks is None:
            plain_blocks = int(_PLAIN_BLOCKS * len(self.blocks))
        pairs = list(zip(self._vision_blocks(), centres or self.no_centres(), strict=True))
        for block, of_block in pairs[plain_blocks:]:
            block.use_fp8(self._config.num_heads, of_block)

    def no_centres(self) -> list[Centres]:
        sizes = self._config.dim, self._config.ff_dim
        return [Centres.zeros(*sizes, self.pos_emb.device)] * len(self.blocks)

    def _vision_blocks(self) -> list[VisionBlock]:
        blocks = [block for block in self.blocks if isinstance(block, VisionBlock)]
        assert len(blocks) == len(self.blocks), "a vision encoder has one kind of block"
        return blocks

    def count_apart(self) -> None:
        """Clear all tile counters at once; then only one pass may run at a time.

        They are those of the first call: graphs that were captured since read them.
        """
        if self._counters is not None:
            return
        tall = list[Linear]()
        for block in self._vision_blocks():
            tall += block.tall
        self._counters = TileCounters(tall, self.pos_emb.device)

    def encode(self, pixels_NHWC: torch.Tensor) -> torch.Tensor:
        pixels = normalised(pixels_NHWC, self.pos_emb.dtype)
        return self.encode_patches(patches(pixels, self._config.patch_size))

    def encode_patches(
        self, patches_NTP: torch.Tensor, out_NTD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[N, T, D] of normalised patches, in `out_NTD` if given."""
        if self.on_cpu is not None and out_NTD is None:
            x_NTD = self.patch_emb(patches_NTP) + self.pos_emb
            normed: torch.Tensor = self.post_ln(torch.stack([*map(self.on_cpu.whole, x_NTD)]))
            return normed
        counters = self._counters
        with contextlib.nullcontext() if counters is None else counters.cleared():
            x_NTD, y_NTD = self.patch_emb(patches_NTP), self.pos_emb
            for block in self.blocks:
                x_NTD, y_NTD = block(x_NTD, y_NTD)
            _, normed_NTD = ops.add_norm(x_NTD, y_NTD, self.post_ln, out=out_NTD)
        return normed_NTD

    def encode_tapped(
        self, patches_NTP: torch.Tensor, tap: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, T, D] after block `tap`, and after the last one and its norm."""
        x_NTD, y_NTD = self.patch_emb(patches_NTP), self.pos_emb
        tapped_NTD = x_NTD
        for index, block in enumerate(self.blocks):
            x_NTD, y_NTD = block(x_NTD, y_NTD)
            if index == tap:
                tapped_NTD = x_NTD.clone() if y_NTD is None else x_NTD + y_NTD
        _, normed_NTD = ops.add_norm(x_NTD, y_NTD, self.post_ln)
        return tapped_NTD, normed_NTD

    def reconstruct(self, tiles_NTD: torch.Tensor, tiling: tuple[int, int]) -> torch.Tensor:
        """[T, D]: tiles stitched and pooled to one grid."""
        grid = self._config.grid
        tiles_NGGD = tiles_NTD.reshape(-1, grid, grid, tiles_NTD.shape[-1])
        stitched_YWD = stitch(tiles_NGGD, tiling, self._config.overlap_margin)
        pooled_DGG = F.adaptive_avg_pool2d(stitched_YWD.permute(2, 0, 1), (grid, grid))
        return pooled_DGG.flatten(1).t()


def normalised(levels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scale 8-bit levels to -1..1, rounded at every step as in training."""
    return levels.to(dtype).div_(255.0).sub_(0.5).div_(0.5)


def patches(pixels_NHWC: torch.Tensor, size: int) -> torch.Tensor:
    """[N, T, P]: row by row; values by channel, row and column."""
    count, height, width, channels = pixels_NHWC.shape
    shape = (count, height // size, size, width // size, size, channels)
    values_NYXCyx = pixels_NHWC.reshape(shape).permute(0, 1, 3, 5, 2, 4)
    return values_NYXCyx.flatten(3).flatten(1, 2)


def stitch(tiles_NGGD: torch.Tensor, tiling: tuple[int, int], margin: int) -> torch.Tensor:
    """[Y, W, D]: tiles without their overlap; outer margins stay."""
    rows, columns = tiling
    grid = tiles_NGGD.shape[1]

    def kept(index: int, count: int) -> slice:
        start = 0 if index == 0 else margin
        return slice(start, grid if index == count - 1 else grid - margin)

    return torch.cat(
        [
            torch.cat(
                [
                    tiles_NGGD[row * columns + column, kept(row, rows), kept(column, columns)]
                    for column in range(columns)
                ],
                dim=1,
            )
            for row in range(rows)
        ]
    )
