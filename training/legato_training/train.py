"""Train legato-tiny: ``torchrun -m legato_training.train --minutes M --out FOLDER``.

The wall clock decides the schedule: warm-up steps, then a cosine over the minutes given.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from legato_training.art_sets import ART_SETS
from legato_training.config import ModelConfig
from legato_training.export import load_exported
from legato_training.lexicon import lexicon
from legato_training.model import LegatoTiny, slot_mask
from legato_training.render import Renderer
from legato_training.slots import SLOTS, Arrays, scene_loader
from legato_training.sprites import load_sprites
from legato_training.vocabulary import ROOT, Words


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run; they are saved in the checkpoint."""

    minutes: float = 20.0
    max_steps: int = 0
    batch: int = 256
    rate: float = 1.2e-3
    final_rate: float = 0.02
    warmup: int = 500
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.999
    dense_start: float = 2.0
    dense_end: float = 0.5
    coord_weight: float = 1.0
    size_weight: float = 0.5
    seed: int = 20
    workers: int = 8
    log_every: int = 50
    save_seconds: float = 120.0


@dataclass
class Ranks:
    """This process's rank and the number of processes of a run."""

    rank: int
    world: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process logs and saves."""
        return self.rank == 0

    def agree(self, value: float) -> float:
        """Rank 0's number on all ranks."""
        if self.world == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared.item())

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """One flat all-reduce over every gradient."""
        if self.world == 1:
            return
        gradients: list[Tensor] = []
        for parameter in parameters:
            assert parameter.grad is not None  # the losses read every parameter
            gradients.append(parameter.grad)
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= self.world
        sizes = [g.numel() for g in gradients]
        pieces = flat.split(sizes)  # type: ignore[no-untyped-call]  # torch leaves it bare
        torch._foreach_copy_(
            gradients, [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)]
        )


