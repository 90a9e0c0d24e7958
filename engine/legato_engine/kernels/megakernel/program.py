"""The megakernel's program: instructions, operands, schedule and device header."""

from __future__ import annotations

import dataclasses
import enum
import importlib.resources
from collections.abc import Iterator

from legato_engine.kernels.megakernel import sizes
from legato_engine.kernels.megakernel.sizes import (
    BLOCK,
    HEAD_DIM,
    MAX_TOKENS,
    ROTARY_DIM,
    SPLITS,
    ModelSizes,
    ValueDims,
)

NONE = -1
"""A field that an instruction does not use; a counter that it neither waits for nor adds to."""
BLOCKS_AT_ONCE = 4
"""Blocks of FC1 whose sums a worker's shared memory holds."""


class Op(enum.IntEnum):
    """Operations of instructions; MOMENTS, SUMS and NEEDED are local to a worker.

    FC1 and HEAD also compute MOMENTS, the mean and deviation of X[src].
    """

    FC1 = 0  # ACT[blocks] = gelu(norm(X[src]) @ fc1)
    QKV = 1  # Q[block], keys and values of the step's position = rotate(norm(X[src]) @ qkv)
    FC2 = 2  # SUMS += ACT[chunks] @ fc2; SUMS = 0 before chunk 0
    ATTEND = 3  # PART[block] = softmax(Q[head] @ keys) @ values over the worker's pages
    MERGE = 4  # HEADS[head] of every fourth token = merged(PART[blocks of the head])
    OUT = 5  # X[dst][block] = X[src][block] + SUMS + HEADS @ proj + biases
    LISTEN = 6  # STOP = the host's stop flag, if `num_blocks` is 1
    HEAD = 7  # LOGITS[blocks] = norm(X[src]) @ lm_head + constraint; BEST[worker] = their argmax
    WEIGH = 8  # WEIGHED[worker] = masses and best tokens of drawn rows in a slice of LOGITS
    SAMPLE = 9  # TOKEN[rows] = a draw by WEIGHED and LOGITS, or the argmax over BEST
    COMMIT = 10  # the step's token = TOKEN, which worker 0 publishes; whether a step follows
    EMBED = 11  # X[dst][block] = the embedding of the step's token or value
    INNER = 12  # NEEDED = decoders of TOKEN; VACT[blocks] = gelu(X[src] @ value_fc1) of those
    BINS = 13  # BINS[blocks] = VACT @ value_fc2 of NEEDED decoders
    VALUE = 14  # VALUE[rows] = the likeliest bin of rows whose TOKEN has values; its certainty
    SETTLE = 15  # DRAFT[rows] = accepted draft tokens of the row by TOKEN, and its next proposal
    PLACE = 16  # PLACED = the next step's tokens, of all rows, if `num_blocks` is 1


class InputSource(enum.IntEnum):
    """Buffers of the residual stream."""

    X0 = 0
    X1 = 1
    EMBED = 2  # the embedding of the worker's token, where all are words


class CounterKind(enum.IntEnum):
    """Counter kinds: up to PART per layer, from EMBED on for values, the last two for drafts."""

    X = 0
    ACT = 1
    HEADS = 2
    Q = 3  # one for each head
    PART = 4  # likewise
    BEST = 5
    WEIGHED = 6
    TOKEN = 7
    EMBED = 8
    INNER = 9
    BINS = 10
    VALUE = 11
    SETTLED = 12
    PLACED = 13


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """Entry of a worker's list; the device reads these fields as int16, in this order.

    `wait` is a counter, which has to reach `wait_count + step * wait_stride`, where steps count
    from the first launch on. `signal` is the counter to increment. Output blocks, or the rows of
    SAMPLE, are `block`, `block + W`, ... (`num_blocks` of them, W workers); inputs are
    `num_chunks` chunks from `chunk` on. `stage` is the first of its `num_blocks * num_chunks`
    stages in the worker's stream of weights, for OUT and FC2 as well. With `only_draws` it waits
    only in launches with a drawn row.
    """

    op: int
    layer: int = NONE
    wait: int = NONE
    wait_count: int = 0
    wait_stride: int = 0
    signal: int = NONE
    src: int = NONE
    dst: int = NONE
    block: int = 0
    num_blocks: int = 0
    chunk: int = 0
    num_chunks: int = 0
    stage: int = 0
    only_draws: int = 0

    @property
    def num_stages(self) -> int:
        return self.num_blocks * self.num_chunks


FIELDS = tuple(field.name for field in dataclasses.fields(Instruction))
WORDS = 16
WORD_BYTES = 2
"""int16 words of an instruction on the device; those after its fields are zero."""


