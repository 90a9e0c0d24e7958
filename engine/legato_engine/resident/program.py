"""The program of a decode step: a list of instructions for every worker, as data.

A worker is a thread block of the resident kernel. It runs its list once per step, in order. A
second thread of control, its producer, fills a ring in shared memory with the weights of the same
list, in order, as soon as stages are free: it waits for no counter.

Before an instruction runs, its worker waits until a counter in global memory has a value; after it
has run, the worker adds one to a counter. Counters are never reset: each step's targets are higher
by the number of signals of one step, and a launch goes on where the last one ended.

The order in a layer hides every hop between workers with another phase's stream: the inner
activations are needed after the QKV weights, queries after half of fc2, the parts of heads after a
quarter more, and whole heads after the last quarter.

A model with values has a program of its own for launches in which some row may have one: the
embedding is an instruction, as that of a value is a map, and between SAMPLE and COMMIT values are
read. Their weights are no part of the stream, since only the sampled tokens say which are needed.

So has a model whose rows draft: a step has several tokens of a row, and only the step before it
says how many, at which positions. Between SAMPLE and COMMIT draft tokens are verified and those of
the next step placed. Producers run ahead with weights, which do not depend on that, and wait for
COMMIT before they copy keys and values. A program may have both: a row's newest token may have a
value, and draft tokens are words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from legato_engine.resident.instructions import (
    FIELDS,
    NONE,
    WORDS,
    Instruction,
    Kind,
    Op,
    Source,
    counter,
    num_counters,
)
from legato_engine.resident.sizes import MAX_ROWS, SPLITS, ModelSizes, ValueDims


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Every worker's list, and how many stages the rings have."""

    sizes: ModelSizes
    ring_stages: int
    workers: tuple[tuple[Instruction, ...], ...]

    @property
    def num_counters(self) -> int:
        """Counters, each in a cache line of its own."""
        return num_counters(self.sizes)

    def without_draws(self) -> Program:
        """What a launch runs whose rows are all greedy: nothing is weighed, and no wait for it."""
        none = {"wait": NONE, "wait_count": 0, "wait_stride": 0, "only_draws": 0}
        workers = (
            tuple(
                dataclasses.replace(it, num_blocks=0)
                if it.op == Op.WEIGH
                else dataclasses.replace(it, **none)
                if it.only_draws
                else it
                for it in instructions
            )
            for instructions in self.workers
        )
        return dataclasses.replace(self, workers=tuple(workers))

    def stream_stages(self, worker: int) -> int:
        """Stages of weights in a worker's stream."""
        return sum(each.num_stages for each in self.workers[worker])

    def table(self) -> list[int]:
        """The words of all instructions, worker after worker; shorter lists end in ops of -1."""
        longest = max(map(len, self.workers))
        words: list[int] = []
        for instructions in self.workers:
            for each in instructions:
                fields = [getattr(each, name) for name in FIELDS]
                words += fields + [0] * (WORDS - len(fields))
            words += [NONE] * WORDS * (longest - len(instructions))
        return words


def most_instructions(num_layers: int) -> int:
    """Of a worker, whatever its model has besides layers."""
    return 8 * num_layers + 11


def build_program(sizes: ModelSizes, ring_stages: int) -> Program:
    """The program of a model."""
    workers = tuple(tuple(_numbered(_worker(sizes, worker))) for worker in range(sizes.num_workers))
    return Program(sizes, ring_stages, workers)


def _worker(sizes: ModelSizes, worker: int) -> Iterator[Instruction]:
    if sizes.values is not None:
        embedded = counter(sizes, Kind.EMBED)
        yield Instruction(Op.EMBED, 0, signal=embedded, dst=_x(0), block=worker, num_blocks=1)
    for layer in range(sizes.num_layers):
        yield from _layer(sizes, worker, layer)
    last = sizes.num_layers
    best, weighed, token = (counter(sizes, kind) for kind in (Kind.BEST, Kind.WEIGHED, Kind.TOKEN))
    # The read of the host's memory takes a microsecond or two, which this worker's head makes up.
    yield Instruction(Op.LISTEN, last, num_blocks=int(worker == 0))
    yield Instruction(
        Op.HEAD,
        last,
        **_wait(sizes, counter(sizes, Kind.X, last - 1)),
        signal=best,
        src=_x(last),
        block=worker,
        num_blocks=sizes.head_blocks(worker),
        num_chunks=sizes.chunks,
    )
    yield Instruction(Op.WEIGH, last, **_wait(sizes, best), signal=weighed, num_blocks=1)
    rows = sizes.sampled_rows(worker)
    sampling = {**_wait(sizes, weighed), "only_draws": 1, "signal": token} if rows else {}
    yield Instruction(Op.SAMPLE, last, block=worker, num_blocks=rows, **sampling)
    if sizes.values is not None:
        yield from _values(sizes, sizes.values, worker)
        token = counter(sizes, Kind.VALUE)
    if sizes.drafts:
        yield from _drafts(sizes, worker, token)
        placed = {"wait": counter(sizes, Kind.PLACED), "wait_count": 1, "wait_stride": 1}
        yield Instruction(Op.COMMIT, last, **placed)
    else:
        yield Instruction(Op.COMMIT, last, **_wait_samplers(sizes, token))


