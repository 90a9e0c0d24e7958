"""Simulator of the megakernel's program, its workers in any order."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from legato_engine.kernels.megakernel.program import (
    NONE,
    InputSource,
    Instruction,
    Op,
    Program,
    qkv_rows,
)
from legato_engine.kernels.megakernel.sizes import (
    BLOCK,
    HEAD_DIM,
    PAGE,
    SPLITS,
    ModelSizes,
    ValueDims,
)

from tests.megakernel_model.definition import (
    EPSILON,
    GREEDY,
    NOTHING_WEIGHED,
    PLAIN,
    Cache,
    DrawnRow,
    Floats,
    Map,
    Outcome,
    Rule,
    Value,
    Values,
    Weights,
    angles,
    choose,
    gelu,
    own_slice,
    weigh,
)
from tests.megakernel_model.order import RunAhead, Stuck

Write = Callable[[], None]
"""What is left to do of an instruction that has read and computed."""


class Memory:
    """Shared memory of workers; B tokens of a step, which are rows without drafts."""

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
        self.weighed = [[NOTHING_WEIGHED] * rows for _ in range(num)]
        self.logits = np.full((rows, sizes.vocab_size), nan)
        self.token = [-1] * rows
        self.stop: bool | None = None
        self.host_stop = False  # the host's stop flag
        self.published: list[list[int]] = []
        self.best_logits = np.full((steps, rows), nan)
        self.values = None if sizes.values is None else ValueMemory(sizes.values, rows)
        self.drafts = None if drafts is None else DraftMemory(drafts, tokens)


@dataclasses.dataclass(slots=True)
class Worker:
    """State of a worker."""

    number: int
    placed: list[Placed]
    held: Floats
    sums: Floats
    copies: dict[int, Floats]  # keys and values of earlier steps, by the event that takes them
    ended: bool = False

    @property
    def token(self) -> list[int]:
        return [each.token for each in self.placed]


class Work:
    """Base of instruction sets: methods read and compute, and return the remaining writes."""

    def __init__(
        self, sizes: ModelSizes, weights: Weights, memory: Memory, chance: random.Random
    ) -> None:
        self._sizes, self._weights, self._memory, self._chance = sizes, weights, memory, chance

    def source(self, worker: Worker, it: Instruction) -> Floats:
        """Return the residual stream [B, D] that an instruction reads."""
        if it.src == InputSource.EMBED:
            embedded: Floats = self._weights.embedding[worker.token]
            return embedded
        stream: Floats = self._memory.x[it.src][: len(worker.placed)]
        return stream

    def _project(self, worker: Worker, it: Instruction, rows: list[int]) -> Floats:
        """Rows of a map of the norm, whose scale is in the weights: as the device computes it."""
        layer, whole = self._weights.layers[it.layer], self._map(it)
        # Kept by the worker, or read again.
        x = worker.held if self._chance.random() < 0.5 else self.source(worker, it)
        weight = whole.weight[rows]
        scaled = weight * layer.norm[0]
        mean = worker.held.mean(-1, keepdims=True)
        squares = (worker.held**2).mean(-1, keepdims=True)
        deviation = np.sqrt(squares - mean * mean + EPSILON)
        bias = weight @ layer.norm[1] + whole.bias[rows]
        out: Floats = (x @ scaled.T - mean * scaled.sum(-1)) / deviation + bias
        return out

    def _map(self, it: Instruction) -> Map:
        return self._weights.layers[it.layer].maps[Op(it.op)]

    def _block_rows(self, it: Instruction) -> list[int]:
        num = self._sizes.num_workers
        firsts = ((it.block + i * num) * BLOCK for i in range(it.num_blocks))
        return [row for first in firsts for row in range(first, first + BLOCK)]


def own_head(worker: Worker) -> tuple[int, int]:
    first = worker.number // SPLITS * HEAD_DIM
    return first, first + HEAD_DIM


def nothing() -> None:
    """Write nothing: the instruction changes only its worker's state."""


# ---------------------------------------------------------------- layer simulator

# What the instructions of a layer do, in the simulator.


