"""A program run on the CPU with real numbers, its workers in any order that the counters allow.

The simulator is the kernel's specification: it does what an instruction does, from the same fields.
Memory begins as NaN. Between its wait, its reads, its writes and its signal a worker may be held up
by any number of others' instructions, and copies of keys and values are made at any time at which
the ring allows them. So may the host, which may wish for the end at any time.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from legato_engine.resident.maps import Floats, Map, gelu
from legato_engine.resident.order import Stuck
from legato_engine.resident.program import NONE, Instruction, Op, Program, Source
from legato_engine.resident.ring import RunAhead
from legato_engine.resident.sizes import BLOCK, HEAD_DIM, PAGE, SPLITS
from legato_engine.resident.stream import MATRICES, Matrix, qkv_rows
from legato_engine.resident.value_simulator import ValueMemory, ValueWork
from legato_engine.resident.values import PLAIN
from legato_engine.resident.weights import (
    EPSILON,
    GREEDY,
    Cache,
    Outcome,
    Rule,
    Weights,
    angles,
    draw,
)

_Write = Callable[[], None]
"""What is left to do of an instruction that has read and computed."""


def simulate(
    program: Program,
    weights: Weights,
    cache: Cache,
    tokens: list[int],
    steps: int,
    chance: random.Random,
    *,
    rules: Sequence[Rule] = (),
    stops: bool = False,
) -> Outcome:
    """Run at most `steps` steps in one random order; rows without a rule are greedy.

    With `stops` the host wishes for the end at some time, so that there may be fewer.

    Raises:
        Stuck: no worker can go on, or workers go on for different numbers of steps.
    """
    simulation = _Simulation(program, weights, cache, tokens, steps, chance, rules)
    return simulation.run(stops=stops)


class _Memory:
    """What workers share; B rows."""

    def __init__(self, program: Program, rows: int, steps: int) -> None:
        sizes = program.sizes
        nan, num = np.nan, sizes.num_workers
        self.counters = [0] * program.num_counters
        self.x = np.full((2, rows, sizes.dim), nan)
        self.act = np.full((rows, sizes.ff_dim), nan)
        self.q = np.full((rows, sizes.dim), nan)
        self.part = np.full((rows, num, HEAD_DIM), nan)
        self.ends = np.full((rows, num, 2), nan)
        self.best = np.full((num, rows), nan)
        self.best_id = np.zeros((num, rows), np.int64)
        self.kv = np.full((2, sizes.num_layers, steps, rows, sizes.dim), nan)
        self.trace = np.full((steps, sizes.num_layers, rows, sizes.dim), nan)
        self.logits = np.full((rows, sizes.vocab_size), nan)
        self.token = [-1] * rows
        self.stop: bool | None = None
        self.wish = False  # the host's
        self.published: list[list[int]] = []
        self.best_logits = np.full((steps, rows), nan)
        self.values = None if sizes.values is None else ValueMemory(sizes.values, rows)


@dataclasses.dataclass(slots=True)
class _Worker:
    """What a worker holds itself."""

    number: int
    token: list[int]
    held: Floats
    sums: Floats
    copies: dict[int, Floats]  # keys and values of earlier steps, by the event that takes them
    payload: list[tuple[float, ...]]  # of its token
    ended: bool = False


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
    ) -> None:
        self._program, self._sizes = program, program.sizes
        self._rules = [*rules, *[GREEDY] * (len(tokens) - len(rules))]
        self._weights, self._cache, self._steps = weights, cache, steps
        self._chance = chance
        rows = len(tokens)
        self._memory = _Memory(program, rows, steps)
        self._workers = [
            _Worker(
                number,
                list(tokens),
                np.full((rows, self._sizes.dim), np.nan),
                np.full((rows, BLOCK), np.nan),
                {},
                [PLAIN] * rows,
            )
            for number in range(self._sizes.num_workers)
        ]
        self._run: dict[int, Callable[[_Worker, Instruction, int, int], _Write]] = {
            Op.NORM: self._norm,
            Op.FC1: self._fc1,
            Op.QKV: self._qkv,
            Op.FC2: self._fc2,
            Op.ATTEND: self._attend,
            Op.OUT: self._out,
            Op.LISTEN: self._listen,
            Op.HEAD: self._head,
            Op.SAMPLE: self._sample,
            Op.COMMIT: self._commit,
            Op.EMBED: self._embed,
        }
        if self._memory.values is not None and weights.values is not None:
            value = ValueWork(self._sizes, weights.values, self._memory.values, rows)
            self._run[Op.INNER] = lambda worker, it, *_: value.inner(
                worker.number, it, self._memory.token, self._source(worker, it)
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
        return Outcome(memory.published, memory.trace[:steps], memory.best_logits[:steps], told)

    def _thread(self, worker: _Worker) -> Iterator[tuple[int, int] | None]:
        """Yields where it may be held up: the counter and the value that it waits for, or None."""
        instructions = self._program.workers[worker.number]
        copies = self._plan_copies(worker)
        for step in range(self._steps):
            for index, it in enumerate(instructions):
                if it.wait != NONE:
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

    def _plan_copies(self, worker: _Worker) -> dict[int, list[int]]:
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

    def _copy(self, worker: _Worker, event: int) -> Floats:
        """Keys and values [2, earlier steps, B, E] of the worker's head."""
        instructions = self._program.workers[worker.number]
        step, index = divmod(event, len(instructions))
        head = slice(*_head(worker))
        return self._memory.kv[:, instructions[index].layer, :step, :, head].copy()

    def _norm(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        worker.held = self._source(worker, it).copy()
        return _nothing

    def _fc1(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        rows = self._block_rows(it)
        act = gelu(self._project(worker, it, rows))

        def write() -> None:
            self._memory.act[:, rows] = act

        return write

    def _qkv(self, worker: _Worker, it: Instruction, step: int, _event: int) -> _Write:
        num = self._sizes.num_workers
        rows = [row for i in range(3) for row in qkv_rows(it.block + i * num)]
        q, k, v = np.split(self._project(worker, it, rows), 3, axis=1)
        dims = rows[:BLOCK]
        first = dims[0] % HEAD_DIM
        if first < 32:
            cosine, sine = (each[first : first + 8] for each in angles(self._cache.length + step))
            q, k = (_turn(each, cosine, sine) for each in (q, k))

        def write() -> None:
            self._memory.q[:, dims] = q
            self._memory.kv[0, it.layer, step][:, dims] = k
            self._memory.kv[1, it.layer, step][:, dims] = v

        return write

    def _fc2(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        chunk = self._sizes.chunk
        inputs = slice(it.chunk * chunk, (it.chunk + it.num_chunks) * chunk)
        weight = self._map(it).weight[self._block_rows(it), inputs]
        sums = self._memory.act[:, inputs] @ weight.T
        worker.sums = sums if it.chunk == 0 else worker.sums + sums
        return _nothing

    def _attend(self, worker: _Worker, it: Instruction, step: int, event: int) -> _Write:
        """The worker's quarter of every row's pages; of this step's position what QKV wrote."""
        memory, length = self._memory, self._cache.length
        quarter, head = worker.number % SPLITS, worker.number // SPLITS
        span = slice(*_head(worker))
        earlier = worker.copies.pop(event, None)
        fresh = memory.kv[:, it.layer, step : step + 1, :, span]
        cached = np.stack(
            [each[it.layer, :, :, head] for each in (self._cache.keys, self._cache.values)]
        )
        parts = [cached, fresh] if earlier is None else [cached, earlier, fresh]
        both = np.concatenate(parts, axis=1)
        own = [p for p in range(length + step + 1) if p // PAGE % SPLITS == quarter]
        keys, values = both[:, own]
        scores = np.einsum("be,pbe->bp", memory.q[:, span], keys) / HEAD_DIM**0.5
        top = scores.max(-1, initial=-np.inf)
        shares = np.exp(scores - np.where(np.isinf(top), 0.0, top)[:, None])
        out = np.einsum("bp,pbe->be", shares, values)
        ends = np.stack([top, shares.sum(-1)], axis=-1)

        def write() -> None:
            memory.part[:, worker.number] = out
            memory.ends[:, worker.number] = ends

        return write

    def _out(self, worker: _Worker, it: Instruction, step: int, _event: int) -> _Write:
        memory, rows = self._memory, self._block_rows(it)
        shape = (len(worker.token), -1, SPLITS)
        top, total = np.moveaxis(memory.ends.reshape(*shape, 2), -1, 0)
        shares = np.exp(top - top.max(-1, keepdims=True))
        merged = (shares[..., None] * memory.part.reshape(*shape, HEAD_DIM)).sum(2)
        heads = (merged / (shares * total).sum(-1)[..., None]).reshape(len(worker.token), -1)
        layer = self._weights.layers[it.layer].maps
        proj = layer[Matrix.PROJ]
        bias = proj.bias[rows] + layer[Matrix.FC2].bias[rows]
        x = self._source(worker, it)[:, rows] + worker.sums + heads @ proj.weight[rows].T + bias

        def write() -> None:
            memory.x[it.dst][:, rows] = x
            memory.trace[step, it.layer][:, rows] = x

        return write

    def _head(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        rows = np.array(self._block_rows(it))
        logits = self._project(worker, it, rows.tolist())
        best = logits.argmax(-1)

        def write() -> None:
            self._memory.logits[:, rows] = logits
            self._memory.best[worker.number] = np.take_along_axis(logits, best[:, None], 1)[:, 0]
            self._memory.best_id[worker.number] = rows[best]

        return write

    def _listen(self, _worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        memory = self._memory

        def write() -> None:
            if it.num_blocks:
                memory.stop = memory.wish

        return write

    def _sample(self, worker: _Worker, it: Instruction, step: int, _event: int) -> _Write:
        memory, num = self._memory, self._sizes.num_workers
        rows = range(it.block, it.block + it.num_blocks * num, num)
        chosen = {row: self._choose(row, step) for row in rows if row < len(worker.token)}

        def write() -> None:
            for row, (token, logit) in chosen.items():
                memory.token[row] = token
                memory.best_logits[step, row] = logit

        return write

    def _choose(self, row: int, step: int) -> tuple[int, float]:
        memory, rule = self._memory, self._rules[row]
        logit, token = max(zip(memory.best[:, row], -memory.best_id[:, row], strict=True))
        if rule.temperature == 0.0:
            return -int(token), logit
        return draw(memory.logits[row], rule, self._cache.length + step + 1), logit

    def _commit(self, worker: _Worker, _it: Instruction, step: int, _event: int) -> _Write:
        memory = self._memory
        worker.token = list(memory.token)
        if memory.values is not None:
            worker.payload = list(memory.values.value)
        worker.ended = bool(memory.stop) or step + 1 == self._steps

        def write() -> None:
            if worker.number == 0:
                memory.published.append(list(worker.token))
                if memory.values is not None:
                    memory.values.told.append(worker.payload)

        return write

    def _embed(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        """The worker's own outputs; tokens and values are what it has committed."""
        rows, words, read = self._block_rows(it), self._weights.embedding, self._weights.values
        assert read is not None, "an instruction of models with values"
        tokens = zip(worker.token, worker.payload, strict=True)
        x = np.stack([read.embed(words, *token)[rows] for token in tokens])

        def write() -> None:
            self._memory.x[it.dst][:, rows] = x

        return write

    def _source(self, worker: _Worker, it: Instruction) -> Floats:
        """The residual stream [B, D] that an instruction reads."""
        if it.src == Source.EMBED:
            embedded: Floats = self._weights.embedding[worker.token]
            return embedded
        stream: Floats = self._memory.x[it.src]
        return stream

    def _project(self, worker: _Worker, it: Instruction, rows: list[int]) -> Floats:
        """Rows of a map of the norm, whose scale is in the weights: as the device computes it."""
        layer, whole = self._weights.layers[it.layer], self._map(it)
        # Kept by the worker since its norm, or read again.
        x = worker.held if self._chance.random() < 0.5 else self._source(worker, it)
        weight = whole.weight[rows]
        scaled = weight * layer.norm[0]
        mean = worker.held.mean(-1, keepdims=True)
        squares = (worker.held**2).mean(-1, keepdims=True)
        deviation = np.sqrt(squares - mean * mean + EPSILON)
        bias = weight @ layer.norm[1] + whole.bias[rows]
        out: Floats = (x @ scaled.T - mean * scaled.sum(-1)) / deviation + bias
        return out

    def _map(self, it: Instruction) -> Map:
        return self._weights.layers[it.layer].maps[MATRICES[Op(it.op)]]

    def _block_rows(self, it: Instruction) -> list[int]:
        num = self._sizes.num_workers
        firsts = ((it.block + i * num) * BLOCK for i in range(it.num_blocks))
        return [row for first in firsts for row in range(first, first + BLOCK)]


def _head(worker: _Worker) -> tuple[int, int]:
    first = worker.number // SPLITS * HEAD_DIM
    return first, first + HEAD_DIM


def _turn(x: Floats, cosine: Floats, sine: Floats) -> Floats:
    low, high = x[:, :8], x[:, 8:]
    return np.concatenate([low * cosine - high * sine, low * sine + high * cosine], axis=1)


def _nothing() -> None:
    """What an instruction leaves that writes only what its worker holds."""
