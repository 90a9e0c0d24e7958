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

from legato_engine.resident.draft_simulator import DraftMemory, Drafts, Placed, one_each
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


class _Memory:
    """What workers share; B tokens of a step, which are rows without drafts."""

    def __init__(
        self, program: Program, tokens: list[int], steps: int, drafts: Drafts | None
    ) -> None:
        sizes, most = program.sizes, 1 + (0 if drafts is None else drafts.most)
        rows = len(tokens) * most
        nan, num = np.nan, sizes.num_workers
        self.counters = [0] * program.num_counters
        self.x = np.full((2, rows, sizes.dim), nan)
        self.act = np.full((rows, sizes.ff_dim), nan)
        self.q = np.full((rows, sizes.dim), nan)
        self.part = np.full((rows, num, HEAD_DIM), nan)
        self.ends = np.full((rows, num, 2), nan)
        self.heads = np.full((rows, sizes.dim), nan)
        self.best = np.full((num, rows), nan)
        self.best_id = np.zeros((num, rows), np.int64)
        positions = steps * most
        self.kv = np.full((2, sizes.num_layers, positions, len(tokens), sizes.dim), nan)
        self.trace = np.full((steps, sizes.num_layers, rows, sizes.dim), nan)
        self.logits = np.full((rows, sizes.vocab_size), nan)
        self.token = [-1] * rows
        self.stop: bool | None = None
        self.wish = False  # the host's
        self.published: list[list[int]] = []
        self.best_logits = np.full((steps, rows), nan)
        self.values = None if sizes.values is None else ValueMemory(sizes.values, rows)
        self.drafts = None if drafts is None else DraftMemory(drafts, tokens)