class Trainer:
    """Model, losses, optimiser, averaged weights, and one step of all of them."""

    def __init__(
        self, model_config: ModelConfig, config: TrainConfig, device: torch.device, compiled: bool
    ) -> None:
        torch.manual_seed(config.seed)
        self.config, self.device, self.step = config, device, 0
        self.model = LegatoTiny(model_config).to(device)
        self.dense = DenseNouns(Words(), model_config.text_dim).to(device)
        self.parameters = [*self.model.parameters(), *self.dense.parameters()]
        self.ema = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self.optimiser = torch.optim.AdamW(
            self.groups(), lr=0.0, betas=(0.9, 0.98), fused=device.type == "cuda"
        )
        positions, bias = slot_mask(SLOTS, model_config.prefix)
        self.positions, self.bias = positions.to(device), bias.to(device)
        self.region_losses, self.token_loss = region_losses, token_loss
        if compiled:
            for block in (*self.model.vision.blocks, *self.model.text.blocks):
                block.compile(dynamic=False)
            self.region_losses = torch.compile(region_losses, dynamic=False)
            self.token_loss = torch.compile(token_loss, dynamic=False)
            self.dense.compile(dynamic=False)

    def groups(self) -> list[dict[str, Any]]:
        """Weight decay on matrices, not on vectors or embeddings."""
        named = [*self.model.named_parameters(), *self.dense.named_parameters()]
        matrix = [p for n, p in named if p.ndim == 2 and "wte" not in n]
        other = [p for n, p in named if not (p.ndim == 2 and "wte" not in n)]
        return [
            {"params": matrix, "weight_decay": self.config.weight_decay},
            {"params": other, "weight_decay": 0.0},
        ]

    def rate(self, progress: float) -> float:
        """Warm-up by steps, cosine by progress 0..1."""
        c = self.config
        cosine = c.final_rate + (1 - c.final_rate) * 0.5 * (
            1 + math.cos(math.pi * min(progress, 1.0))
        )
        return c.rate * min(1.0, (self.step + 1) / c.warmup) * cosine

    def losses(self, pixels: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """All loss parts of a batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            image, hidden = self.model(
                pixels, batch["tokens"].long(), batch["values"], self.positions, self.bias
            )
            coord, size = self.region_losses(self.model, hidden, batch)
            return {
                "token": self.token_loss(self.model, hidden, batch["targets"]),
                "coord": coord,
                "size": size,
                "dense": self.dense(image, self.model.text.wte, batch["patches"]),
            }

    def train_step(
        self, pixels: Tensor, batch: dict[str, Tensor], progress: float, ranks: Ranks
    ) -> dict[str, Tensor]:
        """Forward, backward, reduce, update, average."""
        c = self.config
        parts = self.losses(pixels, batch)
        dense = c.dense_end + (c.dense_start - c.dense_end) * max(0.0, 1 - progress / 0.7)
        total = (
            parts["token"]
            + c.coord_weight * parts["coord"]
            + c.size_weight * parts["size"]
            + dense * parts["dense"]
        )
        total.backward()  # type: ignore[no-untyped-call]  # torch leaves it bare
        ranks.average_gradients(self.parameters)
        parts["norm"] = nn.utils.clip_grad_norm_(self.parameters, c.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate(progress)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        self.update_average()
        return parts

    @torch.no_grad()
    def update_average(self) -> None:
        """Exponential average of the weights, quick at first."""
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        floating = [(self.ema[k], v) for k, v in self.model.state_dict().items()]
        torch._foreach_lerp_([a for a, _ in floating], [b for _, b in floating], 1 - decay)

    def save(self, path: Path, elapsed: float) -> None:
        """Write the checkpoint, replacing the old one in one move."""
        state = {
            "model": self.model.state_dict(),
            "dense": self.dense.state_dict(),
            "ema": self.ema,
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "elapsed": elapsed,
            "model_config": asdict(self.model.config),
            "config": asdict(self.config),
        }
        scratch = path.with_suffix(".tmp")
        torch.save(state, scratch)
        scratch.replace(path)

    def start_from(self, folder: Path) -> None:
        """Begin with an exported model's weights; optimiser and schedule start anew."""
        self.model.load_state_dict(load_exported(folder).state_dict())
        self.ema = {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def load(self, path: Path) -> float:
        """Continue from a checkpoint; returns the seconds it had trained."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.dense.load_state_dict(state["dense"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.ema, self.step = state["ema"], state["step"]
        return float(state["elapsed"])


def start_ranks(cpu: bool) -> Ranks:
    """Join the process group torchrun describes, if any."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if cpu else torch.device("cuda", local)
    if not cpu:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("gloo" if cpu else "nccl")
    return Ranks(rank, world, device)


def report(
    trainer: Trainer, parts: dict[str, Tensor], speed: float, elapsed: float, progress: float
) -> None:
    """One log line."""
    losses = " ".join(f"{name} {float(value.detach()):.4f}" for name, value in parts.items())
    print(
        f"step {trainer.step} {losses} rate {trainer.rate(progress):.2e} images/s {speed:.0f} "
        f"elapsed {elapsed:.0f}s progress {progress:.3f}",
        flush=True,
    )


def train(
    trainer: Trainer,
    batches: Iterator[Arrays],
    renderer: Renderer,
    ranks: Ranks,
    elapsed: float,
    out: Path,
) -> None:
    """Train until the minutes (or max_steps) are over, compilation not counted."""
    c, begin, saved, marked, mark_step = (
        trainer.config,
        None,
        time.monotonic(),
        time.monotonic(),
        trainer.step,
    )
    budget, progress, before = c.minutes * 60, elapsed / (c.minutes * 60), elapsed
    torch.manual_seed(c.seed * 7919 + ranks.rank + trainer.step * 31)
    while progress < 1.0 and not (c.max_steps and trainer.step >= c.max_steps):
        batch = {k: torch.from_numpy(v).to(ranks.device) for k, v in next(batches).items()}
        with torch.no_grad():
            pixels = renderer.draw(batch)
        parts = trainer.train_step(pixels, batch, progress, ranks)
        if begin is None:
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            begin = marked = time.monotonic()
        if trainer.step % 10 == 0:
            elapsed = before + time.monotonic() - begin
            progress = ranks.agree(elapsed / budget)
        if not ranks.leads:
            continue
        if trainer.step % c.log_every == 0 or trainer.step <= 3:
            now = time.monotonic()
            images = (trainer.step - mark_step) * c.batch * ranks.world
            report(trainer, parts, images / max(now - marked, 1e-6), elapsed, progress)
            marked, mark_step = time.monotonic(), trainer.step
        if time.monotonic() - saved > c.save_seconds:
            trainer.save(out / "checkpoint.pt", elapsed)
            saved = time.monotonic()
    if ranks.leads:
        trainer.save(out / "checkpoint.pt", elapsed)
        print(f"trained {trainer.step} steps, {elapsed:.0f} s", flush=True)


def parse() -> argparse.Namespace:
    """Command line; every TrainConfig field is an option."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack", type=Path, default=ROOT / ".data/sprites.npz")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--init", type=Path, help="folder of an exported model to start from")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    for name, value in asdict(TrainConfig()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    """Command line entry: the workers are forked before CUDA starts."""
    options = parse()
    config = TrainConfig(**{name: getattr(options, name) for name in asdict(TrainConfig())})
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / "checkpoint.pt"
    resume = options.resume and checkpoint.exists()
    rank = int(os.environ.get("RANK", "0"))
    book = load_sprites(options.pack)
    sets = tuple(i for i, art in enumerate(ART_SETS) if not art.held_out)
    # A resumed run must not see the first run's scenes again.
    seed = config.seed + 1000 * rank + (int(time.time()) % 100_000 * 10_000 if resume else 0)
    batches = iter(scene_loader(book, sets, config.batch, seed, config.workers))
    next(batches)
    ranks = start_ranks(options.cpu)
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(ModelConfig(), config, ranks.device, not options.no_compile)
    elapsed = trainer.load(checkpoint) if resume else 0.0
    if options.init and not resume:
        trainer.start_from(options.init)
    if ranks.leads:
        count = sum(p.numel() for p in trainer.model.parameters())
        print(
            f"{count / 1e6:.2f} M parameters, {ranks.world} ranks, batch {config.batch} each",
            flush=True,
        )
    renderer = Renderer(book, ranks.device, not options.no_compile)
    train(trainer, batches, renderer, ranks, elapsed, options.out)
    if ranks.world > 1:
        dist.destroy_process_group()
    os._exit(0)  # worker processes block on full queues; nothing is left to flush


# ---------------------------------------------------------------- losses
# Tokens, coordinate and size bins with soft targets, dense nouns on image tokens.
#
# B batch, S suffix, D width, N padded region targets, C kinds, A names per kind, W word pieces per
# name.

COORD_SPREAD = 2.0
SIZE_SPREAD = 8.0
BACKGROUND_WEIGHT = 0.1
MAX_ALIASES = 4
MAX_PIECES = 8


def soft_bins(centre: Tensor, spread: float, bins: int) -> Tensor:
    """Gaussian distribution over bins around a fractional bin, [..., bins]."""
    distance = torch.arange(bins, device=centre.device) - centre[..., None]
    return torch.softmax(-0.5 * (distance / spread) ** 2, dim=-1)


def size_to_bin(size: Tensor, bins: int) -> Tensor:
    """Fractional bin of a size: 2^(bin / (bins - 1) * 10 - 10) backwards."""
    return (torch.log2(size.clamp(min=2.0**-10)) + 10) / 10 * (bins - 1)


def gather_rows(hidden_BSD: Tensor, at_BN: Tensor) -> Tensor:
    """hidden[b, at[b, n]] with -1 read as 0, [B, N, D]."""
    index = at_BN.clamp(min=0)[..., None].expand(-1, -1, hidden_BSD.shape[-1])
    return hidden_BSD.gather(1, index)


def masked_soft_loss(logits: Tensor, target: Tensor, used: Tensor) -> Tensor:
    """Mean over used entries of cross entropy minus the target's own entropy: perfect is zero."""
    log_probability = F.log_softmax(logits.float(), dim=-1)
    loss = (target * (target.clamp(min=1e-9).log() - log_probability)).sum(-1)
    return (loss * used).sum() / used.sum().clamp(min=1)


def region_losses(
    model: LegatoTiny, hidden_BSD: Tensor, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Coordinate and size losses at the positions that predict them."""
    bins = model.config.bins
    at = batch["coord_at"].long()
    logits = model.region.coord_decoder(gather_rows(hidden_BSD, at))
    target = soft_bins((batch["coord_value"] * bins).clamp(max=bins - 1), COORD_SPREAD, bins)
    coord = masked_soft_loss(logits, target, (at >= 0).float())
    at = batch["size_at"].long()
    logits = model.region.size_decoder(gather_rows(hidden_BSD, at)).unflatten(-1, (2, bins))
    target = soft_bins(size_to_bin(batch["size_value"], bins), SIZE_SPREAD, bins)
    size = masked_soft_loss(logits, target, (at >= 0).float()[..., None].expand(-1, -1, 2))
    return coord, size


def token_loss(model: LegatoTiny, hidden_BSD: Tensor, targets_BS: Tensor) -> Tensor:
    """Cross entropy of the next token where it is learned."""
    logits = model.token_logits(hidden_BSD)
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets_BS.long().flatten(), ignore_index=-1
    )


class DenseNouns(nn.Module):
    """Classifies each projected image token against the mean word embedding of what covers it.

    Only training uses it: it ties names to places long before the answers could.
    """

    ids_CAW: Tensor
    aliases_C: Tensor

    def __init__(self, words: Words, dim: int) -> None:
        super().__init__()
        ids, counts = name_pieces(words)
        self.register_buffer("ids_CAW", ids, persistent=False)
        self.register_buffer("aliases_C", counts, persistent=False)
        self.log_scale = nn.Parameter(torch.tensor(2.3))
        self.background = nn.Parameter(torch.randn(dim) * 0.02)

    def forward(self, image_BTD: Tensor, wte_VD: Tensor, kinds_BT: Tensor) -> Tensor:
        """Weighted cross entropy; class C is background."""
        kinds = self.ids_CAW.shape[0]
        pick = (torch.rand(kinds, device=wte_VD.device) * self.aliases_C).long()
        ids_CW = self.ids_CAW[torch.arange(kinds, device=pick.device), pick]
        used = (ids_CW >= 0).float()[..., None]
        names = (F.embedding(ids_CW.clamp(min=0), wte_VD) * used).sum(1) / used.sum(1)
        classes = F.normalize(torch.cat([names, self.background[None]]).float(), dim=-1)
        features = F.normalize(image_BTD.float(), dim=-1).flatten(0, 1)
        logits = (features @ classes.t()) * self.log_scale.exp().clamp(max=100)
        target = kinds_BT.long().flatten()
        loss = F.cross_entropy(logits.float(), target, reduction="none")
        weight = torch.where(target == kinds, BACKGROUND_WEIGHT, 1.0)
        return (loss * weight).sum() / weight.sum()


def name_pieces(words: Words) -> tuple[Tensor, Tensor]:
    """Token ids of each kind's names [C, A, W] padded with -1, and how many names each has [C]."""
    phrases_of = lexicon().phrases_of
    ids = torch.full((len(phrases_of), MAX_ALIASES, MAX_PIECES), -1, dtype=torch.long)
    counts = torch.zeros(len(phrases_of))
    for kind, phrases in enumerate(phrases_of):
        counts[kind] = min(len(phrases), MAX_ALIASES)
        for alias, phrase in enumerate(phrases[:MAX_ALIASES]):
            pieces = words.encode(" " + phrase.singular)[:MAX_PIECES]
            ids[kind, alias, : len(pieces)] = torch.tensor(pieces)
    return ids, counts


if __name__ == "__main__":
    main()
