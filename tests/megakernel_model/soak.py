"""Programs with a planted fault, or several."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
from legato_engine.kernels.megakernel.program import (
    NONE,
    Instruction,
    Program,
    build_program,
    num_counters,
)
from legato_engine.kernels.megakernel.sizes import ModelSizes, ValueDims

from tests.megakernel_model.definition import GREEDY, Cache, Outcome, Rule, Weights, forward
from tests.megakernel_model.order import Stuck
from tests.megakernel_model.simulator import Drafts, simulate
from tests.megakernel_model.validator import InvalidProgram, validate

# ---------------------------------------------------------------- mutants

Lists = list[list[Instruction]]


def mutate(program: Program, chance: random.Random) -> Program:
    """One to three random changes."""
    workers = [list(instructions) for instructions in program.workers]
    ring = program.ring_stages
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if chance.random() < 0.03:
            ring = chance.choice((1, 2, 20, 60, 200))
        else:
            chance.choice(_CHANGES)(program, workers, chance)
    if chance.random() < 0.7:
        workers = [_numbered(instructions) for instructions in workers]
    return Program(program.sizes, ring, tuple(map(tuple, workers)))


def _change_field(program: Program, workers: Lists, chance: random.Random) -> None:
    """Change one field of one worker's instruction, or of all workers'."""
    worker, index = _place(workers, chance)
    it = workers[worker][index]
    field = chance.choice(dataclasses.fields(it)).name
    old = getattr(it, field)
    other = getattr(workers[chance.randrange(len(workers))][chance.randrange(index + 1)], field)
    new = chance.choice((old + 1, old - 1, 0, NONE, other))
    everywhere = chance.random() < 0.4
    for number, instructions in enumerate(workers):
        if number == worker or (everywhere and index < len(instructions)):
            instructions[index] = dataclasses.replace(instructions[index], **{field: new})


def _change_counter(program: Program, workers: Lists, chance: random.Random) -> None:
    """Replace a counter to wait for or to signal, maybe by none."""
    worker, index = _place(workers, chance)
    it = workers[worker][index]
    which = NONE if chance.random() < 0.5 else chance.randrange(num_counters(program.sizes))
    field = "wait" if it.wait != NONE and chance.random() < 0.7 else "signal"
    workers[worker][index] = dataclasses.replace(it, **{field: which})


def _drop_wait(program: Program, workers: Lists, chance: random.Random) -> None:
    """One wait less, for a worker or for all."""
    del program
    worker, index = _place(workers, chance)
    everywhere = chance.random() < 0.5
    for number, instructions in enumerate(workers):
        if (number == worker or everywhere) and index < len(instructions):
            it = dataclasses.replace(instructions[index], wait=NONE, wait_count=0, wait_stride=0)
            instructions[index] = it


def _weaken_wait(program: Program, workers: Lists, chance: random.Random) -> None:
    """Fewer signals, or more."""
    del program
    worker, index = _place(workers, chance)
    it = workers[worker][index]
    count = it.wait_count + chance.choice((-2, -1, 1, it.wait_stride))
    stride = it.wait_stride if chance.random() < 0.7 else it.wait_stride + chance.choice((-1, 1))
    workers[worker][index] = dataclasses.replace(it, wait_count=count, wait_stride=stride)


def _swap(program: Program, workers: Lists, chance: random.Random) -> None:
    """Two neighbours in another order, for a worker or for all."""
    del program
    worker, index = _place(workers, chance)
    everywhere = chance.random() < 0.5
    for number, instructions in enumerate(workers):
        if (number == worker or everywhere) and index + 1 < len(instructions):
            pair = instructions[index : index + 2]
            instructions[index : index + 2] = pair[::-1]


def _swap_apart(program: Program, workers: Lists, chance: random.Random) -> None:
    """Two instructions of a worker in each other's place, or two workers' of the same place."""
    del program
    worker, index = _place(workers, chance)
    other = chance.randrange(len(workers)) if chance.random() < 0.5 else worker
    to = min(index, len(workers[other]) - 1) if other != worker else _place(workers, chance)[1]
    to = min(to, len(workers[other]) - 1)
    one, two = workers[worker][index], workers[other][to]
    workers[worker][index], workers[other][to] = two, one


def _drop(program: Program, workers: Lists, chance: random.Random) -> None:
    """One instruction less for all workers, so that the lists stay as long as each other."""
    del program
    _, index = _place(workers, chance)
    for instructions in workers:
        del instructions[index]


def _repeat(program: Program, workers: Lists, chance: random.Random) -> None:
    """Repeat an instruction, for all workers."""
    del program
    _, index = _place(workers, chance)
    for instructions in workers:
        instructions.insert(index, instructions[index])


_CHANGES: tuple[Callable[[Program, Lists, random.Random], None], ...] = (
    _change_field,
    _change_field,
    _change_counter,
    _drop_wait,
    _weaken_wait,
    _swap,
    _swap_apart,
    _drop,
    _repeat,
)


def _place(workers: Lists, chance: random.Random) -> tuple[int, int]:
    worker = chance.randrange(len(workers))
    return worker, chance.randrange(len(workers[worker]))


def _numbered(instructions: list[Instruction]) -> list[Instruction]:
    numbered, stage = [], 0
    for it in instructions:
        at = stage if it.num_stages else 0
        numbered.append(it if it.stage == at else dataclasses.replace(it, stage=at))
        stage += it.num_stages
    return numbered


# ---------------------------------------------------------------- soak
# Mutated programs against the simulator: `python -m tests.megakernel_model.soak`.

STEPS = 2
TOKENS = [3, 5]
RULES = (GREEDY, Rule(temperature=0.8, top_p=0.9, top_k=20, seed=7))
VALUES = ValueDims(inner_dim=64, scalar_bins=32, pair_bins=96)
SIZES = (
    ModelSizes(64, 2, 2, 128),
    ModelSizes(64, 3, 1, 80),
    ModelSizes(128, 2, 1, 160),
    ModelSizes(64, 2, 2, 80, VALUES),
    ModelSizes(128, 2, 1, 160, ValueDims(96, 64, 64)),
)
SMALLEST = ModelSizes(64, 2, 1, 64)
"""Four workers with twelve instructions each: a mutant of it is validated in milliseconds."""
SMALLEST_VALUES = ModelSizes(64, 2, 1, 64, VALUES)
SMALLEST_DRAFTS = ModelSizes(64, 2, 1, 64, drafts=True)
SMALLEST_BOTH = ModelSizes(64, 2, 1, 64, VALUES, drafts=True)
RING_STAGES = 4
MOST_DRAFTS = 2


@dataclasses.dataclass
class Tally:
    """Counts of mutants by outcome."""

    mutants: int = 0
    accepted: int = 0  # of those that differ from each other and from the program
    same: int = 0  # those that are no change at all
    simulations: int = 0
    tried: set[Program] = dataclasses.field(default_factory=set, repr=False)


class World:
    """A small model, its program, and what that has to give."""

    def __init__(self, sizes: ModelSizes) -> None:
        rng = np.random.default_rng(1)
        self.weights = Weights.random(sizes, rng)
        self.cache = Cache.random(sizes, 40, len(TOKENS), rng)
        self.program = build_program(sizes, RING_STAGES)
        self.expected = forward(self.weights, self.cache, TOKENS, STEPS, RULES)

    def simulate(self, program: Program, seed: int, *, stops: bool = False) -> Outcome:
        """Run the program in a random order."""
        given = self.weights, self.cache, TOKENS, STEPS, random.Random(seed)
        return simulate(program, *given, rules=RULES, stops=stops)

    def agrees(self, outcome: Outcome) -> bool:
        return agree(outcome, self.expected)

    def fault(self, program: Program, orders: int, seed: int) -> str | None:
        """Return what goes wrong in one of several orders."""
        for order in range(orders):
            try:
                outcome = self.simulate(program, seed * 1000 + order)
            except Stuck as stuck:
                return str(stuck)
            if not self.agrees(outcome):
                return f"order {order}: tokens {outcome.tokens} of {self.expected.tokens}"
        return None


class DraftingWorld(World):
    """Rows of words whose drafts are right up to a place that depends on row and length."""

    length = 6

    def __init__(self, sizes: ModelSizes, rates: float = 0.6) -> None:
        super().__init__(dataclasses.replace(sizes, drafts=False))
        self.program = build_program(dataclasses.replace(sizes, drafts=True), RING_STAGES)
        self.expected = forward(self.weights, self.cache, TOKENS, self.length + MOST_DRAFTS, RULES)
        self._answers = list(zip(*self.expected.tokens, strict=True))
        self._rates = rates

    def _propose(self, row: int, history: Sequence[int]) -> list[int]:
        chance = random.Random(f"{row} {len(history)} {self._rates}")
        right = self._words(self._answers[row][len(history) - 1 :][:MOST_DRAFTS])
        wrong = [(token + 1) % self.program.sizes.vocab_size for token in right]
        count = chance.randint(0, MOST_DRAFTS)
        pairs = zip(right[:count], wrong[:count], strict=True)
        return [pair[chance.random() > self._rates] for pair in pairs]

    def _words(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens before the first one with values."""
        read = self.weights.values
        valued = () if read is None else [kind.token for kind in read.kinds]
        return list(itertools.takewhile(lambda token: token not in valued, tokens))

    def simulate(self, program: Program, seed: int, *, stops: bool = False) -> Outcome:
        drafts = Drafts(self._propose, MOST_DRAFTS, self.length)
        given = self.weights, self.cache, TOKENS, self.length, random.Random(seed)
        return simulate(program, *given, rules=RULES, drafts=drafts, stops=stops)

    def agrees(self, outcome: Outcome) -> bool:
        """Return whether accepted tokens, values and residual streams are those of single tokens.

        The launch has to end when a row has all of its own, unless the host ends it.
        """
        had = [0] * len(TOKENS)
        for step, rows in enumerate(outcome.accepted):
            first = 0
            for row, tokens in enumerate(rows):
                begin, count = had[row], len(tokens)
                if tokens != list(self._answers[row][begin : begin + count]):
                    return False
                got = outcome.trace[step][:, first : first + count]
                want = self.expected.trace[begin : begin + count, :, row].swapaxes(0, 1)
                if not np.allclose(got, want, rtol=0, atol=1e-9):
                    return False
                if outcome.values:
                    read = outcome.values[step][first : first + count]
                    expected = [each[row] for each in self.expected.values[begin:][:count]]
                    if not np.allclose(read, expected, rtol=0, atol=1e-9):
                        return False
                history = [TOKENS[row], *self._answers[row][:begin]]
                first += 1 + len(self._propose(row, history)[:MOST_DRAFTS])
                had[row] += count
        return True

    def whole(self, outcome: Outcome) -> bool:
        """Nothing but a row's last token has ended it."""
        counts = [sum(len(rows[row]) for rows in outcome.accepted) for row in range(len(TOKENS))]
        last = [len(rows) for rows in outcome.accepted[-1]]
        before = max(map(int.__sub__, counts, last))
        return max(counts) >= self.length > before