def counter(sizes: ModelSizes, kind: CounterKind, layer: int = 0, head: int = 0) -> int:
    of_layer = CounterKind.Q + 2 * sizes.num_heads
    if kind >= CounterKind.BEST:
        return sizes.num_layers * of_layer + kind - CounterKind.BEST
    if kind >= CounterKind.Q:
        return layer * of_layer + CounterKind.Q + (kind - CounterKind.Q) * sizes.num_heads + head
    return layer * of_layer + kind


def num_counters(sizes: ModelSizes) -> int:
    """Return the number of counters: one per kind and layer, Q and PART also per head."""
    if sizes.drafts:
        return counter(sizes, CounterKind.PLACED) + 1
    return counter(sizes, CounterKind.TOKEN if sizes.values is None else CounterKind.VALUE) + 1


# ---------------------------------------------------------------- program

# The program of a decode step: a list of instructions for every worker, as data.
#
# A worker is a thread block of the megakernel. It runs its list once per step, in order. Two loader
# warps fill a ring in shared memory with the weights of the same list, in order, as soon as stages
# are free; they wait for no counter.
#
# Before an instruction runs, its worker waits until a counter in global memory has a value; after
# it has run, the worker increments a counter. Counters are never reset: each step's targets are
# higher by the number of signals of one step, and a launch continues where the last one ended.
#
# The order in a layer hides every hop between workers behind another phase's stream: the inner
# activations are needed after the QKV weights, queries after half of fc2, the parts of heads after
# a quarter more, and whole heads after the last quarter.
#
# With values the program has more instructions: the embedding is one, because that of a value is a
# map, and values are read between SAMPLE and COMMIT. Their weights are not in the stream, because
# only the sampled tokens determine which are needed.
#
# With drafts a step has several tokens per row, and only the step before it determines how many, at
# which positions. Between SAMPLE and COMMIT draft tokens are verified and those of the next step
# placed. Loaders run ahead with weights, which do not depend on that, and wait for COMMIT before
# they copy keys and values. A program may have both: a row's newest token may have a value, and
# draft tokens are words.


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Instruction lists of all workers, and the number of stages of their rings."""

    sizes: ModelSizes
    ring_stages: int
    workers: tuple[tuple[Instruction, ...], ...]

    @property
    def num_counters(self) -> int:
        """Counters, each in a cache line of its own."""
        return num_counters(self.sizes)

    def stream_stages(self, worker: int) -> int:
        return sum(each.num_stages for each in self.workers[worker])

    def table(self) -> list[int]:
        """Return all instructions' words, worker by worker; shorter lists end in ops of -1."""
        longest = max(map(len, self.workers))
        words: list[int] = []
        for instructions in self.workers:
            for each in instructions:
                fields = [getattr(each, name) for name in FIELDS]
                words += fields + [0] * (WORDS - len(fields))
            words += [NONE] * WORDS * (longest - len(instructions))
        return words


def max_instructions(num_layers: int) -> int:
    """Return an upper bound of a worker's instructions for any model."""
    return 8 * num_layers + 11


def build_program(sizes: ModelSizes, ring_stages: int) -> Program:
    workers = tuple(tuple(_numbered(_worker(sizes, worker))) for worker in range(sizes.num_workers))
    return Program(sizes, ring_stages, workers)


def _worker(sizes: ModelSizes, worker: int) -> Iterator[Instruction]:
    if sizes.values is not None:
        embedded = counter(sizes, CounterKind.EMBED)
        yield Instruction(Op.EMBED, 0, signal=embedded, dst=_x(0), block=worker, num_blocks=1)
    for layer in range(sizes.num_layers):
        yield from _layer(sizes, worker, layer)
    last = sizes.num_layers
    best, weighed, token = (
        counter(sizes, kind) for kind in (CounterKind.BEST, CounterKind.WEIGHED, CounterKind.TOKEN)
    )
    # The read of the host's memory takes a microsecond or two, beside this worker's head.
    yield Instruction(Op.LISTEN, last, num_blocks=int(worker == 0))
    x = _wait(sizes, counter(sizes, CounterKind.X, last - 1))
    whole = {"src": _x(last), "block": worker, "num_chunks": sizes.chunks}
    blocks = sizes.share(worker, sizes.vocab_blocks)
    yield Instruction(Op.HEAD, last, **x, signal=best, **whole, num_blocks=blocks)
    yield Instruction(Op.WEIGH, last, **_wait(sizes, best), signal=weighed, num_blocks=1)
    rows = sizes.sampled_rows(worker)
    sampling = {**_wait(sizes, weighed), "only_draws": 1, "signal": token} if rows else {}
    yield Instruction(Op.SAMPLE, last, block=worker, num_blocks=rows, **sampling)
    if sizes.values is not None:
        yield from _values(sizes, sizes.values, worker)
        token = counter(sizes, CounterKind.VALUE)
    if sizes.drafts:
        yield from _drafts(sizes, worker, token)
        placed = {"wait": counter(sizes, CounterKind.PLACED), "wait_count": 1, "wait_stride": 1}
        yield Instruction(Op.COMMIT, last, **placed)
    else:
        yield Instruction(Op.COMMIT, last, **_wait_samplers(sizes, token))


