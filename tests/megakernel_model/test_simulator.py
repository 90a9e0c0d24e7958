"""Programs run on the CPU, in random orders, with real numbers."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import random
import struct

import legato_tiny
import numpy as np
import pytest
from legato_engine.kernels.megakernel.program import NONE, Op, build_program
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, ModelSizes

from tests.megakernel_model.definition import Cache, Weights, forward
from tests.megakernel_model.order import Stuck
from tests.megakernel_model.simulator import simulate
from tests.megakernel_model.soak import (
    SIZES,
    SMALLEST,
    SMALLEST_BOTH,
    SMALLEST_DRAFTS,
    SMALLEST_VALUES,
    DraftingWorld,
    Tally,
    World,
    agree,
    try_mutants,
)

WORLDS = [World(sizes) for sizes in SIZES]
VALUED = World(SMALLEST_VALUES)
DRAFTING = [DraftingWorld(SMALLEST_DRAFTS, rate) for rate in (0.0, 0.7, 1.0)]
DRAFTING.append(DraftingWorld(ModelSizes(128, 3, 2, 160, drafts=True)))
BOTH = DraftingWorld(SMALLEST_BOTH, 0.8)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: str(world.program.sizes))
def test_every_order_gives_what_the_model_gives(world: World) -> None:
    """The model's own program has one result, which is that of a plain forward pass."""
    outcomes = [world.simulate(world.program, seed) for seed in range(10)]
    assert all(agree(outcome, world.expected) for outcome in outcomes)
    first = outcomes[0]
    assert all(np.array_equal(outcome.trace, first.trace) for outcome in outcomes)


def test_the_host_ends_the_steps_of_all_workers_at_once() -> None:
    """Its stop flag may be set at any time: the published steps are the same as without it."""
    world = WORLDS[0]
    lengths = set()
    for seed in range(15):
        outcome = world.simulate(world.program, seed, stops=True)
        steps = len(outcome.tokens)
        lengths.add(steps)
        assert outcome.tokens == world.expected.tokens[:steps]
        assert np.allclose(outcome.trace, world.expected.trace[:steps], rtol=0, atol=1e-9)
    assert lengths == {1, 2}


def test_values_are_read_and_fed_back_in_every_order() -> None:
    """Steps with words, a scalar and a pair, also where the host ends them."""
    tokens = [token for step in VALUED.expected.tokens for token in step]
    assert {1, 2} < set(tokens)
    for seed in range(20):
        outcome = VALUED.simulate(VALUED.program, seed, stops=seed % 2 == 0)
        steps = len(outcome.tokens)
        assert outcome.tokens == VALUED.expected.tokens[:steps]
        assert np.allclose(outcome.values, VALUED.expected.values[:steps], rtol=0, atol=1e-9)


@pytest.mark.parametrize("world", DRAFTING, ids=("wrong", "mixed", "right", "larger"))
def test_drafts_change_no_token_in_any_order(world: DraftingWorld) -> None:
    """Drafts change no token of greedy and sampled rows, in any order of events.

    Right drafts take fewer steps, also if the host ends them.
    """
    steps = set()
    for seed in range(12):
        outcome = world.simulate(world.program, seed, stops=seed % 3 == 0)
        assert world.agrees(outcome)
        if seed % 3:
            assert world.whole(outcome)
            steps.add(len(outcome.accepted))
    assert len(steps) == 1
    if world is DRAFTING[0]:
        assert steps == {world.length}
    else:
        assert max(steps) < world.length


def test_rows_with_values_share_steps_with_drafts_in_every_order() -> None:
    """Tokens and values of rows whose newest token has one, or that feed draft tokens, in turn."""
    tokens = [token for step in BOTH.expected.tokens[: BOTH.length] for token in step]
    assert {1, 2} < set(tokens)
    accepted = set()
    for seed in range(20):
        outcome = BOTH.simulate(BOTH.program, seed, stops=seed % 4 == 0)
        assert BOTH.agrees(outcome)
        if seed % 4:
            assert BOTH.whole(outcome)
        accepted |= {len(own) for rows in outcome.accepted for own in rows}
    assert accepted == {1, 2}


def test_several_chunks_of_a_block_are_added() -> None:
    """A width of more than one stage, as Moondream 2 has."""
    sizes = ModelSizes(1024, 2, 1, 1024)
    rng = np.random.default_rng(0)
    weights, cache = Weights.random(sizes, rng), Cache.random(sizes, 70, 1, rng)
    outcome = simulate(build_program(sizes, 12), weights, cache, [7], 1, random.Random(0))
    assert sizes.chunks == 2
    assert agree(outcome, forward(weights, cache, [7], 1))


