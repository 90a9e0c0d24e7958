"""The vision tower of Qwen3-VL: patches of an image of any size to features of its tokens.

Shape legend: P patches, C channels, F frames, Y and X pixels of a patch, V values of a patch,
D vision width, W text width, H heads, E head dim, R rotated pairs, N tokens, K features of a token.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import nn

from legato_engine.kernels import activations, ops
from legato_engine.kernels.cpu import decoder as cpu
from legato_engine.kernels.cpu.library import Library
from legato_engine.kernels.reference import rotate
from legato_engine.layers.attention import Attention
from legato_engine.layers.cpu import ungated_decoder, ungated_layer
from legato_engine.layers.linear import Linear, Sum
from legato_engine.layers.mlp import MLP
from legato_engine.models.qwen3_vl.config import TowerConfig

_EPSILON = 1e-6
_FRAMES = 2  # of a patch
_THETA = 10_000.0

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [P, R] float32."""


class PatchEmbedding(nn.Module):
    """A linear map of the values of a patch, stored as a convolution's."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = Linear(3 * _FRAMES * size**2, config.dim)
        self.proj.weight = nn.Parameter(torch.empty(config.dim, 3, _FRAMES, size, size))

    def flatten(self) -> None:
        """Make the loaded weight that of a linear map."""
        self.proj.weight = nn.Parameter(self.proj.weight.flatten(1), requires_grad=False)

    def forward(self, values_PV: torch.Tensor) -> torch.Tensor:
        return self.proj(values_PV)


class TowerBlock(nn.Module):
    """A sequential pre-norm block, whose patches see each other."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim, eps=_EPSILON)
        self.attn = Attention(config.dim, config.num_heads)
        self.norm2 = nn.LayerNorm(config.dim, eps=_EPSILON)
        self.mlp = MLP(config.dim, config.ff_dim, config.dim)

    def forward(self, x_PD: torch.Tensor, y_PD: torch.Tensor | None, angles: Angles) -> Sum:
        """Compute the block of x + y; the sum may overwrite x."""
        x_PD, (q_PHE, k_PHE, v_PHE) = self.attn.after_norm(x_PD, y_PD, self.norm1)
        cos_P1R, sin_P1R = (each[:, None] for each in angles)
        turned = rotate(q_PHE, cos_P1R, sin_P1R), rotate(k_PHE, cos_P1R, sin_P1R)
        heads_PHE = ops.full_attention(*(each[None] for each in (*turned, v_PHE)))[0]
        return self.mlp.after_norm(*self.attn.join_onto(x_PD, heads_PHE), self.norm2)

    def cpu_layer(self) -> cpu.CpuLayer:
        """Return this block for the CPU's kernels, once it is packed."""
        attention = self.attn
        return ungated_layer(self.norm1, attention.qkv, attention.proj, self.mlp, self.norm2)


class PatchMerger(nn.Module):
    """A square of patches to one token of the text model.

    The norm is of each patch, or with `joined` of all patches of a token together.
    """

    def __init__(self, config: TowerConfig, text_dim: int, *, joined: bool) -> None:
        super().__init__()
        self._width = config.dim * config.merge**2
        self._joined = joined
        self.norm = nn.LayerNorm(self._width if joined else config.dim, eps=_EPSILON)
        self.linear_fc1 = Linear(self._width, self._width)
        self.linear_fc2 = Linear(self._width, text_dim)

    def forward(self, x_PD: torch.Tensor) -> torch.Tensor:
        """[N, W]."""
        x = x_PD.view(-1, self._width) if self._joined else x_PD
        hidden = self.linear_fc1(self.norm(x).view(-1, self._width))
        return self.linear_fc2(activations.gelu(hidden, "none"))


