"""On a GPU: draft tokens inside the resident kernel change how many steps an answer takes, and not
one bit of it.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

import pytest
import torch
from legato_engine.kernels.cuda.resident import RING_STAGES
from legato_engine.resident.sizes import LEGATO_TINY, MOONDREAM2, ModelSizes
from legato_engine.speculative.block_policy import (
    AdaptiveBlockPolicy,
    BlockPolicy,
    FixedBlockPolicy,
)
from legato_engine.speculative.budget_policy import TokenBudgetPolicy
from legato_engine.speculative.costs import CostTable

from benchmarks.resident_drafts import DraftingRows
from benchmarks.resident_kernel import ResidentKernel, Rules
from benchmarks.resident_model import DEVICE, Cache, Model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

POSITIONS = 1024
PLACES = (850, 317, 255, 256)
SHALLOW = dataclasses.replace(MOONDREAM2, num_layers=3)
TOKENS = 60
MOST = 7
"""Draft tokens of a row."""
COSTS = CostTable(((1, 1.0), (8, 1.1), (36, 1.9)), 0.1, 0.02)
POLICIES: dict[str, Callable[[int], BlockPolicy]] = {
    "fixed": FixedBlockPolicy,
    "seed": lambda most: AdaptiveBlockPolicy(max_block=most),
    "budget": lambda most: TokenBudgetPolicy(COSTS, max_block=most),
}


class World:
    """A model with random weights, and answers of rows without drafts by the build of text."""

    def __init__(self, sizes: ModelSizes) -> None:
        torch.manual_seed(0)
        self.sizes, self.model = sizes, Model.random(sizes, POSITIONS)
        self.cache = Cache.random(sizes, len(PLACES), POSITIONS // 16)
        self.positions = torch.tensor(PLACES, device=DEVICE)
        self.first = torch.randint(sizes.vocab_size, (len(PLACES),), device=DEVICE)
        self.kernel = ResidentKernel(self.model, 1)
        self.weights = self.kernel.weights
        self.expected: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}
        self.rows: dict[tuple[str, int, bool], DraftingRows] = {}

    def answers(self, *, sampled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [S, N] and logits [S, N, V]."""
        if sampled not in self.expected:
            shape = (TOKENS, 8, self.sizes.vocab_size)
            logits = torch.full(shape, torch.nan, device=DEVICE)
            self.rule(self.kernel.rules, sampled=sampled)
            self.kernel.run(self.cache, self.first, self.positions, TOKENS, logits=logits)
            assert self.kernel.ended("plain")
            tokens = self.kernel.tokens(TOKENS, len(PLACES)).T.contiguous()
            of = logits[:, : len(PLACES)].transpose(0, 1).contiguous()
            self.expected[sampled] = tokens, of
        return self.expected[sampled]

    def rule(self, rules: Rules, *, sampled: bool) -> None:
        rules.temperature_R.fill_(0.8 if sampled else 0.0)
        rules.seed_R.copy_(torch.arange(len(rules.seed_R)))

    def drafting(self, name: str, count: int, *, delays: bool = False) -> DraftingRows:
        key = (name, count, delays)
        if key not in self.rows:
            cache = Cache(self.cache.keys, self.cache.values, self.cache.pages[:count].contiguous())
            policy = POLICIES[name](MOST)
            self.rows[key] = DraftingRows(self.model, cache, self.positions[:count], policy)
        return self.rows[key]


def planted(answers: torch.Tensor, right: float, seed: int, vocab_size: int) -> torch.Tensor:
    """Answers of which so many tokens are right."""
    torch.manual_seed(seed)
    wrong = torch.rand(answers.shape, device=DEVICE) > right
    others = torch.randint(vocab_size, answers.shape, device=DEVICE)
    return torch.where(wrong, others, answers)


