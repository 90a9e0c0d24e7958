"""Moondream 2 in dense float64: no pages, no cache, one sequence, and loops.

It shares only the configuration and the names of the weights with the engine. Every call runs the
whole sequence.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image

COORD, SIZE = 5, 6


class ReferenceMoondream:
    """`weights` by checkpoint name, any dtype; a token is `(id, (first, second))`."""

    def __init__(self, config, weights):
        self.config = config
        self.w = {name: tensor.double() for name, tensor in weights.items()}

    # ------------------------------------------------------------ layers

    def linear(self, x, name):
        """A weight stored [out, in], and a bias."""
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, x, name):
        """LayerNorm, epsilon 1e-5."""
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred**2).mean(-1, keepdim=True)
        normed = centred / torch.sqrt(variance + 1e-5)
        return normed * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def mlp(self, x, name):
        """Two layers, gelu by its tanh formula."""
        h = self.linear(x, f"{name}.fc1")
        gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return self.linear(gelu, f"{name}.fc2")

    def attention(self, x, name, heads, visible, turn=lambda y: y):
        """Attention head by head under the mask `visible` [T, T]."""
        width = x.shape[-1]
        size = width // heads
        qkv = self.linear(x, f"{name}.qkv")
        out = []
        for h in range(heads):
            at = slice(h * size, (h + 1) * size)
            q, k, v = (qkv[:, part * width : (part + 1) * width][:, at] for part in range(3))
            scores = turn(q) @ turn(k).T / math.sqrt(size)
            scores = scores.masked_fill(~visible, -math.inf)
            out.append(torch.softmax(scores, -1) @ v)
        return self.linear(torch.cat(out, -1), f"{name}.proj")

    # ------------------------------------------------------------ vision

    def encode_crop(self, pixels):
        """[T, D] of one uint8 crop [H, W, 3]."""
        vision = self.config.vision
        size, grid = vision.patch_size, vision.crop_size // vision.patch_size
        values = (torch.from_numpy(pixels).double() / 255 - 0.5) / 0.5
        rows = []
        for gy in range(grid):
            for gx in range(grid):
                patch = values[gy * size : (gy + 1) * size, gx * size : (gx + 1) * size]
                rows.append(torch.cat([patch[:, :, c].reshape(-1) for c in range(3)]))
        x = self.linear(torch.stack(rows), "vision.patch_emb") + self.w["vision.pos_emb"][0]
        everything = torch.ones(len(rows), len(rows), dtype=torch.bool)
        for i in range(vision.num_layers):
            name = f"vision.blocks.{i}"
            normed = self.norm(x, f"{name}.ln1")
            x = x + self.attention(normed, f"{name}.attn", vision.num_heads, everything)
            x = x + self.mlp(self.norm(x, f"{name}.ln2"), f"{name}.mlp")
        return self.norm(x, "vision.post_ln")

    def image_embeddings(self, image, tiling):
        """[T, D] of a PIL image cut into `tiling` rows and columns."""
        vision = self.config.vision
        size, margin = vision.crop_size, vision.overlap_margin
        grid = size // vision.patch_size
        window = (grid - 2 * margin) * vision.patch_size
        whole = self.encode_crop(resized(image, size, size))
        rows, columns = tiling
        border = 2 * margin * vision.patch_size
        canvas = resized(image, rows * window + border, columns * window + border)
        core = grid - 2 * margin
        stitched = torch.full(
            (rows * core + 2 * margin, columns * core + 2 * margin, vision.dim), math.nan
        ).double()
        for i in range(rows):
            for j in range(columns):
                y, x = i * window, j * window
                tile = self.encode_crop(canvas[y : y + size, x : x + size].copy())
                self.place(stitched, tile.reshape(grid, grid, -1), i, j, tiling)
        local = pooled(stitched, grid).reshape(grid * grid, -1)
        return self.mlp(torch.cat([whole, local], -1), "vision.proj_mlp")

    def place(self, stitched, tile, i, j, tiling):
        """Copy the part of the stitched grid that tile (i, j) owns."""
        margin = self.config.vision.overlap_margin
        grid = tile.shape[0]
        core = grid - 2 * margin
        for y in range(grid):
            for x in range(grid):
                inside_y = (y >= margin or i == 0) and (y < grid - margin or i == tiling[0] - 1)
                inside_x = (x >= margin or j == 0) and (x < grid - margin or j == tiling[1] - 1)
                if inside_y and inside_x:
                    stitched[i * core + y, j * core + x] = tile[y, x]

    # ------------------------------------------------------------ text

    def embedding(self, token):
        """[D] of one `(id, payload)`."""
        token_id, (first, second) = token
        if token_id == COORD:
            phase = 2 * math.pi * first * self.w["region.coord_features"][0]
            features = torch.cat([phase.cos(), phase.sin()])
            return self.linear(features, "region.coord_encoder")
        if token_id == SIZE:
            f = self.w["region.size_features"]
            phase = 2 * math.pi * (first * f[0] + second * f[1])
            return self.linear(torch.cat([phase.cos(), phase.sin()]), "region.size_encoder")
        return self.w["text.wte"][token_id]

    def turn(self, x):
        """Rotate pairs (i, i + half) of the first `rotary_dim` dims of one head, [T, E]."""
        text = self.config.text
        half = text.rotary_dim // 2
        out = x.clone()
        for position in range(x.shape[0]):
            for i in range(half):
                angle = position * text.rope_theta ** (-2 * i / text.rotary_dim)
                c, s = math.cos(angle), math.sin(angle)
                a, b = x[position, i].item(), x[position, i + half].item()
                out[position, i] = a * c - b * s
                out[position, i + half] = a * s + b * c
        return out

    def hidden(self, image_embeddings, tokens):
        """[T, D] residual stream of BOS, image (or None) and tokens, before the last norm."""
        parts = [self.w["text.wte"][:1]]
        if image_embeddings is not None:
            parts.append(image_embeddings)
        prefix = sum(len(part) for part in parts)
        x = torch.cat([*parts, torch.stack([self.embedding(token) for token in tokens])])
        visible = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        if image_embeddings is not None:
            visible[:prefix, :prefix] = True
        for i in range(self.config.text.num_layers):
            name = f"text.blocks.{i}"
            normed = self.norm(x, f"{name}.ln")
            heads = self.config.text.num_heads
            attended = self.attention(normed, f"{name}.attn", heads, visible, self.turn)
            x = x + attended + self.mlp(normed, f"{name}.mlp")
        return x

    def logits(self, hidden):
        """[..., V]."""
        return self.linear(self.norm(hidden, "text.post_ln"), "text.lm_head")

    def value(self, hidden, token_id):
        """The payload that goes with a token sampled from `hidden` [D]."""
        bins = self.config.region.size_bins
        if token_id == COORD:
            best = self.mlp(hidden, "region.coord_decoder").argmax().item()
            return best / self.config.region.coord_bins, 0.0
        if token_id == SIZE:
            scores = self.mlp(hidden, "region.size_decoder")
            best = scores[:bins].argmax().item(), scores[bins:].argmax().item()
            return tuple(2 ** (b / (bins - 1) * 10 - 10) for b in best)
        return 0.0, 0.0


def resized(image, height, width):
    """uint8 [H, W, 3]."""
    return np.array(image.resize((width, height), Image.Resampling.LANCZOS))


def pooled(grid_hwd, size):
    """Adaptive average pool: window k is floor(k n / size) .. ceil((k + 1) n / size)."""
    height, width, depth = grid_hwd.shape
    out = torch.empty(size, size, depth, dtype=grid_hwd.dtype)
    for y in range(size):
        for x in range(size):
            top, bottom = math.floor(y * height / size), math.ceil((y + 1) * height / size)
            left, right = math.floor(x * width / size), math.ceil((x + 1) * width / size)
            out[y, x] = grid_hwd[top:bottom, left:right].mean((0, 1))
    return out
