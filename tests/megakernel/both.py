"""Rows with values beside rows that draft in the megakernel: the bits of single tokens.

Shape legend: N rows, S steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from legato_engine.kernels.megakernel.kernel import RING_STAGES
from legato_engine.kernels.megakernel.sizes import ModelSizes
from legato_engine.speculation import BlockPolicy

from benchmarks.megakernel.drafts import DraftingRows
from benchmarks.megakernel.kernel import Rules
from benchmarks.megakernel.model import PAIR, SCALAR, Cache
from tests.megakernel import values
from tests.megakernel.drafts import POLICIES, Scene, accepted_by_row, planted, set_rules
from tests.megakernel.words import GPU, Machine

_ANYTHING, _WORDS = 0, 1  # constraints


@dataclasses.dataclass
class Answers:
    """Results of single tokens: ids [S, N], values and certainties [S, N, 2], and logits."""

    tokens: torch.Tensor
    payload: torch.Tensor
    certainty: torch.Tensor
    logits: torch.Tensor


class World:
    """Rows of a scene that draft, and rows with values, in turns."""

    def __init__(
        self, sizes: ModelSizes, scene: Scene, machine: Machine = GPU, inner_dim: int = 0
    ) -> None:
        self.scene, self.machine, self.device = scene, machine, machine.device
        self.valued = values.World(sizes, machine, inner_dim)
        self.model = self.valued.model
        count, on = len(scene.places), machine.device
        self.drafting = torch.arange(count, device=on) % 2 == 0
        self.positions = torch.tensor(scene.places, device=on)
        self.cache = Cache.random(sizes, count, values.POSITIONS // 16, on)
        self.first = torch.randint(7, sizes.vocab_size, (count,), device=on)
        self.first[1::4], self.first[3::4] = SCALAR, PAIR
        self.payload = torch.rand(count, 2, device=on)
        self.constraints_CV = torch.zeros(2, sizes.vocab_size, device=on)
        self.constraints_CV[_WORDS, [SCALAR, PAIR]] = -torch.inf
        self.constraint = torch.where(self.drafting, _WORDS, _ANYTHING)
        self._answers: dict[bool, Answers] = {}
        self._rows: dict[tuple[str, bool], DraftingRows] = {}

    def answers(self, *, sampled: bool) -> Answers:
        if sampled not in self._answers:
            length, count = self.scene.tokens, len(self.first)
            kernel = self.valued.kernel(count)
            kernel.rules = Rules.greedy(self.device)
            set_rules(kernel.rules, sampled=sampled)
            kernel.constraints_CV = self.constraints_CV
            shape = (length, 8 * kernel.tiles, self.model.sizes.vocab_size)
            logits = torch.full(shape, torch.nan, device=self.device)
            kernel.run(
                self.cache,
                self.first,
                self.positions,
                length,
                payload=self.payload,
                constraint=self.constraint.clone(),
                logits=logits,
            )
            assert kernel.ended("single tokens")
            told = kernel.tokens(length, count), *kernel.values(length, count)
            self._answers[sampled] = Answers(*told, logits[:, :count].clone())
        return self._answers[sampled]

    def rows(self, name: str, *, delays: bool = False) -> DraftingRows:
        if (name, delays) not in self._rows:
            make: Callable[[int], BlockPolicy] = POLICIES[name]
            rows = DraftingRows(
                self.model,
                self.cache,
                self.positions,
                make(self.scene.most),
                back=self.scene.back,
                values=self.valued.two_layers,
                device=self.machine.drafting_device,
                compile_source=self.machine.compile_source,
            )
            rows.constraints_CV, rows.constraint_S = self.constraints_CV, self.constraint
            self._rows[name, delays] = rows
        return self._rows[name, delays]

    def begin(self, rows: DraftingRows, plant: torch.Tensor, *, sampled: bool) -> None:
        limit, most = self.scene.tokens - 1, self.scene.most
        set_rules(rows.rules, sampled=sampled)
        rows.begin(self.first, plant, limit, most, values.POSITIONS)
        rows.slot.staged.device["room"][~self.drafting] = 0
        rows.rules.payload_R2[: len(self.payload)] = self.payload


def check(world: World, name: str, right: float, seed: int, *, delays: bool = False) -> list[int]:
    """One launch of a whole answer; returns the numbers of accepted draft tokens."""
    sampled = seed % 2 == 1
    answers, rows = world.answers(sampled=sampled), world.rows(name, delays=delays)
    tokens, vocab_size = answers.tokens.T.contiguous(), world.model.sizes.vocab_size
    plant = planted(tokens, right, seed, vocab_size)
    tiles = next(tiles for tiles in RING_STAGES if rows.most <= 8 * tiles)
    shape = (world.scene.tokens, 8 * tiles, vocab_size)
    seen = torch.full(shape, torch.nan, device=world.device)
    world.begin(rows, plant, sampled=sampled)
    rows.launch(world.valued.kernel(1).weights, world.scene.tokens, logits=seen, delays=delays)
    told = rows.steps()
    fields = [(seen, answers.logits)]
    for name, expected in (("payload", answers.payload), ("certainty", answers.certainty)):
        fields.append((rows.ring.fields[name].to(world.device), expected))
    by_row = accepted_by_row(told, tokens, [(had, each.swapaxes(0, 1)) for had, each in fields])
    drafting = world.drafting.tolist()
    assert all(drafts or set(own) == {0} for drafts, own in zip(drafting, by_row, strict=True))
    newest = torch.tensor([sum(own) + len(own) for own in by_row], device=world.device) - 1
    every = torch.arange(rows.count, device=world.device)
    assert torch.equal(rows.rules.payload_R2[: rows.count], answers.payload[newest, every])
    assert torch.equal(rows.rules.token_R[: rows.count], answers.tokens[newest, every])
    world.begin(rows, plant, sampled=sampled)
    assert told == rows.replay(tokens, len(told))[0]
    return [num for drafts, own in zip(drafting, by_row, strict=True) if drafts for num in own]


def values_beside_drafts_change_no_bit(world: World, name: str, seeds: int = 4) -> None:
    """Of tokens, logits and values; words have zeros and certainties of one."""
    kinds, total = set[int](), list[int]()
    for seed in range(seeds):
        total += check(world, name, (1.0, 0.7, 0.9, 0.5)[seed % 4], seed)
        kinds |= set(world.answers(sampled=seed % 2 == 1).tokens.flatten().tolist())
    assert {SCALAR, PAIR} < kinds
    assert {0, world.scene.most} <= set(total)


def late_warps_change_nothing(world: World, repeats: int) -> None:
    """Random sleeps around every wait and signal."""
    for seed in range(repeats):
        check(world, "budget", 0.8, seed, delays=True)
