"""A program run on the CPU with real numbers, its workers in any order that the counters allow.

The simulator is the kernel's specification: it does what an instruction does, from the same fields.
Memory begins as NaN. Between its wait, its reads, its writes and its signal a worker may be held up
by any number of others' instructions, and copies of keys and values are made at any time at which
the ring allows them. So may the host, which may wish for the end at any time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from legato_engine.resident.draft_simulator import Drafts, one_each
from legato_engine.resident.instructions import NONE, Instruction, Op
from legato_engine.resident.layer_simulator import LayerWork
from legato_engine.resident.maps import Floats
from legato_engine.resident.order import Stuck
from legato_engine.resident.program import Program
from legato_engine.resident.ring import RunAhead
from legato_engine.resident.simulator_state import Memory, Worker, Write, own_head
from legato_engine.resident.sizes import BLOCK
from legato_engine.resident.token_simulator import TokenWork
from legato_engine.resident.value_simulator import ValueWork
from legato_engine.resident.values import PLAIN
from legato_engine.resident.weights import GREEDY, Cache, Outcome, Rule, Weights


def simulate(
    program: Program,
    weights: Weights,
    cache: Cache,
    tokens: list[int],
    steps: int,
    chance: random.Random,
    *,
    rules: Sequence[Rule] = (),
    drafts: Drafts | None = None,
    stops: bool = False,
) -> Outcome:
    """Run at most `steps` steps in one random order; rows without a rule are greedy.

    With `stops` the host wishes for the end at some time, so that there may be fewer. With `drafts`
    rows feed draft tokens too, and an outcome's arrays are of a step's tokens.

    Raises:
        Stuck: no worker can go on, or workers go on for different numbers of steps.
    """
    assert program.sizes.drafts == (drafts is not None), "drafts are of their own program"
    simulation = _Simulation(program, weights, cache, tokens, steps, chance, rules, drafts)
    return simulation.run(stops=stops)


class _Simulation:
    def __init__(
        self,
        program: Program,
        weights: Weights,
        cache: Cache,
        tokens: list[int],
        steps: int,
        chance: random.Random,
        rules: Sequence[Rule],
        drafts: Drafts | None,
    ) -> None:
        self._program, self._sizes = program, program.sizes
        self._steps, self._chance = steps, chance
        rows = len(tokens)
        self._memory = Memory(program, tokens, steps, drafts)
        settled = self._memory.drafts
        plain = [PLAIN] * rows
        placed = one_each(tokens, plain, 0) if settled is None else settled.placed
        self._workers = [
            Worker(
                number,
                placed,
                np.full((len(placed), self._sizes.dim), np.nan),
                np.full((len(placed), BLOCK), np.nan),
                {},
            )
            for number in range(self._sizes.num_workers)
        ]
        shared = self._sizes, weights, self._memory, chance
        layer = LayerWork(*shared, cache)
        all_rules = [*rules, *[GREEDY] * (rows - len(rules))]
        self._draws = any(rule.temperature > 0.0 for rule in all_rules)
        token = TokenWork(*shared, length=cache.length, steps=steps, rules=all_rules)
        self._run: dict[int, Callable[[Worker, Instruction, int, int], Write]] = {
            Op.FC1: layer.fc1,
            Op.QKV: layer.qkv,
            Op.FC2: layer.fc2,
            Op.ATTEND: layer.attend,
            Op.MERGE: layer.merge,
            Op.OUT: layer.out,
            Op.LISTEN: token.listen,
            Op.HEAD: token.head,
            Op.WEIGH: token.weigh,
            Op.SAMPLE: token.sample,
            Op.COMMIT: token.commit,
            Op.EMBED: token.embed,
            Op.SETTLE: token.settle,
            Op.PLACE: token.place,
        }
        if self._memory.values is not None and weights.values is not None:
            value = ValueWork(self._sizes, weights.values, self._memory.values)
            self._run[Op.INNER] = lambda worker, it, *_: value.inner(
                worker.number,
                it,
                self._memory.token[: len(worker.placed)],
                layer.source(worker, it),
            )
            self._run[Op.BINS] = lambda worker, it, *_: value.bins(worker.number, it)
            self._run[Op.VALUE] = lambda worker, it, *_: value.read(
                worker.number, it, self._memory.logits
            )

    def run(self, *, stops: bool) -> Outcome:
        threads = [self._thread(worker) for worker in self._workers]
        waits: list[tuple[int, int] | None] = [None] * len(threads)
        alive = list(range(len(threads)))
        self._chance.shuffle(alive)  # those in front go first, mostly
        order = self._chance.random()
        counters = self._memory.counters
        wishes_in = self._chance.randint(0, 400 * len(threads)) if stops else -1
        while alive:
            wishes_in -= 1
            if wishes_in == 0:
                self._memory.wish = True
            ready = [
                each
                for each in alive
                if (wait := waits[each]) is None or counters[wait[0]] >= wait[1]
            ]
            if not ready:
                raise Stuck(f"workers {sorted(alive)} wait for {[waits[each] for each in alive]}")
            number = ready[0] if self._chance.random() < order else self._chance.choice(ready)
            for _ in range(self._chance.choice((1, 1, 2, 5, 40))):
                try:
                    waits[number] = wait = next(threads[number])
                except StopIteration:
                    alive.remove(number)
                    break
                if wait is not None and counters[wait[0]] < wait[1]:
                    break
        memory = self._memory
        steps = len(memory.published)
        told = [] if memory.values is None else memory.values.told
        accepted = [] if memory.drafts is None else memory.drafts.told
        best = memory.best_logits[:steps]
        return Outcome(memory.published, memory.trace[:steps], best, told, accepted)

    def _thread(self, worker: Worker) -> Iterator[tuple[int, int] | None]:
        """Yields where it may be held up: the counter and the value that it waits for, or None."""
        instructions = self._program.workers[worker.number]
        copies = self._plan_copies(worker)
        for step in range(self._steps):
            for index, it in enumerate(instructions):
                if it.wait != NONE and (self._draws or not it.only_draws):
                    yield it.wait, it.wait_count + step * it.wait_stride
                event = step * len(instructions) + index
                for taker in copies.get(event, ()):
                    worker.copies[taker] = self._copy(worker, taker)
                if self._chance.random() < 0.5:
                    yield None
                write = self._run[it.op](worker, it, step, event)
                if self._chance.random() < 0.5:
                    yield None
                write()
                yield None
                if it.signal != NONE:
                    self._memory.counters[it.signal] += 1
            if worker.ended:
                return

    def _plan_copies(self, worker: Worker) -> dict[int, list[int]]:
        """At the beginning of which events which attention's copies are made."""
        ahead = RunAhead(self._program, worker.number)
        length = len(self._program.workers[worker.number])
        early = self._chance.random()
        plan: dict[int, list[int]] = {}
        for step in range(1, self._steps):
            for index, it in enumerate(self._program.workers[worker.number]):
                if it.op == Op.ATTEND:
                    event = step * length + index
                    first = ahead.begin(event)
                    at = first if self._chance.random() < early else None
                    plan.setdefault(
                        self._chance.randint(first, event) if at is None else at, []
                    ).append(event)
        return plan

    def _copy(self, worker: Worker, event: int) -> Floats:
        """Keys and values [2, P, rows, E] of the worker's head, at all positions of the launch."""
        instructions = self._program.workers[worker.number]
        index = event % len(instructions)
        head = slice(*own_head(worker))
        return self._memory.kv[:, instructions[index].layer, :, :, head].copy()