def _drafts(sizes: ModelSizes, worker: int, token: int) -> Iterator[Instruction]:
    """What becomes of a step's draft tokens, and the tokens of the next, after the counter `token`
    has all of the step's tokens and values.
    """
    last, rows = sizes.num_layers, sizes.sampled_rows(worker)
    settled = counter(sizes, Kind.SETTLED)
    settling = {**_wait_samplers(sizes, token), "signal": settled} if rows else {}
    yield Instruction(Op.SETTLE, last, block=worker, num_blocks=rows, **settling)
    placing = {**_wait_samplers(sizes, settled), "signal": counter(sizes, Kind.PLACED)}
    places = worker == 0
    yield Instruction(Op.PLACE, last, num_blocks=int(places), **(placing if places else {}))


def _values(sizes: ModelSizes, values: ValueDims, worker: int) -> Iterator[Instruction]:
    """Values of the step's tokens."""
    last = sizes.num_layers
    inner, bins = counter(sizes, Kind.INNER), counter(sizes, Kind.BINS)
    yield Instruction(
        Op.INNER,
        last,
        **_wait_samplers(sizes, counter(sizes, Kind.TOKEN)),
        signal=inner,
        src=_x(last),
        block=worker,
        num_blocks=sizes.share(worker, values.inner_blocks),
    )
    blocks = sizes.share(worker, values.bin_blocks)
    yield Instruction(
        Op.BINS, last, **_wait(sizes, inner), signal=bins, block=worker, num_blocks=blocks
    )
    rows = sizes.sampled_rows(worker)
    reading = {**_wait(sizes, bins), "signal": counter(sizes, Kind.VALUE)} if rows else {}
    yield Instruction(Op.VALUE, last, block=worker, num_blocks=rows, **reading)


def _layer(sizes: ModelSizes, worker: int, layer: int) -> Iterator[Instruction]:
    """X's counter of a layer is of the layer's output."""

    def at(kind: Kind) -> int:
        return counter(sizes, kind, layer, worker // SPLITS)

    chunks, half = sizes.chunks, sizes.ff_ratio * sizes.chunks // 2
    rest = sizes.ff_ratio * chunks - half
    first, last = rest // 2, rest - rest // 2
    x, source = _wait(sizes, counter(sizes, Kind.X, max(layer - 1, 0))), _x(layer)
    if layer == 0 and sizes.values is None:
        x, source = {}, Source.EMBED
    elif layer == 0:
        x = _wait(sizes, counter(sizes, Kind.EMBED))
    yield Instruction(
        Op.FC1,
        layer,
        **x,
        signal=at(Kind.ACT),
        src=source,
        block=worker,
        num_blocks=sizes.ff_ratio,
        num_chunks=chunks,
    )
    yield Instruction(
        Op.QKV, layer, signal=at(Kind.Q), src=source, block=worker, num_blocks=3, num_chunks=chunks
    )
    part = {"block": worker, "num_blocks": 1}
    act = _wait(sizes, at(Kind.ACT))
    yield Instruction(Op.FC2, layer, **act, **part, chunk=0, num_chunks=half)
    own = {"wait_count": SPLITS, "wait_stride": SPLITS, "block": worker}  # the workers of a head
    yield Instruction(Op.ATTEND, layer, wait=at(Kind.Q), signal=at(Kind.PART), **own)
    if first:
        yield Instruction(Op.FC2, layer, **part, chunk=half, num_chunks=first)
    yield Instruction(Op.MERGE, layer, wait=at(Kind.PART), signal=at(Kind.HEADS), **own)
    yield Instruction(Op.FC2, layer, **part, chunk=half + first, num_chunks=last)
    yield Instruction(
        Op.OUT,
        layer,
        **_wait(sizes, at(Kind.HEADS)),
        signal=at(Kind.X),
        src=source,
        dst=_x(layer + 1),
        **part,
        num_chunks=chunks,
    )


def _x(layer: int) -> Source:
    """The buffer of the residual stream that enters a layer; layers write and read in turns."""
    return Source(layer % 2)


def _wait(sizes: ModelSizes, which: int) -> dict[str, int]:
    """A wait for all workers' signals."""
    return {"wait": which, "wait_count": sizes.num_workers, "wait_stride": sizes.num_workers}


def _wait_samplers(sizes: ModelSizes, which: int) -> dict[str, int]:
    """A wait for the signals of all workers that have rows."""
    samplers = min(sizes.num_workers, MAX_ROWS)
    return {"wait": which, "wait_count": samplers, "wait_stride": samplers}


def _numbered(instructions: Iterator[Instruction]) -> Iterator[Instruction]:
    """Stages of the stream in the order of use."""
    stage = 0
    for each in instructions:
        yield dataclasses.replace(each, stage=stage if each.num_stages else 0)
        stage += each.num_stages