class LayerWork(Work):
    """Instructions of a layer; attention reads `cache` and the launch's own keys and values."""

    def __init__(
        self,
        sizes: ModelSizes,
        weights: Weights,
        memory: Memory,
        chance: random.Random,
        cache: Cache,
    ) -> None:
        super().__init__(sizes, weights, memory, chance)
        self._cache = cache

    def fc1(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        rows = self._block_rows(it)
        worker.held = self.source(worker, it).copy()
        act = gelu(self._project(worker, it, rows))

        def write() -> None:
            self._memory.act[: len(act), rows] = act

        return write

    def qkv(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
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

    def fc2(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        chunk = self._sizes.chunk
        inputs = slice(it.chunk * chunk, (it.chunk + it.num_chunks) * chunk)
        weight = self._map(it).weight[self._block_rows(it), inputs]
        sums = self._memory.act[: len(worker.placed), inputs] @ weight.T
        worker.sums = sums if it.chunk == 0 else worker.sums + sums
        return nothing

    def attend(self, worker: Worker, it: Instruction, _step: int, event: int) -> Write:
        """Attend to the worker's quarter of all pages, and to what QKV wrote in this step."""
        memory, count = self._memory, len(worker.placed)
        earlier = worker.copies.pop(event, None)
        parts = [self._part(worker, it, index, earlier) for index in range(count)]

        def write() -> None:
            for index, (out, ends) in enumerate(parts):
                memory.part[index, worker.number] = out
                memory.ends[index, worker.number] = ends

        return write

    def _part(
        self, worker: Worker, it: Instruction, index: int, earlier: Floats | None
    ) -> tuple[Floats, tuple[float, float]]:
        """Return a token's softmax over a quarter of its positions."""
        memory, length, at = self._memory, self._cache.length, worker.placed[index]
        quarter, head = worker.number % SPLITS, worker.number // SPLITS
        span = slice(*own_head(worker))
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

    def merge(self, worker: Worker, _it: Instruction, _step: int, _event: int) -> Write:
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
            memory.heads[own, slice(*own_head(worker))] = heads

        return write

    def out(self, worker: Worker, it: Instruction, step: int, _event: int) -> Write:
        memory, rows = self._memory, self._block_rows(it)
        count = len(worker.placed)
        heads = memory.heads[:count]
        layer = self._weights.layers[it.layer].maps
        proj = layer[Op.OUT]
        bias = proj.bias[rows] + layer[Op.FC2].bias[rows]
        x = self.source(worker, it)[:, rows] + worker.sums + heads @ proj.weight[rows].T + bias

        def write() -> None:
            memory.x[it.dst][:count, rows] = x
            memory.trace[step, it.layer][:count, rows] = x

        return write


def _turn(x: Floats, cosine: Floats, sine: Floats) -> Floats:
    low, high = x[:, :8], x[:, 8:]
    return np.concatenate([low * cosine - high * sine, low * sine + high * cosine], axis=1)


# ---------------------------------------------------------------- value simulator

# What the instructions of values do, for `simulator`: memory that begins as NaN, and no order.
#
# Shape legend: B tokens of a step, which are rows without drafts.

_Write = Callable[[], None]
_UNREAD = (np.nan,) * 4


class ValueMemory:
    """Shared memory of values, and the values that were published [S][B]."""

    def __init__(self, dims: ValueDims, rows: int) -> None:
        self.act = np.full((rows, 2 * dims.inner_dim), np.nan)
        self.bins = np.full((rows, dims.scalar_bins + dims.pair_bins), np.nan)
        self.value: list[Value] = [_UNREAD] * rows
        self.published: list[list[Value]] = []


class ValueWork:
    """Reads and computes; each returns what is left to write."""

    def __init__(self, sizes: ModelSizes, values: Values, memory: ValueMemory) -> None:
        assert sizes.values is not None, "a model without values has none of these instructions"
        self._sizes, self._dims = sizes, sizes.values
        self._values, self._memory = values, memory
        # By worker: INNER's tokens.
        self._seen: list[list[int]] = [[] for _ in range(sizes.num_workers)]

    def inner(self, worker: int, it: Instruction, tokens: list[int], x: Floats) -> _Write:
        """Compute the first layer of decoders that some token needs."""
        self._seen[worker] = list(tokens)
        inner, found = self._dims.inner_dim, {}
        for row in self._block_rows(it):
            kind = self._values.kinds[row // inner]
            if kind.token in tokens:
                one = kind.fc1.weight[row % inner], kind.fc1.bias[row % inner]
                found[row] = gelu(x @ one[0] + one[1])
        return lambda: self._store(self._memory.act, found)

    def bins(self, worker: int, it: Instruction) -> _Write:
        """Compute the second layer of decoders that some token needs."""
        first, inner, found = self._dims.scalar_bins, self._dims.inner_dim, {}
        for row in self._block_rows(it):
            is_pair = row >= first
            kind = self._values.kinds[is_pair]
            if kind.token in self._seen[worker]:
                seen = len(self._seen[worker])
                inputs = self._memory.act[:seen, is_pair * inner : (is_pair + 1) * inner]
                own = row - first if is_pair else row
                found[row] = inputs @ kind.fc2.weight[own] + kind.fc2.bias[own]
        return lambda: self._store(self._memory.bins, found)

    def read(self, worker: int, it: Instruction, logits: Floats) -> _Write:
        """Read the values of the worker's rows."""
        rows = range(it.block, it.block + it.num_blocks * self._sizes.num_workers)
        tokens, memory, first = self._seen[worker], self._memory, self._dims.scalar_bins
        values = {}
        for row in rows[:: self._sizes.num_workers]:
            if row >= len(tokens):
                continue
            bins = None
            if tokens[row] == self._values.scalar.token:
                bins = memory.bins[row, :first].copy()
            elif tokens[row] == self._values.pair.token:
                bins = memory.bins[row, first:].copy()
            values[row] = self._values.read(tokens[row], bins, logits[row])

        def write() -> None:
            for row, value in values.items():
                memory.value[row] = value

        return write

    def _store(self, to: Floats, found: dict[int, Floats]) -> None:
        for row, column in found.items():
            to[: len(column), row] = column

    def _block_rows(self, it: Instruction) -> Iterator[int]:
        for index in range(it.num_blocks):
            first = (it.block + index * self._sizes.num_workers) * BLOCK
            yield from range(first, first + BLOCK)


# ---------------------------------------------------------------- token simulator

# What the instructions between a step's layers and the next step do, in the simulator.


class TokenWork(Work):
    """Instructions from the head to the tokens of the next step.

    `length`: positions before the launch; a rule for each row.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        weights: Weights,
        memory: Memory,
        chance: random.Random,
        *,
        length: int,
        steps: int,
        rules: Sequence[Rule],
    ) -> None:
        super().__init__(sizes, weights, memory, chance)
        self._length, self._steps = length, steps
        self._rules = rules

    def head(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        rows = np.array(self._block_rows(it))
        worker.held = self.source(worker, it).copy()
        logits = self._project(worker, it, rows.tolist())
        best = logits.argmax(-1)

        def write() -> None:
            count, highest = len(logits), np.take_along_axis(logits, best[:, None], 1)[:, 0]
            self._memory.logits[:count, rows] = logits
            self._memory.best[worker.number, :count] = highest
            self._memory.best_id[worker.number, :count] = rows[best]

        return write

    def listen(self, _worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        memory = self._memory

        def write() -> None:
            if it.num_blocks:
                memory.stop = memory.host_stop

        return write

    def weigh(self, worker: Worker, _it: Instruction, _step: int, _event: int) -> Write:
        memory, mine = self._memory, own_slice(self._sizes, worker.number)
        found = {}
        for index, at in enumerate(worker.placed):
            if self._rules[at.row].temperature > 0.0:
                found[index] = weigh(self._drawn(index, at), mine.start, memory.logits[index, mine])

        def write() -> None:
            for index, each in found.items():
                memory.weighed[worker.number][index] = each

        return write

    def sample(self, worker: Worker, it: Instruction, step: int, _event: int) -> Write:
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
        weighed = [each[index] for each in memory.weighed]
        return choose(self._drawn(index, at), weighed, memory.logits[index]), logit

    def _drawn(self, index: int, at: Placed) -> DrawnRow:
        highest, position = self._memory.best[:, index].max(), self._length + at.position + 1
        return DrawnRow.of(highest, self._rules[at.row], position, self._sizes.vocab_size)

    def settle(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        drafts = self._memory.drafts
        assert drafts is not None, "an instruction of rows that draft"
        tokens, values = list(self._memory.token), self._values()
        return drafts.settle(it, self._sizes.num_workers, worker.placed, tokens, values)

    def place(self, _worker: Worker, it: Instruction, step: int, _event: int) -> Write:
        drafts = self._memory.drafts
        assert drafts is not None, "an instruction of rows that draft"
        if not it.num_blocks:
            return nothing
        return drafts.place(step, self._steps, stop=bool(self._memory.stop))

    def commit(self, worker: Worker, _it: Instruction, step: int, _event: int) -> Write:
        memory = self._memory
        drafts, tokens, values = memory.drafts, list(memory.token), self._values()
        settled: list[list[int]] = []
        if drafts is not None:
            worker.placed, worker.ended = list(drafts.placed), not drafts.follows
            settled = [list(each or ()) for each in drafts.settled]
        else:
            worker.placed = one_each(tokens, values, step + 1)
            worker.ended = bool(memory.stop) or step + 1 == self._steps

        def write() -> None:
            if worker.number == 0:
                memory.published.append(tokens)
                if memory.values is not None:
                    memory.values.published.append(values)
                if drafts is not None:
                    drafts.published.append(settled)

        return write

    def _values(self) -> list[Value]:
        """Return the values of the step's tokens."""
        memory = self._memory
        return list(memory.values.value) if memory.values else [PLAIN] * len(memory.token)

    def embed(self, worker: Worker, it: Instruction, _step: int, _event: int) -> Write:
        """Embed the committed tokens and values: the worker's own outputs."""
        rows, words, read = self._block_rows(it), self._weights.embedding, self._weights.values
        assert read is not None, "an instruction of models with values"
        x = np.stack([read.embed(words, each.token, each.value)[rows] for each in worker.placed])

        def write() -> None:
            self._memory.x[it.dst][: len(x), rows] = x

        return write


# ---------------------------------------------------------------- draft simulator

# What the instructions of drafts do, for `simulator`: how rows' tokens are placed and settled.
#
# A row feeds its newest token and its draft tokens at the positions after it. Which tokens are
# drafted is the caller's choice; the kernel looks them up, by functions that the kernels around
# captured steps share.

Propose = Callable[[int, Sequence[int]], Sequence[int]]
"""Draft tokens of a row after what it has, its first token included."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A token of a step: its row, id and values.

    Its position and the first one that its row writes in the step count from the launch's first.
    """

    row: int
    token: int
    position: int
    first: int
    value: Value = PLAIN


def one_each(tokens: Sequence[int], values: Sequence[Value], step: int) -> list[Placed]:
    """Return the tokens of a step without drafts."""
    both = enumerate(zip(tokens, values, strict=True))
    return [Placed(row, token, step, step, value) for row, (token, value) in both]


@dataclasses.dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of at most `most` tokens per row; a launch ends when a row has `length` new tokens."""

    propose: Propose
    most: int
    length: int


class DraftMemory:
    """Shared memory of drafts, and each row's published tokens [S][B]."""

    def __init__(self, drafts: Drafts, tokens: Sequence[int]) -> None:
        self._drafts = drafts
        self.history = [[token] for token in tokens]
        self.value: list[Value] = [PLAIN] * len(tokens)  # of each row's newest token
        self.proposal = [list(drafts.propose(row, each)) for row, each in enumerate(self.history)]
        self.settled: list[list[int] | None] = [None] * len(tokens)
        self.placed = self._placed()
        self.follows = True
        self.published: list[list[list[int]]] = []

    def settle(
        self,
        it: Instruction,
        workers: int,
        placed: list[Placed],
        sampled: list[int],
        values: list[Value],
    ) -> _Write:
        """Verify drafts: keep tokens up to and including the first that was not drafted."""
        rows = range(it.block, it.block + it.num_blocks * workers, workers)
        kept = {row: _kept(row, placed, sampled) for row in rows if row < len(self.history)}
        tokens = {row: [sampled[index] for index in own] for row, own in kept.items()}
        newest = {row: values[own[-1]] for row, own in kept.items()}
        said = {
            row: list(self._drafts.propose(row, [*self.history[row], *own]))
            for row, own in tokens.items()
        }

        def write() -> None:
            for row, own in tokens.items():
                self.history[row] += own
                self.proposal[row], self.settled[row] = said[row], own
                self.value[row] = newest[row]

        return write

    def place(self, step: int, steps: int, *, stop: bool) -> _Write:
        """Place the next step's tokens and decide whether it follows."""
        ended = any(len(each) > self._drafts.length for each in self.history)
        placed = self._placed()

        def write() -> None:
            self.placed, self.follows = placed, not (ended or stop or step + 1 == steps)

        return write

    def _placed(self) -> list[Placed]:
        placed = []
        for row, history in enumerate(self.history):
            first = len(history) - 1
            for index, token in enumerate([history[-1], *self.proposal[row][: self._drafts.most]]):
                value = PLAIN if index else self.value[row]
                placed.append(Placed(row, token, first + index, first, value))
        return placed


def _kept(row: int, placed: list[Placed], sampled: list[int]) -> list[int]:
    """Indices of the step's tokens."""
    own = [index for index, each in enumerate(placed) if each.row == row]
    kept = []
    for index in own:
        kept.append(index)
        follows = index + 1 < len(placed) and placed[index + 1].row == row
        if not follows or placed[index + 1].token != sampled[index]:
            break
    return kept


# ---------------------------------------------------------------- simulator

# A program run on the CPU with real numbers, its workers in any order that the counters allow.
#
# The simulator is the kernel's specification: it does what an instruction does, from the same
# fields. Memory begins as NaN. Between its wait, its reads, its writes and its signal a worker may
# be held up by any number of others' instructions, and copies of keys and values are made at any
# time at which the ring allows them. So may the host, which may set its stop flag at any time.


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

    With `stops` the host sets its stop flag at some time, so that there may be fewer. With `drafts`
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
        stops_in = self._chance.randint(0, 400 * len(threads)) if stops else -1
        while alive:
            stops_in -= 1
            if stops_in == 0:
                self._memory.host_stop = True
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
        values = [] if memory.values is None else memory.values.published
        accepted = [] if memory.drafts is None else memory.drafts.published
        best = memory.best_logits[:steps]
        return Outcome(memory.published, memory.trace[:steps], best, values, accepted)

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
        """Return which attention's copies are made at the beginning of which events."""
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