def test_legato_tiny_gives_the_tokens_that_it_gives() -> None:
    """The shipped model's weights, several steps."""
    weights = Weights.moondream(LEGATO_TINY, _tiny_tensors())
    cache = Cache.random(LEGATO_TINY, 33, 1, np.random.default_rng(0))
    outcome = simulate(build_program(LEGATO_TINY, 12), weights, cache, [1], 3, random.Random(0))
    assert agree(outcome, forward(weights, cache, [1], 3))


def test_a_signal_that_never_comes_is_noticed() -> None:
    """The simulator ends, and says which workers wait."""
    world = WORLDS[0]
    workers = [list(instructions) for instructions in world.program.workers]
    index = next(i for i, it in enumerate(workers[2]) if it.op == Op.ATTEND)
    workers[2][index] = dataclasses.replace(workers[2][index], signal=NONE)
    program = dataclasses.replace(world.program, workers=tuple(map(tuple, workers)))
    with pytest.raises(Stuck, match="wait for"):
        world.simulate(program, 0)


@pytest.mark.parametrize(
    ("op", "values"),
    [
        *((op, False) for op in (Op.SETTLE, Op.PLACE, Op.COMMIT)),
        *((op, True) for op in (Op.FC1, Op.VALUE, Op.SETTLE, Op.COMMIT)),
    ],
    ids=lambda each: each.name if isinstance(each, Op) else ("words", "values")[each],
)
def test_a_wait_of_drafts_that_is_dropped_shows_in_some_order(op: Op, values: bool) -> None:
    """Each hop between sampling and the next step's tokens is needed."""
    world = BOTH if values else DRAFTING[1]
    workers = tuple(
        tuple(
            dataclasses.replace(it, wait=NONE, wait_count=0, wait_stride=0) if it.op == op else it
            for it in instructions
        )
        for instructions in world.program.workers
    )
    assert world.fault(dataclasses.replace(world.program, workers=workers), 50, 0) is not None


@pytest.mark.parametrize(
    ("op", "values"),
    [
        *((op, False) for op in (Op.FC2, Op.ATTEND, Op.OUT, Op.WEIGH, Op.SAMPLE, Op.COMMIT)),
        *((op, True) for op in (Op.FC1, Op.INNER, Op.BINS, Op.VALUE, Op.COMMIT)),
    ],
    ids=lambda each: each.name if isinstance(each, Op) else ("words", "values")[each],
)
def test_a_wait_that_is_dropped_shows_in_some_order(op: Op, values: bool) -> None:
    """The orders are adversarial enough to find what a missing wait lets happen."""
    world = VALUED if values else WORLDS[0]
    workers = tuple(
        tuple(
            dataclasses.replace(it, wait=NONE, wait_count=0, wait_stride=0) if it.op == op else it
            for it in instructions
        )
        for instructions in world.program.workers
    )
    assert world.fault(dataclasses.replace(world.program, workers=workers), 50, 0) is not None


def test_mutants_that_are_accepted_are_right_in_every_order() -> None:
    """Of several sizes; `tests.megakernel_model.soak` tries as many as one likes."""
    tally = Tally()
    try_mutants(WORLDS, range(150), 5, tally)
    assert tally.accepted < tally.mutants / 2
    assert tally.simulations > 25


@pytest.mark.parametrize("count", [500, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutants_of_the_smallest_model(count: int) -> None:
    """Half of them differ from all others; none that is accepted gives anything else."""
    tally = Tally()
    try_mutants([World(SMALLEST)], range(count), 2, tally)
    assert len(tally.tried) > count / 2
    assert count / 100 < tally.accepted < len(tally.tried) / 4


def test_mutants_of_a_program_with_values() -> None:
    """None that is accepted gives other tokens or values."""
    tally = Tally()
    try_mutants([VALUED], range(300), 2, tally)
    assert len(tally.tried) > 200
    assert 1 < tally.accepted < len(tally.tried) / 10


@pytest.mark.parametrize("world", [DRAFTING[1], BOTH], ids=("words", "values"))
def test_mutants_of_a_program_with_drafts(world: DraftingWorld) -> None:
    """None that is accepted gives other tokens or values."""
    tally = Tally()
    try_mutants([world], range(150), 2, tally)
    assert len(tally.tried) > 100
    assert 0 < tally.accepted < len(tally.tried) / 10


def _tiny_tensors() -> dict[str, np.ndarray]:
    """Return the text model's tensors as float32: numpy has no bf16."""
    data = (importlib.resources.files(legato_tiny) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name.startswith("text."):
            assert entry["dtype"] == "BF16"
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            bits = np.frombuffer(data[first:last], np.uint16).astype(np.uint32) << 16
            tensors[name] = bits.view(np.float32).reshape(entry["shape"])
    return tensors
