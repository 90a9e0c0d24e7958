"""Teach a draft of legato-tiny its next words: ``python -m legato_training.draft --out FILE``.

The draft is one layer after the model's last. From the residual stream that a token was sampled
from, and that token, it guesses the stream of the next one, and so on by itself; it looks at the
image through keys and values that the model has computed anyway, those of its last layer, and
speaks through the model's own head. Its teacher is what the model says of generated scenes.

B images, S suffix tokens, G of them in slots of text, L positions before them, D width, H heads,
C head size, K tokens that are drafted.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from legato_training.art_sets import ART_SETS
from legato_training.config import ModelConfig
from legato_training.export import load_exported
from legato_training.model import LegatoTiny, TextBlock, gelu, rotate, slot_mask
from legato_training.render import Renderer
from legato_training.slots import CAPTION, LENGTH, SLOTS, STARTS, scene_loader
from legato_training.sprites import load_sprites
from legato_training.vocabulary import ROOT

TEXT = LENGTH - STARTS[CAPTION]  # the last slots: a caption and two questions
LATER = 0.8  # what a token counts against the one before it
WARM_UP = 50
LOG_EVERY = 50


class Draft(nn.Module):
    """One layer; the head, the word embeddings and the keys and values are the model's."""

    def __init__(self, dim: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_state, self.ln_token, self.ln = (nn.LayerNorm(dim) for _ in range(3))
        self.join = nn.Linear(2 * dim, dim)
        self.query, self.proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, inner), nn.Linear(inner, dim)
        for last in (self.proj, self.fc2):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(
        self,
        state: Tensor,
        word: Tensor,
        seen: tuple[Tensor, Tensor, Tensor],
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """State [B, G, D] and the word behind it -> the next state; ``seen``: k, v, what of it."""
        joined = self.ln(self.join(torch.cat([self.ln_state(state), self.ln_token(word)], -1)))
        query = self.query(joined).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v, bias = seen
        looked = F.scaled_dot_product_attention(
            rotate(query, *rope).to(k.dtype), k, v, attn_mask=bias
        )
        next_state: Tensor = (
            state
            + self.proj(looked.transpose(1, 2).flatten(2).to(joined.dtype))
            + self.fc2(gelu(self.fc1(joined)))
        )
        return next_state


@dataclass(frozen=True)
class Lesson:
    """The teacher's output for some scenes.

    Its residual stream in their slots of text, keys and values of everything, and the tokens
    generated after each position (-1: none).
    """

    hidden_BGD: Tensor
    k_BHLC: Tensor
    v_BHLC: Tensor
    said_BG: Tensor

    def __getitem__(self, which: Tensor | slice) -> "Lesson":
        """Select some of the scenes."""
        return Lesson(*(getattr(self, each.name)[which] for each in fields(self)))

    def __len__(self) -> int:
        return len(self.said_BG)


class Teacher:
    """The frozen model over packed scenes: what a draft begins from, sees and is to say."""

    def __init__(self, model: LegatoTiny, layer: int, device: torch.device) -> None:
        self.model, self.device = model, device
        self.block = cast(TextBlock, model.text.blocks[layer])
        mask = slot_mask(SLOTS, ModelConfig().prefix)
        self.positions_S, self.bias_SL = (each.to(device) for each in mask)

    @torch.no_grad()
    def read(self, pixels: Tensor, batch: dict[str, Tensor]) -> Lesson:
        """One batch."""
        kept: list[Tensor] = []
        hook = self.block.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        with torch.autocast(self.device.type, torch.bfloat16):
            _, hidden_BSD = self.model(
                pixels, batch["tokens"].long(), batch["values"], self.positions_S, self.bias_SL
            )
            _, k, v = self.block.attn.split(self.block.ln(kept[0]))
        hook.remove()
        prefix = torch.arange(ModelConfig().prefix, device=self.device)
        k = rotate(k, *self.model.rope_tables(torch.cat([prefix, self.positions_S])))
        said_BG = batch["targets"][:, -TEXT:].long()
        return Lesson(hidden_BSD[:, -TEXT:].bfloat16(), k.bfloat16(), v.bfloat16(), said_BG)


def joined(lessons: list[Lesson]) -> Lesson:
    """All their scenes."""
    names = [each.name for each in fields(Lesson)]
    return Lesson(*(torch.cat([getattr(one, name) for one in lessons]) for name in names))


def roll(
    draft: Draft, teacher: Teacher, lesson: Lesson, depth: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each drafted token: its logits, the teacher's, and where both mean something."""
    model, state = teacher.model, lesson.hidden_BGD.float()
    logits_BGV = model.token_logits(state).float()
    valid_BG = lesson.said_BG >= 0
    seen = lesson.k_BHLC, lesson.v_BHLC, teacher.bias_SL[-TEXT:].to(lesson.k_BHLC.dtype)
    positions_G = teacher.positions_S[-TEXT:]
    for step in range(depth):
        word = F.embedding(ahead(lesson.said_BG, step).clamp(min=0), model.text.wte)
        state = draft(state, word, seen, model.rope_tables(positions_G + 1 + step))
        valid_BG = valid_BG & (ahead(lesson.said_BG, step + 1) >= 0)
        wanted_BGV = logits_BGV.roll(-step - 1, 1)
        yield model.token_logits(state)[valid_BG].float(), wanted_BGV[valid_BG], valid_BG


def ahead(said_BG: Tensor, step: int) -> Tensor:
    """Return the token `step` positions later, -1 past the end."""
    moved = said_BG.roll(-step, 1)
    if step:
        moved[:, -step:] = -1
    return moved


def loss_of(rolled: Iterator[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """How far the draft's distributions are from the teacher's, later tokens counting less."""
    parts = [F.cross_entropy(logits, wanted.softmax(-1)) for logits, wanted, _ in rolled]
    total = sum(part * LATER**step for step, part in enumerate(parts))
    assert isinstance(total, Tensor)  # a draft has at least one token
    return total


@torch.no_grad()
def accepted(rolled: Iterator[tuple[Tensor, Tensor, Tensor]]) -> list[float]:
    """Share of positions whose next n tokens all equal the teacher's."""
    shares: list[float] = []
    right_BG = None
    for logits, wanted, valid_BG in rolled:
        same_BG = torch.zeros_like(valid_BG)
        same_BG[valid_BG] = logits.argmax(-1) == wanted.argmax(-1)
        right_BG = same_BG if right_BG is None else right_BG & same_BG
        shares.append(float(right_BG[valid_BG].float().mean()))
    return shares


def collect(teacher: Teacher, options: argparse.Namespace) -> Lesson:
    """Fresh scenes, drawn and read by the teacher once."""
    book = load_sprites(options.pack)
    sets = tuple(i for i, art in enumerate(ART_SETS) if not art.held_out)
    loader = scene_loader(book, sets, options.batch, options.seed, options.workers)
    renderer = Renderer(book, teacher.device)
    lessons: list[Lesson] = []
    for arrays in islice(loader, -(-options.scenes // options.batch)):
        batch = {
            name: torch.from_numpy(np.asarray(each)).to(teacher.device)
            for name, each in arrays.items()
        }
        lessons.append(teacher.read(renderer.draw(batch), batch))
    return joined(lessons)


def train(draft: Draft, teacher: Teacher, lesson: Lesson, options: argparse.Namespace) -> None:
    """As many steps as the time allows, the rate falling to nothing; a batch is held out."""
    optimiser = torch.optim.AdamW(draft.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    held, taught = lesson[slice(options.batch)], len(lesson) - options.batch
    step, done, start = 0, 0.0, time.monotonic()
    while done < 1:
        for group in optimiser.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / WARM_UP) * (1 - done)
        which = options.batch + torch.randint(taught, (options.batch,), device=teacher.device)
        with torch.autocast(teacher.device.type, torch.bfloat16):
            loss = loss_of(roll(draft, teacher, lesson[which], options.depth))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        done = (time.monotonic() - start) / options.seconds
        if step % LOG_EVERY == 0 or done >= 1:
            with torch.autocast(teacher.device.type, torch.bfloat16):
                shares = accepted(roll(draft, teacher, held, options.depth))
            told = " ".join(f"{share:.3f}" for share in shares)
            print(f"step {step} of {done:.0%} loss {float(loss.detach()):.3f} {told}", flush=True)


def save(draft: Draft, layer: int, path: Path) -> None:
    """Write the file as the engine's `models/moondream/draft.py` describes it, in bf16."""
    tensors = {
        name: each.detach().cpu().bfloat16().contiguous()
        for name, each in draft.state_dict().items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"model": "legato-tiny", "layer": str(layer)})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ROOT.parent / "engine/tiny/legato_tiny")
    parser.add_argument("--pack", type=Path, default=ROOT / ".data/sprites.npz")
    parser.add_argument("--scenes", type=int, default=7_680, help="1.3 MB of memory each")
    parser.add_argument("--seconds", type=float, default=60.0, help="behind the reading of scenes")
    parser.add_argument("--layer", type=int, default=5, help="whose keys and values it reads")
    parser.add_argument("--inner", type=int, default=1280)
    parser.add_argument("--depth", type=int, default=6, help="tokens it is taught to draft")
    parser.add_argument("--batch", type=int, default=128, help="scenes")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_exported(options.model).requires_grad_(requires_grad=False)
    config = model.config
    draft = Draft(config.text_dim, options.inner, config.text_heads).to(device)
    teacher = Teacher(model.to(device), options.layer, device)
    start = time.monotonic()
    lesson = collect(teacher, options)
    print(f"{len(lesson)} scenes in {time.monotonic() - start:.0f} s", flush=True)
    train(draft, teacher, lesson, options)
    save(draft, options.layer, options.out)


# ---------------------------------------------------------------- lora
# Low-rank adapters of the text MLPs, as Legato serves them: ``out + B(A x)``, no further factor.
#
# R rank, I and O a layer's inputs and outputs.


class LoraLinear(nn.Module):
    """A frozen layer and its trained change, which is nothing at the start."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.a_RI = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(rank))
        self.b_OR = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., O] of [..., I]."""
        out: Tensor = self.frozen(x) + (x @ self.a_RI.t()) @ self.b_OR.t()
        return out


def add_adapter(model: LegatoTiny, rank: int) -> list[nn.Parameter]:
    """Freeze the model, give every text MLP an adapter, and return what is to be trained."""
    model.requires_grad_(False)
    for block in model.text.blocks:
        mlp = cast(TextBlock, block).mlp
        for name, layer in (("fc1", mlp.fc1), ("fc2", mlp.fc2)):
            mlp.add_module(name, LoraLinear(layer, rank))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def save_adapter(model: LegatoTiny, path: Path) -> None:
    """Write the file as the engine's `models/moondream/adapters.py` describes it, in bf16."""
    tensors = {}
    for index, block in enumerate(model.text.blocks):
        for name in ("fc1", "fc2"):
            layer = cast(TextBlock, block).mlp.get_submodule(name)
            assert isinstance(layer, LoraLinear)  # of `add_adapter`
            prefix = f"text.blocks.{index}.mlp.{name}"
            tensors[f"{prefix}.lora_a"] = layer.a_RI.detach().bfloat16().contiguous()
            tensors[f"{prefix}.lora_b"] = layer.b_OR.detach().bfloat16().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"model": "legato-tiny"})


if __name__ == "__main__":
    main()
