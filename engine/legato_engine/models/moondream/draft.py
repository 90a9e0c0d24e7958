"""A draft of one layer, applied to the model's last hidden state.

It reads keys and values of one of the model's layers, so it sees the image and keeps no cache.
Embeddings and head are the model's.

The file is safetensors of `DraftLayer`'s parameters. Its metadata names that `layer`, and may name
the `model`.

Shape legend: R rows, K proposed tokens, D width, H heads, E head dim, F inner width.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from legato_engine.errors import InvalidField
from legato_engine.kernels import activations, ops, reference
from legato_engine.kernels.accelerated import DraftSizes, DraftWeights, draft_layer_proposer
from legato_engine.kernels.parameters import Affine
from legato_engine.kernels.proposer import Proposer, RowHistory
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.text import Text
from legato_engine.models.paged_attention import KVCache
from legato_engine.models.untrusted import refusing

_INNER = "fc1.weight"  # [F, D]


class DraftLayer(nn.Module):
    """Predicts the next hidden state from the last and the token sampled from it."""

    def __init__(self, dim: int, inner: int, num_heads: int) -> None:
        super().__init__()
        self._heads = (num_heads, dim // num_heads)
        self.ln_state, self.ln_token, self.ln = (nn.LayerNorm(dim) for _ in range(3))
        self.join = nn.Linear(2 * dim, dim)
        self.query, self.proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def joined(self, state_RD: torch.Tensor, word_RD: torch.Tensor) -> torch.Tensor:
        """[R, D]: normed input of attention and MLP."""
        both_R2D = torch.cat([self.ln_state(state_RD), self.ln_token(word_RD)], dim=-1)
        joined_RD: torch.Tensor = self.ln(self.join(both_R2D))
        return joined_RD

    def queries(self, joined_RD: torch.Tensor) -> torch.Tensor:
        """[R, H, E] before rotation."""
        query_RD: torch.Tensor = self.query(joined_RD)
        return query_RD.view(-1, *self._heads)

    def next_state(
        self, state_RD: torch.Tensor, joined_RD: torch.Tensor, seen_RHE: torch.Tensor
    ) -> torch.Tensor:
        """`seen_RHE`: the attention's output."""
        inner_RF = activations.gelu(self.fc1(joined_RD))
        next_RD: torch.Tensor = state_RD + self.proj(seen_RHE.flatten(1)) + self.fc2(inner_RF)
        return next_RD


class DraftProposer:
    """A `Proposer` by a `DraftLayer`, token by token."""

    sequential = True

    def __init__(self, draft: DraftLayer, text: Text, kv: KVCache, layer: int) -> None:
        self._draft = draft
        self._text = text
        self._cache = kv.layer(layer)

    def propose(self, history: RowHistory, draft_RK: torch.Tensor) -> None:
        draft, text = self._draft, self._text
        state_RD, newest_R = history.hidden_RD, history.position_R
        token_R = history.tokens_RC.gather(1, newest_R[:, None])[:, 0].clamp(min=0)
        written_R = (newest_R - 1).clamp(min=0)  # the last position that has keys and values
        last = text.rope.cos_PR.shape[0] - 1
        for step in range(draft_RK.shape[1]):
            joined_RD = draft.joined(state_RD, text.wte[token_R])
            angles = text.rope.at((newest_R + step).clamp(max=last))
            q_RHE = reference.rotate(draft.queries(joined_RD), *angles)
            k_NHSE, v_NHSE, scale_2 = self._cache
            seen_RHE = ops.decode_attention(
                q_RHE, k_NHSE, v_NHSE, written_R, history.page_table_RM, scale_2
            )
            state_RD = draft.next_state(state_RD, joined_RD, seen_RHE)
            token_R = text.lm_head(text.post_ln(state_RD)).argmax(-1)
            draft_RK[:, step] = token_R


def read_draft(path: Path, config: MoondreamConfig, text: Text, kv: KVCache) -> Proposer:
    tensors, notes = _read(path)
    if notes.get("model", config.name) != config.name:
        raise _unusable(path, f"is for the model {notes['model']}, not {config.name}")
    layer, inner = notes.get("layer", ""), tensors.get(_INNER, torch.empty(0, 0)).shape[0]
    if not (layer.isdecimal() and int(layer) < config.text.num_layers):
        raise _unusable(path, f"reads layer {layer!r} of {config.text.num_layers}")
    with torch.device("meta"):
        draft = DraftLayer(config.text.dim, inner, config.text.num_heads)
    expected = {name: tensor.shape for name, tensor in draft.state_dict().items()}
    if (found := {name: tensor.shape for name, tensor in tensors.items()}) != expected:
        wrong = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        raise _unusable(path, f"has missing or wrong {', '.join(wrong)}")
    like = text.wte
    draft.load_state_dict(
        {name: tensor.to(like.device, like.dtype) for name, tensor in tensors.items()}, assign=True
    )
    draft = draft.eval().requires_grad_(requires_grad=False)
    sizes = DraftSizes(
        dim=config.text.dim,
        inner=inner,
        num_heads=config.text.num_heads,
        vocab_size=config.text.vocab_size,
        page_size=kv.page_size,
        max_pages=-(-config.text.max_context // kv.page_size),
        num_angles=config.text.rotary_dim // 2,
    )
    by_kernels = _by_kernels(sizes, draft, text, kv, int(layer))
    return by_kernels or DraftProposer(draft, text, kv, int(layer))


def _by_kernels(
    sizes: DraftSizes, draft: DraftLayer, text: Text, kv: KVCache, layer: int
) -> Proposer | None:
    layers: Any = draft.named_children()
    weights = DraftWeights(
        **{name: _affine(layer) for name, layer in layers},
        words_VD=text.wte,
        post_ln=_affine(text.post_ln),
        head=text.dense_head(),
    )
    angles = text.rope.cos_PR, text.rope.sin_PR
    return draft_layer_proposer(sizes, weights, (kv.k_LNHSE[layer], kv.v_LNHSE[layer]), angles)


def _affine(layer: nn.Linear | nn.LayerNorm) -> Affine:
    return Affine(layer.weight.data.contiguous(), layer.bias.data.contiguous())


def _read(path: Path) -> tuple[Mapping[str, torch.Tensor], Mapping[str, str]]:
    with refusing(str(path), "draft"), safe_open(path, framework="pt") as file:
        names: list[str] = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


def _unusable(path: Path, problem: str) -> InvalidField:
    return InvalidField(f"{path} {problem}", field="draft")
