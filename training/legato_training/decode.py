"""Greedy decoding in batches, with the grammar the server uses.

No suffix cache: the suffix is read again each step.
B batch, P prefix, T suffix length, H heads, C head size.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from legato_training.config import ANSWER, COORD, EOS, SIZE
from legato_training.model import LegatoTiny, TextBlock, rotate

# Tokens allowed at each step of an answer, repeating; None allows everything.
GRAMMARS: dict[str, tuple[tuple[int, ...] | None, ...]] = {
    "detect": ((COORD, EOS), (COORD,), (SIZE,)),
    "point": ((COORD, EOS), (COORD,)),
    "segment": (None,),
    "text": (None,),
}

Cache = list[tuple[Tensor, Tensor]]  # rotated keys and values of the prefix, one pair a layer


@dataclass
class Answer:
    """Tokens up to EOS (left out) and their values: (x, 0) for coord, (w, h) for size."""

    tokens: list[int]
    values: list[tuple[float, float]]

    def boxes(self) -> list[tuple[float, float, float, float]]:
        """(x0, y0, x1, y1) of every complete coord, coord, size triple."""
        found = []
        for i in range(len(self.tokens) - 2):
            if tuple(self.tokens[i : i + 3]) == (COORD, COORD, SIZE):
                (x, _), (y, _), (w, h) = self.values[i : i + 3]
                found.append((x - w / 2, y - h / 2, x + w / 2, y + h / 2))
        return found

    def points(self) -> list[tuple[float, float]]:
        """(x, y) of every pair of coords."""
        pairs = zip(self.values[0::2], self.values[1::2], strict=False)
        return [(x[0], y[0]) for x, y in pairs]


class Decoder:
    """Answers prompts about a batch of images."""

    def __init__(self, model: LegatoTiny) -> None:
        self.model = model

    @torch.no_grad()
    def read(self, pixels_B3YX: Tensor) -> Cache:
        """Rotated keys and values of BOS and the image, one pair a layer, [B, H, P, C]."""
        model = self.model
        image = model.vision(pixels_B3YX)
        bos = model.text.wte[0].expand(len(image), 1, -1).to(image.dtype)
        x = torch.cat([bos, image], dim=1)
        cos, sin = model.rope_tables(torch.arange(x.shape[1], device=x.device))
        cache = []
        for layer in model.text.blocks:
            block = cast(TextBlock, layer)
            h = block.ln(x)
            q, k, v = block.attn.split(h)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            cache.append((k, v))
            x = x + block.attn.join(F.scaled_dot_product_attention(q, k, v)) + block.mlp(h)
        return cache

    def suffix(self, cache: Cache, tokens_BT: Tensor, values_BT2: Tensor) -> Tensor:
        """Residual stream [B, T, D] of suffix tokens after the cached prefix."""
        model, prefix, length = self.model, cache[0][0].shape[2], tokens_BT.shape[1]
        x = model.embed(tokens_BT, values_BT2)
        cos, sin = model.rope_tables(prefix + torch.arange(length, device=x.device))
        ones = torch.ones(length, prefix + length, dtype=torch.bool, device=x.device)
        mask = ones.tril(prefix)
        for layer, (past_k, past_v) in zip(model.text.blocks, cache, strict=True):
            block = cast(TextBlock, layer)
            h = block.ln(x)
            q, k, v = block.attn.split(h)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = x + block.attn.join(attended) + block.mlp(h)
        return x

    def next_values(self, hidden_BD: Tensor, chosen_B: Tensor) -> Tensor:
        """Value [B, 2] of the chosen token, read from the same hidden state."""
        bins = self.model.config.bins
        coord = self.model.region.coord_decoder(hidden_BD).argmax(-1) / bins
        size_bins = self.model.region.size_decoder(hidden_BD).unflatten(-1, (2, bins)).argmax(-1)
        size = torch.exp2(size_bins / (bins - 1) * 10 - 10)
        values = torch.zeros(len(hidden_BD), 2, device=hidden_BD.device)
        values[:, 0] = torch.where(chosen_B == COORD, coord, 0.0)
        return torch.where((chosen_B == SIZE)[:, None], size, values)

    @torch.no_grad()
    def answer(
        self, cache: Cache, prompts: list[list[int]], skill: str, limit: int
    ) -> list[Answer]:
        """Greedy answers of at most ``limit`` tokens, one prompt an image."""
        device = cache[0][0].device
        count, longest = len(prompts), max(len(p) for p in prompts)
        tokens = torch.zeros(count, longest + limit, dtype=torch.long, device=device)
        values = torch.zeros(count, longest + limit, 2, device=device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        rows, grammar = torch.arange(count, device=device), GRAMMARS[skill]
        done = torch.zeros(count, dtype=torch.bool, device=device)
        for step in range(limit):
            window = longest + step
            hidden = self.suffix(cache, tokens[:, :window], values[:, :window])[
                rows, lengths + step - 1
            ]
            logits = self.model.token_logits(hidden).float()
            logits[:, ANSWER] = float("-inf")
            allowed = grammar[step % len(grammar)]
            if allowed:
                mask = torch.full_like(logits, float("-inf"))
                mask[:, list(allowed)] = 0
                logits = logits + mask
            chosen = torch.where(done, EOS, logits.argmax(-1))
            tokens[rows, lengths + step] = chosen
            values[rows, lengths + step] = self.next_values(hidden, chosen).to(values.dtype)
            done |= chosen == EOS
            if step % 4 == 3 and bool(done.all()):
                break
        return [
            collect(tokens[r, n:].tolist(), values[r, n:].tolist())
            for r, n in enumerate(lengths.tolist())
        ]


def collect(tokens: list[int], values: list[list[float]]) -> Answer:
    """Cut at EOS."""
    end = tokens.index(EOS) if EOS in tokens else len(tokens)
    return Answer(tokens[:end], [(first, second) for first, second in values[:end]])
