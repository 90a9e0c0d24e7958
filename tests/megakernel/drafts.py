"""Draft tokens inside the megakernel on any machine: fewer steps, not one other bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence

import torch
from legato_engine.kernels.megakernel.kernel import RING_STAGES
from legato_engine.kernels.megakernel.sizes import ModelSizes
from legato_engine.speculation import (
    AdaptiveBlockPolicy,
    BlockPolicy,
    CostTable,
    FixedBlockPolicy,
    TokenBudgetPolicy,
)

from benchmarks.megakernel.drafts import DraftedStep, DraftingRows
from benchmarks.megakernel.kernel import ResidentKernel, Rules
from benchmarks.megakernel.model import Cache, Model
from tests.megakernel.words import GPU, Machine

POSITIONS = 1024
COSTS = CostTable(((1, 1.0), (8, 1.1), (36, 1.9)), 0.1, 0.02)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Start positions of rows, tokens of an answer, and maximum draft tokens of a row.

    Answers are planted `back` positions before their rows, more than they have tokens.
    """

    places: tuple[int, ...] = (850, 317, 255, 256)
    tokens: int = 60
    most: int = 7
    back: int = 150


POLICIES: dict[str, Callable[[int], BlockPolicy]] = {
    "fixed": FixedBlockPolicy,
    "seed": lambda most: AdaptiveBlockPolicy(max_block=most),
    "budget": lambda most: TokenBudgetPolicy(COSTS, max_block=most),
}