@dataclasses.dataclass(slots=True)
class _Worker:
    """What a worker holds itself."""

    number: int
    placed: list[Placed]
    held: Floats
    sums: Floats
    copies: dict[int, Floats]  # keys and values of earlier steps, by the event that takes them
    payload: list[tuple[float, ...]]  # of its token
    ended: bool = False

    @property
    def token(self) -> list[int]:
        return [each.token for each in self.placed]


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
        self._rules = [*rules, *[GREEDY] * (len(tokens) - len(rules))]
        self._weights, self._cache, self._steps = weights, cache, steps
        self._chance = chance
        rows = len(tokens)
        self._memory = _Memory(program, tokens, steps, drafts)
        settled = self._memory.drafts
        placed = one_each(tokens, 0) if settled is None else settled.placed
        self._workers = [
            _Worker(
                number,
                placed,
                np.full((len(placed), self._sizes.dim), np.nan),
                np.full((len(placed), BLOCK), np.nan),
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
            Op.MERGE: self._merge,
            Op.OUT: self._out,
            Op.LISTEN: self._listen,
            Op.HEAD: self._head,
            Op.SAMPLE: self._sample,
            Op.COMMIT: self._commit,
            Op.EMBED: self._embed,
            Op.SETTLE: self._settle,
            Op.PLACE: self._place,
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
        accepted = [] if memory.drafts is None else memory.drafts.told
        best = memory.best_logits[:steps]
        return Outcome(memory.published, memory.trace[:steps], best, told, accepted)

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
        """Keys and values [2, P, rows, E] of the worker's head, at all positions of the launch."""
        instructions = self._program.workers[worker.number]
        index = event % len(instructions)
        head = slice(*_head(worker))
        return self._memory.kv[:, instructions[index].layer, :, :, head].copy()

    def _norm(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        worker.held = self._source(worker, it).copy()
        return _nothing

    def _fc1(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        rows = self._block_rows(it)
        act = gelu(self._project(worker, it, rows))

        def write() -> None:
            self._memory.act[: len(act), rows] = act

        return write

    def _qkv(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        num = self._sizes.num_workers
        rows = [row for i in range(3) for row in qkv_rows(it.block + i * num)]
        q, k, v = np.split(self._project(worker, it, rows), 3, axis=1)
        dims = rows[:BLOCK]
        first = dims[0] % HEAD_DIM
        if first < 32:
            turns = [angles(self._cache.length + each.position) for each in worker.placed]
            cosine, sine = (
                np.stack(each)[:, first : first + 8] for each in zip(*turns, strict=True)
            )
            q, k = (_turn(each, cosine, sine) for each in (q, k))
        placed = worker.placed

        def write() -> None:
            self._memory.q[: len(q), dims] = q
            for index, each in enumerate(placed):
                self._memory.kv[0, it.layer, each.position, each.row, dims] = k[index]
                self._memory.kv[1, it.layer, each.position, each.row, dims] = v[index]

        return write

    def _fc2(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        chunk = self._sizes.chunk
        inputs = slice(it.chunk * chunk, (it.chunk + it.num_chunks) * chunk)
        weight = self._map(it).weight[self._block_rows(it), inputs]
        sums = self._memory.act[: len(worker.placed), inputs] @ weight.T
        worker.sums = sums if it.chunk == 0 else worker.sums + sums
        return _nothing

    def _attend(self, worker: _Worker, it: Instruction, _step: int, event: int) -> _Write:
        """The worker's quarter of every token's pages; of its row's positions of this step what QKV
        wrote.
        """
        memory, count = self._memory, len(worker.placed)
        earlier = worker.copies.pop(event, None)
        parts = [self._part(worker, it, index, earlier) for index in range(count)]

        def write() -> None:
            for index, (out, ends) in enumerate(parts):
                memory.part[index, worker.number] = out
                memory.ends[index, worker.number] = ends

        return write

    def _part(
        self, worker: _Worker, it: Instruction, index: int, earlier: Floats | None
    ) -> tuple[Floats, tuple[float, float]]:
        """A token's softmax over a quarter of its positions."""
        memory, length, at = self._memory, self._cache.length, worker.placed[index]
        quarter, head = worker.number % SPLITS, worker.number // SPLITS
        span = slice(*_head(worker))
        fresh = memory.kv[:, it.layer, at.first : at.position + 1, at.row, span]
        cached = np.stack(
            [each[it.layer, :, at.row, head] for each in (self._cache.keys, self._cache.values)]
        )
        copied = [] if earlier is None else [earlier[:, : at.first, at.row]]
        both = np.concatenate([cached, *copied, fresh], axis=1)
        own = [p for p in range(length + at.position + 1) if p // PAGE % SPLITS == quarter]
        keys, values = both[:, own]
        scores = keys @ memory.q[index, span] / HEAD_DIM**0.5
        top = scores.max(initial=-np.inf)
        shares = np.exp(scores - (0.0 if np.isinf(top) else top))
        return shares @ values, (top, float(shares.sum()))

    def _merge(self, worker: _Worker, _it: Instruction, _step: int, _event: int) -> _Write:
        """Every fourth token's head, of its quarters."""
        memory = self._memory
        own = range(worker.number % SPLITS, len(worker.placed), SPLITS)
        first = worker.number // SPLITS * SPLITS
        quarters = slice(first, first + SPLITS)
        top, total = np.moveaxis(memory.ends[own, quarters], -1, 0)
        shares = np.exp(top - top.max(-1, keepdims=True))
        merged = (shares[..., None] * memory.part[own, quarters]).sum(1)
        heads = merged / (shares * total).sum(-1)[:, None]

        def write() -> None:
            memory.heads[own, slice(*_head(worker))] = heads

        return write

    def _out(self, worker: _Worker, it: Instruction, step: int, _event: int) -> _Write:
        memory, rows = self._memory, self._block_rows(it)
        count = len(worker.placed)
        heads = memory.heads[:count]
        layer = self._weights.layers[it.layer].maps
        proj = layer[Matrix.PROJ]
        bias = proj.bias[rows] + layer[Matrix.FC2].bias[rows]
        x = self._source(worker, it)[:, rows] + worker.sums + heads @ proj.weight[rows].T + bias

        def write() -> None:
            memory.x[it.dst][:count, rows] = x
            memory.trace[step, it.layer][:count, rows] = x

        return write

    def _head(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        rows = np.array(self._block_rows(it))
        logits = self._project(worker, it, rows.tolist())
        best = logits.argmax(-1)

        def write() -> None:
            count, highest = len(logits), np.take_along_axis(logits, best[:, None], 1)[:, 0]
            self._memory.logits[:count, rows] = logits
            self._memory.best[worker.number, :count] = highest
            self._memory.best_id[worker.number, :count] = rows[best]

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
        placed = worker.placed
        chosen = {row: self._choose(row, placed[row]) for row in rows if row < len(placed)}

        def write() -> None:
            for row, (token, logit) in chosen.items():
                memory.token[row] = token
                memory.best_logits[step, row] = logit

        return write

    def _choose(self, index: int, at: Placed) -> tuple[int, float]:
        memory, rule = self._memory, self._rules[at.row]
        logit, token = max(zip(memory.best[:, index], -memory.best_id[:, index], strict=True))
        if rule.temperature == 0.0:
            return -int(token), logit
        return draw(memory.logits[index], rule, self._cache.length + at.position + 1), logit

    def _settle(self, worker: _Worker, it: Instruction, _step: int, _event: int) -> _Write:
        drafts = self._memory.drafts
        assert drafts is not None, "an instruction of rows that draft"
        return drafts.settle(it, self._sizes.num_workers, worker.placed, list(self._memory.token))

    def _place(self, _worker: _Worker, it: Instruction, step: int, _event: int) -> _Write:
        drafts = self._memory.drafts
        assert drafts is not None, "an instruction of rows that draft"
        if not it.num_blocks:
            return _nothing
        return drafts.place(step, self._steps, stop=bool(self._memory.stop))

    def _commit(self, worker: _Worker, _it: Instruction, step: int, _event: int) -> _Write:
        memory = self._memory
        if memory.drafts is not None:
            return self._commit_drafts(worker, memory.drafts)
        worker.placed = one_each(memory.token, step + 1)
        if memory.values is not None:
            worker.payload = list(memory.values.value)
        worker.ended = bool(memory.stop) or step + 1 == self._steps

        def write() -> None:
            if worker.number == 0:
                memory.published.append(list(worker.token))
                if memory.values is not None:
                    memory.values.told.append(worker.payload)

        return write

    def _commit_drafts(self, worker: _Worker, drafts: DraftMemory) -> _Write:
        worker.placed, worker.ended = list(drafts.placed), not drafts.follows
        told = [list(each or ()) for each in drafts.settled]

        def write() -> None:
            if worker.number == 0:
                self._memory.published.append(list(self._memory.token))
                drafts.told.append(told)

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
        stream: Floats = self._memory.x[it.src][: len(worker.placed)]
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