@pytest.fixture(scope="module", params=[LEGATO_TINY, SHALLOW], ids=["tiny", "moondream2"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def check(
    world: World,
    rows: DraftingRows,
    right: float,
    seed: int,
    *,
    limit: int = TOKENS - 1,
    reach: int = POSITIONS,
    room: int = MOST,
    delays: bool = False,
) -> list[int]:
    """One launch of TOKENS tokens at most; tokens, logits, and what the host hears. Returns the
    numbers of accepted draft tokens.
    """
    sampled = seed % 2 == 1
    tokens, logits = world.answers(sampled=sampled)
    count = rows.count
    plant = planted(tokens[:count], right, seed, world.sizes.vocab_size)
    begin = world.first[:count], plant, limit, room, reach
    tiles = next(tiles for tiles in RING_STAGES if rows.most <= 8 * tiles)
    shape = (TOKENS, 8 * tiles, world.sizes.vocab_size)
    seen = torch.full(shape, torch.nan, device=DEVICE)
    world.rule(rows.rules, sampled=sampled)
    rows.begin(*begin)
    rows.launch(world.weights, TOKENS, logits=seen, delays=delays)
    told = rows.steps()
    at, accepted = [0] * count, []
    for step, each in enumerate(told):
        first = 0
        for row, some in enumerate(each.tokens):
            assert some == tokens[row, at[row] : at[row] + len(some)].tolist(), (step, row)
            here = seen[step, first : first + len(some)]
            assert torch.equal(here, logits[row, at[row] : at[row] + len(some)]), (step, row)
            at[row] += len(some)
            first += 1 + each.proposed[row]
            accepted.append(len(some) - 1)
    state = rows.state.position_R[:count].tolist(), rows.rules.token_R[:count].tolist()
    rows.begin(*begin)
    expected, ends = rows.replay(tokens[:count], len(told))
    assert told == expected
    assert ends == [False] * (len(told) - 1) + [True]
    assert state == (rows.state.position_R[:count].tolist(), rows.rules.token_R[:count].tolist())
    return accepted


@pytest.mark.parametrize(
    ("name", "count"),
    [("fixed", 1), ("fixed", 2), ("fixed", 4), ("seed", 4), ("budget", 1), ("budget", 4)],
)
def test_drafts_change_no_bit(world: World, name: str, count: int) -> None:
    """Tokens and logits of accepted positions are those of single tokens; counts, draft tokens and
    descriptors are those of the kernels around captured steps, and so is the last step.
    """
    rows = world.drafting(name, count)
    total: list[int] = []
    for seed, right in enumerate((0.0, 0.5, 0.8, 0.9, 1.0)):
        total += check(world, rows, right, seed)
    if name == "fixed":
        assert {0, MOST} <= set(total)


@pytest.mark.parametrize("count", [1, 4])
def test_pages_and_last_tokens_end_a_launch(world: World, count: int) -> None:
    """At every distance; a row without room feeds one token at a time."""
    rows = world.drafting("fixed", count)
    for limit in (0, 1, 5, 20):
        check(world, rows, 0.9, limit, limit=limit)
    for reach in (9, 17, 33):
        check(world, rows, 0.9, reach, reach=reach)
    check(world, rows, 1.0, 0, room=2)
    assert set(check(world, rows, 1.0, 0, room=-1, limit=9)) == {0}


def test_the_host_ends_a_launch_after_any_step(world: World) -> None:
    """What there is of the steps is what there would have been."""
    rows, tokens = world.drafting("fixed", 4), world.answers()[0]
    chance, lengths = random.Random(0), set()
    for seed in range(40):
        plant = planted(tokens, 0.6, seed, world.sizes.vocab_size)
        world.rule(rows.rules, sampled=False)
        rows.begin(world.first, plant, TOKENS - 1, 7, POSITIONS)
        rows.launch(world.weights, TOKENS)
        time.sleep(chance.random() * 3e-3)
        rows.ring.stop()
        told = rows.steps()
        lengths.add(len(told))
        for row in range(4):
            some = [token for each in told for token in each.tokens[row]]
            assert some == tokens[row, : len(some)].tolist()
    assert len(lengths) > 3


@pytest.mark.parametrize("count", [1, 4])
def test_repeats_have_the_same_bits(world: World, count: int) -> None:
    rows = world.drafting("budget", count)
    for seed in range(30):
        check(world, rows, 0.8, seed)


def test_late_warps_change_nothing() -> None:
    """Random sleeps around every wait and signal."""
    world = World(LEGATO_TINY)
    for count in (1, 4):
        rows = world.drafting("budget", count, delays=True)
        for seed in range(20):
            check(world, rows, 0.8, seed, delays=True)