class World:
    """A model with random weights, and answers of rows without drafts by the build of text."""

    def __init__(
        self, sizes: ModelSizes, scene: Scene | None = None, machine: Machine = GPU
    ) -> None:
        torch.manual_seed(0)
        self.scene, self.machine, self.device = scene or Scene(), machine, machine.device
        count = len(self.scene.places)
        self.sizes, self.model = sizes, Model.random(sizes, POSITIONS, self.device)
        self.cache = Cache.random(sizes, count, POSITIONS // 16, self.device)
        self.positions = torch.tensor(self.scene.places, device=self.device)
        self.first = torch.randint(sizes.vocab_size, (count,), device=self.device)
        self.kernel = ResidentKernel(self.model, 1, compile_source=machine.compile_source)
        self.weights = self.kernel.weights
        self.expected: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows: dict[tuple[str, int, bool], DraftingRows] = {}

    def answers(self, *, sampled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [S, N] and logits [S, N, V]."""
        if sampled not in self.expected:
            count, length = len(self.scene.places), self.scene.tokens
            shape = (length, 8, self.sizes.vocab_size)
            logits = torch.full(shape, torch.nan, device=self.device)
            set_rules(self.kernel.rules, sampled=sampled)
            self.kernel.run(self.cache, self.first, self.positions, length, logits=logits)
            assert self.kernel.ended("plain")
            tokens = self.kernel.tokens(length, count).T.contiguous()
            of = logits[:, :count].transpose(0, 1).contiguous()
            self.expected[sampled] = tokens, of
        return self.expected[sampled]

    def drafting(self, name: str, count: int, *, delays: bool = False) -> DraftingRows:
        key = (name, count, delays)
        if key not in self.rows:
            cache = Cache(self.cache.keys, self.cache.values, self.cache.pages[:count].contiguous())
            self.rows[key] = DraftingRows(
                self.model,
                cache,
                self.positions[:count],
                POLICIES[name](self.scene.most),
                back=self.scene.back,
                device=self.machine.drafting_device,
                compile_source=self.machine.compile_source,
            )
        return self.rows[key]


def set_rules(rules: Rules, *, sampled: bool) -> None:
    rules.temperature_R.fill_(0.8 if sampled else 0.0)
    rules.seed_R.copy_(torch.arange(len(rules.seed_R)))


def planted(answers: torch.Tensor, right: float, seed: int, vocab_size: int) -> torch.Tensor:
    """Answers of which so many tokens are right."""
    torch.manual_seed(seed)
    wrong = torch.rand(answers.shape, device=answers.device) > right
    others = torch.randint(vocab_size, answers.shape, device=answers.device)
    return torch.where(wrong, others, answers)


def accepted_by_row(
    told: Sequence[DraftedStep],
    tokens: torch.Tensor,
    fields: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[list[int]]:
    """Return the accepted draft tokens in each step of each row.

    Tokens are those of single tokens [N, S], and so is every field: of the steps' tokens, and [N,
    S, ...].
    """
    at, accepted = [0] * len(tokens), [list[int]() for _ in tokens]
    for step, each in enumerate(told):
        first = 0
        for row, some in enumerate(each.tokens):
            here, had = slice(first, first + len(some)), slice(at[row], at[row] + len(some))
            assert some == tokens[row, had].tolist(), (step, row)
            for index, (seen, expected) in enumerate(fields):
                assert torch.equal(seen[step, here], expected[row, had]), (step, row, index)
            at[row] += len(some)
            first += 1 + each.proposed[row]
            accepted[row].append(len(some) - 1)
    return accepted


def check(
    world: World,
    rows: DraftingRows,
    right: float,
    seed: int,
    *,
    limit: int | None = None,
    reach: int = POSITIONS,
    room: int | None = None,
    delays: bool = False,
) -> list[int]:
    """Run a launch of at most a whole answer; return the numbers of accepted draft tokens.

    Tokens, logits and what the host hears are checked.
    """
    sampled = seed % 2 == 1
    tokens, logits = world.answers(sampled=sampled)
    count = rows.count
    plant = planted(tokens[:count], right, seed, world.sizes.vocab_size)
    most, length = world.scene.most, world.scene.tokens
    limit, room = length - 1 if limit is None else limit, most if room is None else room
    begin = world.first[:count], plant, limit, room, reach
    tiles = next(tiles for tiles in RING_STAGES if rows.most <= 8 * tiles)
    shape = (length, 8 * tiles, world.sizes.vocab_size)
    seen = torch.full(shape, torch.nan, device=world.device)
    set_rules(rows.rules, sampled=sampled)
    rows.begin(*begin)
    rows.launch(world.weights, length, logits=seen, delays=delays)
    told = rows.steps()
    accepted = [
        num for each in accepted_by_row(told, tokens[:count], [(seen, logits)]) for num in each
    ]
    state = rows.state.position_R[:count].tolist(), rows.rules.token_R[:count].tolist()
    rows.begin(*begin)
    expected, ends = rows.replay(tokens[:count], len(told))
    assert told == expected
    assert ends == [False] * (len(told) - 1) + [True]
    assert state == (rows.state.position_R[:count].tolist(), rows.rules.token_R[:count].tolist())
    return accepted


def drafts_change_no_bit(
    world: World, name: str, count: int, shares: Iterable[float] = (0.0, 0.5, 0.8, 0.9, 1.0)
) -> None:
    """Tokens and logits of accepted positions are those of single tokens.

    Counts, draft tokens and descriptors are those of the kernels around captured steps, and so is
    the last step. `shares` of the planted tokens are right.
    """
    rows = world.drafting(name, count)
    total: list[int] = []
    for seed, right in enumerate(shares):
        total += check(world, rows, right, seed)
    if name == "fixed":
        assert {0, world.scene.most} <= set(total)


def pages_and_last_tokens_end_a_launch(
    world: World, count: int, limits: Iterable[int], reaches: Iterable[int]
) -> None:
    """At every distance; a row without room feeds one token at a time."""
    rows = world.drafting("fixed", count)
    for limit in limits:
        check(world, rows, 0.9, limit, limit=limit)
    for reach in reaches:
        check(world, rows, 0.9, reach, reach=reach)
    check(world, rows, 1.0, 0, room=2)
    assert set(check(world, rows, 1.0, 0, room=-1, limit=world.scene.most + 2)) == {0}


def the_host_ends_a_launch_after_any_step(
    world: World,
    count: int,
    repeats: int,
    stop_later: Callable[[DraftingRows, random.Random], None],
    start_first: bool,
) -> set[int]:
    """What there is of the steps is what there would have been. Returns how many there were."""
    rows, tokens = world.drafting("fixed", count), world.answers()[0][:count]
    chance, lengths = random.Random(0), set()
    length = world.scene.tokens
    for seed in range(repeats):
        plant = planted(tokens, 0.6, seed, world.sizes.vocab_size)
        set_rules(rows.rules, sampled=False)
        rows.begin(world.first[:count], plant, length - 1, world.scene.most, POSITIONS)
        if not start_first:
            stop_later(rows, chance)
        rows.launch(world.weights, length)
        if start_first:
            stop_later(rows, chance)
        told = rows.steps()
        lengths.add(len(told))
        for row in range(count):
            some = [token for each in told for token in each.tokens[row]]
            assert some == tokens[row, : len(some)].tolist()
    return lengths


def rows_that_have_ended_feed_nothing(world: World, count: int) -> None:
    """A launch whose rows all have is over after a step."""
    rows, tokens = world.drafting("fixed", count), world.answers()[0][:count]
    rows.begin(world.first[:count], tokens, -1, world.scene.most, POSITIONS)
    rows.launch(world.weights, world.scene.tokens)
    (told,) = rows.steps()
    assert told.tokens == [[]] * count
    assert told.proposed == [0] * count


def repeats_have_the_same_bits(world: World, count: int, repeats: int) -> None:
    rows = world.drafting("budget", count)
    for seed in range(repeats):
        check(world, rows, 0.8, seed)


def late_warps_change_nothing(world: World, count: int, repeats: int) -> None:
    """Random sleeps around every wait and signal."""
    rows = world.drafting("budget", count, delays=True)
    for seed in range(repeats):
        check(world, rows, 0.8, seed, delays=True)