def _drafts(sizes: ModelSizes, worker: int, token: int) -> Iterator[Instruction]:
    """Emit instructions that verify a step's drafts and place the next step's tokens.

    They wait until `token` has all of the step's tokens and values.
    """
    last, rows = sizes.num_layers, sizes.sampled_rows(worker)
    settled = counter(sizes, CounterKind.SETTLED)
    settling = {**_wait_samplers(sizes, token), "signal": settled} if rows else {}
    yield Instruction(Op.SETTLE, last, block=worker, num_blocks=rows, **settling)
    placing = {**_wait_samplers(sizes, settled), "signal": counter(sizes, CounterKind.PLACED)}
    places = worker == 0
    yield Instruction(Op.PLACE, last, num_blocks=int(places), **(placing if places else {}))


def _values(sizes: ModelSizes, values: ValueDims, worker: int) -> Iterator[Instruction]:
    """Emit instructions that read the values of the step's tokens."""
    last = sizes.num_layers
    inner, bins = counter(sizes, CounterKind.INNER), counter(sizes, CounterKind.BINS)
    own = {**_wait_samplers(sizes, counter(sizes, CounterKind.TOKEN)), "block": worker}
    blocks = sizes.share(worker, values.inner_blocks)
    yield Instruction(Op.INNER, last, **own, signal=inner, src=_x(last), num_blocks=blocks)
    blocks = sizes.share(worker, values.bin_blocks)
    yield Instruction(
        Op.BINS, last, **_wait(sizes, inner), signal=bins, block=worker, num_blocks=blocks
    )
    rows = sizes.sampled_rows(worker)
    reading = {**_wait(sizes, bins), "signal": counter(sizes, CounterKind.VALUE)} if rows else {}
    yield Instruction(Op.VALUE, last, block=worker, num_blocks=rows, **reading)