def agree(outcome: Outcome, expected: Outcome) -> bool:
    """Return whether tokens are the same, and numbers but for float64 rounding."""
    pairs = (
        (outcome.trace, expected.trace),
        (outcome.best, expected.best),
        (np.array(outcome.values), np.array(expected.values)),
    )
    return outcome.tokens == expected.tokens and all(
        np.allclose(got, want, rtol=0, atol=1e-9) for got, want in pairs
    )


def try_mutants(worlds: list[World], seeds: range, orders: int, tally: Tally) -> None:
    """Validate a mutant for each seed, and simulate it where it is accepted; the same one once.

    Raises:
        AssertionError: an accepted mutant gives something else in some order.
    """
    for seed in seeds:
        chance = random.Random(seed)
        world = worlds[seed % len(worlds)]
        mutant = mutate(world.program, chance)
        tally.mutants += 1
        tally.same += mutant == world.program
        if mutant in tally.tried or mutant == world.program:
            continue
        tally.tried.add(mutant)
        try:
            validate(mutant, STEPS)
        except InvalidProgram:
            continue
        tally.accepted += 1
        tally.simulations += orders
        fault = world.fault(mutant, orders, seed)
        assert fault is None, f"mutant {seed} is accepted, but {fault}"


def main() -> None:
    """Try many mutants, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=20000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--orders", type=int, default=20)
    options = parser.parse_args()
    begin, tally = time.monotonic(), Tally()
    worlds = [World(sizes) for sizes in SIZES]
    seeds = range(options.first, options.first + options.mutants)
    try_mutants(worlds, seeds, options.orders, tally)
    print(f"{tally}, {time.monotonic() - begin:.0f} s")  # noqa: T201 - the soak's result


if __name__ == "__main__":
    main()
