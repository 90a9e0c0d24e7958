"""legato-tiny as plain dense PyTorch: Moondream 2's network, parameter names as in its checkpoints.

Shapes: B batch, T tokens, P prefix (BOS + image), S suffix tokens, D width, H heads, C 64 (head
size). A packed forward reads one image prefix and several suffix slots; each suffix token sees the
prefix and, causally, its own slot. With one slot that is exactly Moondream's prefix attention.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from legato_training.config import COORD, SIZE, ModelConfig


def gelu(x: Tensor) -> Tensor:
    """Apply GELU in the tanh approximation that Moondream uses everywhere."""
    return F.gelu(x, approximate="tanh")


class Attention(nn.Module):
    """Fused q, k, v and the output projection; what attends to what is the block's business."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def split(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, each [B, H, T, C]."""
        batch, length, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]

    def join(self, heads_BHTC: Tensor) -> Tensor:
        """Heads back to width, then the output projection."""
        out: Tensor = self.proj(heads_BHTC.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """fc1, gelu, fc2."""

    def __init__(self, dim: int, inner: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., out]."""
        out: Tensor = self.fc2(gelu(self.fc1(x)))
        return out


class VisionBlock(nn.Module):
    """Sequential pre-norm block with full attention."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(c.vision_dim)
        self.attn = Attention(c.vision_dim, c.vision_heads)
        self.ln2 = nn.LayerNorm(c.vision_dim)
        self.mlp = MLP(c.vision_dim, c.vision_ff, c.vision_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = x_BTD + self.attn.join(
            F.scaled_dot_product_attention(*self.attn.split(self.ln1(x_BTD)))
        )
        out: Tensor = x_BTD + self.mlp(self.ln2(x_BTD))
        return out


class Vision(nn.Module):
    """Patches to projected image embeddings."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.patch = c.patch
        self.patch_emb = nn.Linear(3 * c.patch * c.patch, c.vision_dim)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, c.num_image_tokens, c.vision_dim))
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c.vision_layers))
        self.post_ln = nn.LayerNorm(c.vision_dim)
        self.proj_mlp = MLP(2 * c.vision_dim, c.projector_inner, c.text_dim)

    def forward(self, pixels_B3YX: Tensor) -> Tensor:
        """Pixels in -1..1 [B, 3, Y, X] -> [B, tokens, text dim].

        One crop: local features equal global ones.
        """
        batch, channels, height, width = pixels_B3YX.shape
        rows, columns = height // self.patch, width // self.patch
        patches = pixels_B3YX.view(batch, channels, rows, self.patch, columns, self.patch)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
        x = self.patch_emb(patches) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        x = self.post_ln(x)
        projected: Tensor = self.proj_mlp(torch.cat([x, x], dim=-1))
        return projected


def rotate(x_BHTC: Tensor, cos_T: Tensor, sin_T: Tensor) -> Tensor:
    """Partial rotary embedding, split-half pairs in the first dims; tables [T, rotary/2] in f32."""
    half = cos_T.shape[-1]
    sizes = [half, half, x_BHTC.shape[-1] - 2 * half]
    first, second, rest = x_BHTC.split(sizes, dim=-1)  # type: ignore[no-untyped-call]  # torch leaves it bare
    turned = torch.cat([first * cos_T - second * sin_T, first * sin_T + second * cos_T], dim=-1)
    return torch.cat([turned.to(x_BHTC.dtype), rest], dim=-1)


class TextBlock(nn.Module):
    """Parallel block: attention and MLP read the same normed input."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(c.text_dim)
        self.attn = Attention(c.text_dim, c.text_heads)
        self.mlp = MLP(c.text_dim, c.text_ff, c.text_dim)

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, bias_SL: Tensor, prefix: int
    ) -> Tensor:
        """[B, P+S, D]: the ``prefix`` tokens see each other, others what ``bias_SL`` allows."""
        h = self.ln(x_BTD)
        q, k, v = self.attn.split(h)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        head = F.scaled_dot_product_attention(q[:, :, :prefix], k[:, :, :prefix], v[:, :, :prefix])
        mask = bias_SL.to(q.dtype).expand(q.shape[0], q.shape[1], -1, -1)
        tail = F.scaled_dot_product_attention(q[:, :, prefix:], k, v, attn_mask=mask)
        out: Tensor = x_BTD + self.attn.join(torch.cat([head, tail], dim=2)) + self.mlp(h)
        return out


class Text(nn.Module):
    """Decoder layers, embedding table and head."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Parameter(0.02 * torch.randn(c.vocab, c.text_dim))
        self.blocks = nn.ModuleList(TextBlock(c) for _ in range(c.text_layers))
        self.post_ln = nn.LayerNorm(c.text_dim)
        self.lm_head = nn.Linear(c.text_dim, c.vocab)


class Region(nn.Module):
    """Fourier encoders of coordinates and sizes, heads that read bins from the residual stream."""

    coord_features: Tensor
    size_features: Tensor

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        # Rounded to bf16 here, so that the exported file holds exactly what was trained with.
        self.register_buffer("coord_features", torch.randn(1, c.coord_features).bfloat16().float())
        self.register_buffer("size_features", torch.randn(2, c.size_features).bfloat16().float())
        self.coord_encoder = nn.Linear(2 * c.coord_features, c.text_dim)
        self.size_encoder = nn.Linear(2 * c.size_features, c.text_dim)
        self.coord_decoder = MLP(c.text_dim, c.region_inner, c.bins)
        self.size_decoder = MLP(c.text_dim, c.region_inner, 2 * c.bins)

    @staticmethod
    def fourier(values: Tensor, features: Tensor) -> Tensor:
        """[..., n] @ [n, F] -> cos and sin [..., 2F]; many radians need f32, autocast or not."""
        with torch.autocast(values.device.type, enabled=False):
            phase = (2 * math.pi * values.float()) @ features.float()
            return torch.cat([phase.cos(), phase.sin()], dim=-1).to(values.dtype)

    def encode_coord(self, x: Tensor) -> Tensor:
        """[..., 1] in 0..1 -> embedding [..., D]."""
        encoded: Tensor = self.coord_encoder(self.fourier(x, self.coord_features))
        return encoded

    def encode_size(self, wh: Tensor) -> Tensor:
        """[..., 2] in 0..1 -> embedding [..., D]."""
        encoded: Tensor = self.size_encoder(self.fourier(wh, self.size_features))
        return encoded


class LegatoTiny(nn.Module):
    """The whole network; ``state_dict`` is the checkpoint."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.vision = Vision(c)
        self.text = Text(c)
        self.region = Region(c)
        self.apply(init_linear)
        for module in (*self.vision.blocks, *self.text.blocks):
            depth = 2 * (c.vision_layers if isinstance(module, VisionBlock) else c.text_layers)
            for output in (module.attn.proj, module.mlp.fc2):
                nn.init.normal_(output.weight, std=0.02 / math.sqrt(depth) * 2)

    def rope_tables(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, rotary/2], f32."""
        c = self.config
        exponent = (
            torch.arange(0, c.rotary_dim, 2, device=positions_T.device, dtype=torch.float32)
            / c.rotary_dim
        )
        angles = positions_T.float()[:, None] * c.rope_theta**-exponent
        return angles.cos(), angles.sin()

    def embed(self, tokens_BS: Tensor, values_BS2: Tensor) -> Tensor:
        """Token embeddings, replaced by the value's encoding where the token is coord or size."""
        words = F.embedding(tokens_BS, self.text.wte)
        coords = self.region.encode_coord(values_BS2[..., :1])
        sizes = self.region.encode_size(values_BS2)
        kind = tokens_BS[..., None]
        return torch.where(
            kind == COORD,
            coords.to(words.dtype),
            torch.where(kind == SIZE, sizes.to(words.dtype), words),
        )

    def decode(
        self,
        image_BTD: Tensor,
        tokens_BS: Tensor,
        values_BS2: Tensor,
        positions_S: Tensor,
        bias_SL: Tensor,
    ) -> Tensor:
        """Residual stream of the suffix [B, S, D], before post_ln."""
        bos = self.text.wte[0].expand(image_BTD.shape[0], 1, -1)
        suffix = self.embed(tokens_BS, values_BS2)
        x = torch.cat([bos, image_BTD.to(bos.dtype), suffix.to(bos.dtype)], dim=1)
        prefix = self.config.prefix
        positions = torch.cat([torch.arange(prefix, device=positions_S.device), positions_S])
        cos, sin = self.rope_tables(positions)
        for block in self.text.blocks:
            x = block(x, cos, sin, bias_SL, prefix)
        return x[:, prefix:]

    def token_logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., vocab]."""
        logits: Tensor = self.text.lm_head(self.text.post_ln(hidden))
        return logits

    def forward(
        self,
        pixels_B3YX: Tensor,
        tokens_BS: Tensor,
        values_BS2: Tensor,
        positions_S: Tensor,
        bias_SL: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Projected image [B, T, D] and the suffix's residual stream [B, S, D]."""
        image = self.vision(pixels_B3YX)
        return image, self.decode(image, tokens_BS, values_BS2, positions_S, bias_SL)


def init_linear(module: nn.Module) -> None:
    """Draw normal weights of 0.02 and no bias; region encoders start wider."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02 if module.in_features != 588 else 0.04)
        nn.init.zeros_(module.bias)


def slot_mask(lengths: tuple[int, ...], prefix: int) -> tuple[Tensor, Tensor]:
    """Positions [S] and additive bias [S, prefix + S] of suffix slots of fixed lengths."""
    slot_S = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    within_S = torch.cat([torch.arange(n) for n in lengths])
    same = slot_S[:, None] == slot_S[None, :]
    causal = within_S[:, None] >= within_S[None, :]
    allowed = torch.cat([torch.ones(len(slot_S), prefix, dtype=torch.bool), same & causal], dim=1)
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    return prefix + within_S, bias