def _layer(sizes: ModelSizes, worker: int, layer: int) -> Iterator[Instruction]:
    """Emit a layer; its counter X counts the blocks of the layer's output."""

    def at(kind: CounterKind) -> int:
        return counter(sizes, kind, layer, worker // SPLITS)

    chunks, half = sizes.chunks, sizes.ff_ratio * sizes.chunks // 2
    rest = sizes.ff_ratio * chunks - half
    first, last = rest // 2, rest - rest // 2
    x, source = _wait(sizes, counter(sizes, CounterKind.X, max(layer - 1, 0))), _x(layer)
    if layer == 0 and sizes.values is None:
        x, source = {}, InputSource.EMBED
    elif layer == 0:
        x = _wait(sizes, counter(sizes, CounterKind.EMBED))
    whole = {"src": source, "block": worker, "num_chunks": chunks}
    blocks, act = sizes.ff_ratio, at(CounterKind.ACT)
    yield Instruction(Op.FC1, layer, **x, signal=act, **whole, num_blocks=blocks)
    yield Instruction(Op.QKV, layer, signal=at(CounterKind.Q), **whole, num_blocks=3)
    part = {"block": worker, "num_blocks": 1}
    yield Instruction(Op.FC2, layer, **_wait(sizes, act), **part, num_chunks=half)
    own = {"wait_count": SPLITS, "wait_stride": SPLITS, "block": worker}  # the workers of a head
    yield Instruction(Op.ATTEND, layer, wait=at(CounterKind.Q), signal=at(CounterKind.PART), **own)
    if first:
        yield Instruction(Op.FC2, layer, **part, chunk=half, num_chunks=first)
    yield Instruction(
        Op.MERGE, layer, wait=at(CounterKind.PART), signal=at(CounterKind.HEADS), **own
    )
    yield Instruction(Op.FC2, layer, **part, chunk=half + first, num_chunks=last)
    ready = {**_wait(sizes, at(CounterKind.HEADS)), "signal": at(CounterKind.X)}
    yield Instruction(Op.OUT, layer, **ready, dst=_x(layer + 1), **whole, num_blocks=1)


def _x(layer: int) -> InputSource:
    """Return the buffer of the residual stream that enters a layer; layers alternate."""
    return InputSource(layer % 2)


def _wait(sizes: ModelSizes, which: int) -> dict[str, int]:
    """Return the fields of a wait for all workers' signals."""
    return {"wait": which, "wait_count": sizes.num_workers, "wait_stride": sizes.num_workers}


def _wait_samplers(sizes: ModelSizes, which: int) -> dict[str, int]:
    """Return the fields of a wait for the signals of all workers that have rows."""
    samplers = min(sizes.num_workers, MAX_TOKENS)
    return {"wait": which, "wait_count": samplers, "wait_stride": samplers}


def _numbered(instructions: Iterator[Instruction]) -> Iterator[Instruction]:
    """Assign stages of the ring to the instructions in stream order."""
    stage = 0
    for each in instructions:
        yield dataclasses.replace(each, stage=stage if each.num_stages else 0)
        stage += each.num_stages


# ---------------------------------------------------------------- stream

# The order in which weights are packed. A stage is a block of 16 rows of one matrix by a chunk of
# its inputs.


@dataclasses.dataclass(frozen=True, slots=True)
class WeightStage:
    """Stage of the weight stream, of an operation's matrix; the head's `layer` is their number."""

    op: Op
    layer: int
    block: int
    chunk: int


def worker_stages(program: Program, worker: int) -> list[WeightStage]:
    """List the stages of a worker's stream in order, block after block of each instruction."""
    num_workers = program.sizes.num_workers
    return [
        WeightStage(Op(each.op), each.layer, each.block + index * num_workers, chunk)
        for each in program.workers[worker]
        for index in range(each.num_blocks)
        for chunk in range(each.chunk, each.chunk + each.num_chunks)
    ]


def qkv_rows(block: int) -> list[int]:
    """List a block's rows of the joint query, key and value map, in order.

    The rotated pairs (i, i + 16) of a head's first 32 rows are rows g and g + 8 of a block.
    """
    head, part = divmod(block, SPLITS)
    first, half = head * HEAD_DIM, ROTARY_DIM // 2
    if part < ROTARY_DIM // BLOCK:
        low = range(first + part * 8, first + part * 8 + 8)
        return [*low, *(row + half for row in low)]
    return list(range(first + part * BLOCK, first + (part + 1) * BLOCK))


# ---------------------------------------------------------------- header

# Constants and layout of an instruction for the device. `python -m
# legato_engine.kernels.megakernel.program` writes program.cuh; a test compares the two.

FILE = "program.cuh"
_CONSTANTS = (
    "BLOCK",
    "HEAD_DIM",
    "ROTARY_DIM",
    "SPLITS",
    "GROUP",
    "WARPS",
    "LOADERS",
    "MAX_TOKENS",
    "PAGE",
    "PAGE_BYTES",
    "RANGES",
    "NEAR_RANGES",
    "NEAR_DIGITS",
    "FAR_DIGITS",
)


def header() -> str:
    lines = [
        "// Written by `python -m legato_engine.kernels.megakernel.program`.",
        "#pragma once",
        "",
        *(f"constexpr int {name} = {getattr(sizes, name)};" for name in _CONSTANTS),
        f"constexpr int NONE = {NONE};",
        "",
        *(f"constexpr int OP_{op.name} = {op.value};" for op in Op),
        "",
        *(f"constexpr int SOURCE_{source.name} = {source.value};" for source in InputSource),
        "",
        "struct __align__(16) Instruction {",
        f"  short {', '.join(FIELDS)};",
        f"  short unused[{WORDS - len(FIELDS)}];",
        "};",
        f"static_assert(sizeof(Instruction) == {WORDS * WORD_BYTES},"
        f' "an instruction has {WORDS} words");',
    ]
    return "\n".join(lines) + "\n"


def defines(model: ModelSizes, ring_stages: int, under_way: int, tiles: int) -> dict[str, int]:
    """Return a build's constants: the model's sizes, the ring, and `tiles` groups of 8 tokens.

    `under_way`: the maximum stages of the ring that are copied at the same time.
    """
    return {
        "DIM": model.dim,
        "FF": model.ff_dim,
        "VOCAB": model.vocab_size,
        "CHUNK": model.chunk,
        "PARTS": model.out_parts,
        "STAGE_PAGES": model.pages_per_stage,
        "RING": ring_stages,
        "UNDER_WAY": under_way,
        "TILES": tiles,
    }


if __name__ == "__main__":
    folder = importlib.resources.files(__package__) / "sources"
    with importlib.resources.as_file(folder / FILE) as path:
        path.write_text(header())