class VisionTower(nn.Module):
    """The encoder and its mergers; patches are in the order of their tokens."""

    def __init__(self, config: TowerConfig, text_dim: int) -> None:
        super().__init__()
        self._config = config
        self.patch_embed = PatchEmbedding(config)
        self.pos_embed = nn.Parameter(torch.empty(config.grid**2, config.dim))
        self.blocks = nn.ModuleList(TowerBlock(config) for _ in range(config.num_layers))
        self.merger = PatchMerger(config, text_dim, joined=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, text_dim, joined=True) for _ in config.taps
        )
        self.on_cpu: list[cpu.CpuDecoder] = []

    def use_library(self, library: Library) -> None:
        """Run blocks that are packed for it in one call a stage."""
        config = self._config
        layers = [block.cpu_layer() for block in self.blocks if isinstance(block, TowerBlock)]
        none = torch.empty(0, config.dim // config.num_heads // 2)
        parts = [
            ungated_decoder(
                *(library, layers[stage.start : stage.stop], config.num_heads),
                *(config.dim // config.num_heads, (none, none)),
            )
            for stage in config.stages
        ]
        self.on_cpu = [part for part in parts if part is not None]

    def encode(
        self, levels_PCFYX: torch.Tensor, rows: int, columns: int
    ) -> Generator[None, None, torch.Tensor]:
        """[N, K, W] of uint8 patches of `rows` and `columns`; each `next` computes a stage.

        The first feature is the embedding, the others go to the first layers of the text model.
        """
        config, dtype = self._config, self.pos_embed.dtype
        values_PV = patch_values(levels_PCFYX, config).to(dtype)
        place_P2 = places(rows, columns, config.merge, values_PV.device)
        x_PD = self.patch_embed(values_PV) + self._positions(place_P2, (rows, columns))
        del levels_PCFYX, values_PV
        if self.on_cpu:
            x_PD = x_PD.float()
        angles = self._angles(place_P2)
        features = list[torch.Tensor]()
        for index in range(len(config.stages)):
            if index:
                yield
            x_PD = self._run_stage(index, x_PD, angles)
            if index < len(config.taps):
                features.append(self.deepstack_merger_list[index](x_PD.to(dtype)))
        return torch.stack([self.merger(x_PD.to(dtype)), *features], dim=1)

    def _run_stage(self, index: int, x_PD: torch.Tensor, angles: Angles) -> torch.Tensor:
        """[P, D] residual stream after the stage; the storage of x may be reused."""
        if self.on_cpu:
            return self.on_cpu[index].whole(x_PD, angles)
        y_PD: torch.Tensor | None = None
        for layer in self._config.stages[index]:
            x_PD, y_PD = self.blocks[layer](x_PD, y_PD, angles)
        return x_PD if y_PD is None else x_PD + y_PD

    def _positions(self, place_P2: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
        """[P, D]: learned positions, interpolated linearly from the corners of the grid."""
        grid = self._config.grid
        side_2 = torch.tensor(sides, device=place_P2.device)
        at_P2 = place_P2.float() * (grid - 1) / (side_2 - 1).clamp(min=1)
        low_P2 = at_P2.floor()
        share_P2 = at_P2 - low_P2
        index_P2 = low_P2.long()
        total_PD = torch.zeros((), dtype=torch.float32, device=place_P2.device)
        for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
            step_2 = torch.tensor(corner, device=place_P2.device)
            row_P, column_P = (index_P2 + step_2).clamp(max=grid - 1).unbind(1)
            weight_P1 = torch.where(step_2 == 1, share_P2, 1 - share_P2).prod(1, keepdim=True)
            total_PD = total_PD + self.pos_embed[row_P * grid + column_P] * weight_P1
        return total_PD.to(self.pos_embed.dtype)

    def _angles(self, place_P2: torch.Tensor) -> Angles:
        """Rotations by row in the first half of the pairs, by column in the second."""
        pairs = self._config.dim // self._config.num_heads // 4
        exponent_R = torch.arange(pairs, dtype=torch.float32, device=place_P2.device) / pairs
        angle_PR = (place_P2[..., None].float() * (1.0 / _THETA**exponent_R)).flatten(1)
        return angle_PR.cos(), angle_PR.sin()


def places(rows: int, columns: int, merge: int, device: torch.device) -> torch.Tensor:
    """[P, 2] int64: row and column of each patch, token by token.

    They are made on the device: the host would wait for a copy of so many.
    """
    sides = (torch.arange(side, device=device) for side in (rows, columns))
    row_YX, column_YX = torch.meshgrid(*sides, indexing="ij")
    blocks = rows // merge, merge, columns // merge, merge
    ordered = (each.reshape(blocks).transpose(1, 2).flatten() for each in (row_YX, column_YX))
    return torch.stack([*ordered], dim=1)


def patch_values(levels_PCFYX: torch.Tensor, config: TowerConfig) -> torch.Tensor:
    """[P, V] float32, normalised as in training; the one frame of an image stands for both.

    Levels of frames are not divided by 255 first, which is another rounding.
    """
    device, is_image = levels_PCFYX.device, levels_PCFYX.shape[2] == 1
    scale = 1.0 if is_image else 255.0
    level_L = torch.arange(256, dtype=torch.float64, device=device)
    level_L = (level_L * (scale / 255)).float()
    mean_C1, std_C1 = (
        torch.tensor(each, dtype=torch.float32, device=device)[:, None] * scale
        for each in (config.mean, config.std)
    )
    table_CL = (level_L - mean_C1) / std_C1
    first_C = torch.arange(3, dtype=torch.int32, device=device) * 256
    index = levels_PCFYX.int() + first_C[:, None, None, None]
    values = table_CL.flatten().index_select(0, index.flatten()).view(levels_PCFYX.shape)
    both = values.expand(-1, -1, _FRAMES, -1, -1) if is_image else values
    return both.flatten(1)
