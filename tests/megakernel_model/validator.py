"""Proof that a program computes its model's step.

A cell is a block of 16 outputs of a buffer, for all rows. Its version says which value it holds:
step and layer. The cells of PART, BEST, WEIGHED and HEADS are workers (of HEADS: what a worker
merges), those of TOKEN and VALUE tokens, those of DRAFT rows; STOP and PLACED have one.

A program with drafts is examined with the draft tokens that reuse most memory: each step writes two
positions of a row, the second of which the next step writes again, as its token was wrong.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator

import numpy as np
from legato_engine.kernels.megakernel.program import (
    BLOCKS_AT_ONCE,
    FIELDS,
    NONE,
    WORD_BYTES,
    InputSource,
    Instruction,
    Op,
    Program,
    num_counters,
)
from legato_engine.kernels.megakernel.sizes import BLOCK, MAX_TOKENS, SPLITS, ModelSizes, ValueDims

from tests.megakernel_model.order import Event, Order, RunAhead, Stuck

Version = tuple[int, int]
"""A step and a layer; X's layer is the one that it enters."""
UNWRITTEN = (-1, -1)
"""What memory has before a launch."""


class Buffer(enum.IntEnum):
    """Memory that workers share."""

    X0 = 0
    X1 = 1
    ACT = 2
    Q = 3
    PART = 4
    BEST = 5
    LOGITS = 6
    TOKEN = 7
    STOP = 8
    VACT = 9
    BINS = 10
    VALUE = 11
    DRAFT = 12  # a row's history and newest place, its proposal and its descriptor
    PLACED = 13  # the tokens of the next step
    KV = 14  # one for each layer and position: see `Access.position`
    HEADS = 15
    WEIGHED = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Cells of a buffer: `first`, `first + stride`, ... (`count` of them).

    `layer` and `position` are those of KV, where positions are counted from the launch's first
    step on. `copied`: the loader reads it, as early as its ring allows.
    """

    buffer: Buffer
    first: int
    count: int
    version: Version
    stride: int = 1
    layer: int = 0
    position: int = 0
    copied: bool = False


def reads(sizes: ModelSizes, worker: int, it: Instruction, step: int) -> list[Access]:
    """List what an instruction reads of other workers' results."""
    everybody, version = sizes.num_workers, (step, it.layer)
    match it.op:
        case Op.FC1 | Op.QKV | Op.HEAD if it.src != InputSource.EMBED:
            return [Access(Buffer(it.src), 0, everybody, version)]
        case Op.FC2:
            blocks = sizes.chunk // BLOCK
            return [Access(Buffer.ACT, it.chunk * blocks, it.num_chunks * blocks, version)]
        case Op.ATTEND | Op.MERGE:
            return _head_reads(sizes, worker, it, step)
        case Op.OUT:
            merged = Access(Buffer.HEADS, 0, everybody, version)
            if it.src == InputSource.EMBED:
                return [merged]
            return [merged, Access(Buffer(it.src), worker, 1, version)]
        case Op.WEIGH | Op.SAMPLE if it.num_blocks:
            return _sampling_reads(sizes, it, version)
        case Op.SETTLE | Op.PLACE | Op.COMMIT if sizes.drafts:
            return _draft_reads(sizes, it, version)
        case Op.COMMIT:
            return [*_chosen(sizes, version), Access(Buffer.STOP, 0, 1, version)]
        case _ if sizes.values is not None:
            return _value_reads(sizes, sizes.values, it, version)
    return []


def _chosen(sizes: ModelSizes, version: Version) -> list[Access]:
    """List accesses to a step's tokens and their values."""
    buffers = [Buffer.TOKEN] if sizes.values is None else [Buffer.TOKEN, Buffer.VALUE]
    return [Access(buffer, 0, MAX_TOKENS, version) for buffer in buffers]


def _sampling_reads(sizes: ModelSizes, it: Instruction, version: Version) -> list[Access]:
    """List what sampling reads: of greedy rows the best only."""
    everybody = sizes.num_workers
    best = Access(Buffer.BEST, 0, everybody, version)
    logits = Access(Buffer.LOGITS, 0, sizes.vocab_blocks, version)
    if it.op == Op.WEIGH:
        return [best, logits]
    weighed = Access(Buffer.WEIGHED, 0, everybody, version)
    return [best, logits, weighed] if it.only_draws else [best]


def _head_reads(sizes: ModelSizes, worker: int, it: Instruction, step: int) -> list[Access]:
    """List what attention reads: results of the head's workers, and all keys and values."""
    head, version = worker // SPLITS * SPLITS, (step, it.layer)
    if it.op == Op.MERGE:
        return [Access(Buffer.PART, head, SPLITS, version)]
    cached = [
        Access(
            Buffer.KV,
            head,
            SPLITS,
            (min(position, step), it.layer),
            layer=it.layer,
            position=position,
            copied=position < step,
        )
        for position in range(step + 1 + sizes.drafts)
    ]
    return [Access(Buffer.Q, head, SPLITS, version), *cached]


def _draft_reads(sizes: ModelSizes, it: Instruction, version: Version) -> list[Access]:
    """Before the first step the host has placed its tokens."""
    before = (version[0] - 1, it.layer) if version[0] else UNWRITTEN
    match it.op:
        case Op.SETTLE if it.num_blocks:
            own = Access(Buffer.DRAFT, it.block, it.num_blocks, before, stride=sizes.num_workers)
            return [*_chosen(sizes, version), own, Access(Buffer.PLACED, 0, 1, before)]
        case Op.PLACE if it.num_blocks:
            tokens = Access(Buffer.TOKEN, 0, MAX_TOKENS, version)
            drafts = Access(Buffer.DRAFT, 0, MAX_TOKENS, version)
            return [tokens, drafts, Access(Buffer.STOP, 0, 1, version)]
        case Op.COMMIT:
            newest = Access(Buffer.DRAFT, 0, MAX_TOKENS, version)
            return [*_chosen(sizes, version), Access(Buffer.PLACED, 0, 1, version), newest]
    return []


def _value_reads(
    sizes: ModelSizes, values: ValueDims, it: Instruction, version: Version
) -> list[Access]:
    match it.op:
        case Op.INNER:
            hidden = Access(Buffer(it.src), 0, sizes.num_workers, version)
            return [Access(Buffer.TOKEN, 0, MAX_TOKENS, version), hidden]
        case Op.BINS:
            return [Access(Buffer.VACT, 0, values.inner_blocks, version)]
        case Op.VALUE if it.num_blocks:
            logits = Access(Buffer.LOGITS, 0, sizes.vocab_blocks, version)
            return [Access(Buffer.BINS, 0, values.bin_blocks, version), logits]
    return []


def writes(sizes: ModelSizes, worker: int, it: Instruction, step: int) -> list[Access]:
    """List what an instruction writes for other workers."""
    version = (step, it.layer)
    match it.op:
        case Op.FC1:
            blocks = it.num_blocks
            return [Access(Buffer.ACT, it.block, blocks, version, stride=sizes.num_workers)]
        case Op.QKV:
            cached = [
                Access(Buffer.KV, worker, 1, version, layer=it.layer, position=position)
                for position in range(step, step + 1 + sizes.drafts)
            ]
            return [Access(Buffer.Q, worker, 1, version), *cached]
        case Op.ATTEND | Op.MERGE | Op.WEIGH:
            return [Access(_RESULTS[Op(it.op)], worker, 1, version)]
        case Op.OUT:
            return [Access(Buffer(it.dst), worker, 1, (step, it.layer + 1))]
        case Op.LISTEN if it.num_blocks:
            return [Access(Buffer.STOP, 0, 1, version)]
        case Op.HEAD:
            count, stride = it.num_blocks, sizes.num_workers
            logits = Access(Buffer.LOGITS, it.block, count, version, stride=stride)
            return [Access(Buffer.BEST, worker, 1, version), logits]
        case Op.EMBED:
            return [Access(Buffer(it.dst), worker, 1, version)]
        case Op.PLACE if it.num_blocks:
            drafts = Access(Buffer.DRAFT, 0, MAX_TOKENS, version)  # block sizes
            return [drafts, Access(Buffer.PLACED, 0, 1, version)]
        case Op.SAMPLE | Op.SETTLE | Op.INNER | Op.BINS | Op.VALUE if it.num_blocks:
            count, stride = it.num_blocks, sizes.num_workers
            return [Access(_RESULTS[Op(it.op)], it.block, count, version, stride=stride)]
    return []


_RESULTS = {
    Op.ATTEND: Buffer.PART,
    Op.MERGE: Buffer.HEADS,
    Op.WEIGH: Buffer.WEIGHED,
    Op.SAMPLE: Buffer.TOKEN,
    Op.SETTLE: Buffer.DRAFT,
    Op.INNER: Buffer.VACT,
    Op.BINS: Buffer.BINS,
    Op.VALUE: Buffer.VALUE,
}


# ---------------------------------------------------------------- operands

# Operands of instructions, which the device does not check.

_LARGEST = 1 << (8 * WORD_BYTES - 1)
_UNUSED = Instruction(Op.COMMIT)
_USED = {
    Op.FC1: {"src", "block", "num_blocks", "num_chunks", "stage"},
    Op.QKV: {"src", "block", "num_blocks", "num_chunks", "stage"},
    Op.FC2: {"block", "num_blocks", "chunk", "num_chunks", "stage"},
    Op.ATTEND: {"block"},
    Op.OUT: {"src", "dst", "block", "num_blocks", "num_chunks", "stage"},
    Op.HEAD: {"src", "block", "num_blocks", "num_chunks", "stage"},
    Op.LISTEN: {"num_blocks"},
    Op.WEIGH: {"num_blocks"},
    Op.SAMPLE: {"block", "num_blocks", "only_draws"},
    Op.COMMIT: set(),
    Op.EMBED: {"dst", "block", "num_blocks"},
    Op.INNER: {"src", "block", "num_blocks"},
    Op.BINS: {"block", "num_blocks"},
    Op.VALUE: {"block", "num_blocks"},
    Op.SETTLE: {"block", "num_blocks"},
    Op.PLACE: {"num_blocks"},
    Op.MERGE: {"block"},
}
_OF_VALUES = {Op.EMBED, Op.INNER, Op.BINS, Op.VALUE}
_OF_DRAFTS = {Op.SETTLE, Op.PLACE}
_AFTER_LAYERS = {Op.LISTEN, Op.HEAD, Op.WEIGH, Op.SAMPLE, Op.COMMIT, Op.INNER, Op.BINS, Op.VALUE}
_AFTER_LAYERS |= _OF_DRAFTS
_FREE = {"op", "layer", "wait", "wait_count", "wait_stride", "signal"}


def _operand_fault(program: Program) -> str | None:
    """Return the first operand out of range, in words, or None."""
    sizes = program.sizes
    if len(program.workers) != sizes.num_workers or program.ring_stages < 2:
        return f"{len(program.workers)} workers with rings of {program.ring_stages} stages"
    for worker, instructions in enumerate(program.workers):
        if len(instructions) != len(program.workers[0]):
            return f"worker {worker} has {len(instructions)} instructions"
        stage = 0
        for index, it in enumerate(instructions):
            if problem := _first_problem(sizes, worker, it, stage):
                return f"worker {worker}, instruction {index}: {problem} in {it}"
            stage += it.num_stages
    return None


@functools.lru_cache(maxsize=1 << 16)
def _first_problem(sizes: ModelSizes, worker: int, it: Instruction, stage: int) -> str | None:
    """Return an instruction's first problem; cached, because mutants are mostly alike."""
    return next(_problems(sizes, worker, it, stage), None)


def _problems(sizes: ModelSizes, worker: int, it: Instruction, stage: int) -> Iterator[str]:
    if it.op not in list(Op):
        yield f"op {it.op}"
        return
    op = Op(it.op)
    yield from _missing(sizes, op)
    yield from _large(it)
    for field in dataclasses.fields(it):
        unused = field.name not in _FREE | _USED[op]
        if unused and getattr(it, field.name) != getattr(_UNUSED, field.name):
            yield f"{field.name} {getattr(it, field.name)}"
    if it.layer not in _layers(sizes, op):
        yield f"layer {it.layer}"
    yield from _wait_problems(sizes, op, it)
    yield from _buffer_problems(sizes, op, it)
    if {"block", "num_blocks"} & _USED[op]:
        yield from _block_problems(sizes, worker, op, it)
    if it.num_stages and it.stage != stage:
        yield f"stage {it.stage} instead of {stage}"


def _wait_problems(sizes: ModelSizes, op: Op, it: Instruction) -> Iterator[str]:
    for counter in (it.wait, it.signal):
        if counter != NONE and not 0 <= counter < num_counters(sizes):
            yield f"counter {counter}"
    if it.wait_count < 0 or it.wait_stride < 0:
        yield f"wait_count {it.wait_count} or wait_stride {it.wait_stride}"
    if op is Op.SAMPLE and it.only_draws != (it.num_blocks > 0):
        yield f"only_draws {it.only_draws}"


def _large(it: Instruction) -> Iterator[str]:
    for name in FIELDS:
        if not -_LARGEST <= getattr(it, name) < _LARGEST:
            yield f"{name} {getattr(it, name)} beyond {8 * WORD_BYTES} bits"


def _missing(sizes: ModelSizes, op: Op) -> Iterator[str]:
    if op in _OF_VALUES and sizes.values is None:
        yield f"op {op.name} without values"
    if op in _OF_DRAFTS and not sizes.drafts:
        yield f"op {op.name} without drafts"


def _layers(sizes: ModelSizes, op: Op) -> range:
    """Return the layers an instruction may belong to; work after the layers uses one more."""
    last = sizes.num_layers
    if op in _AFTER_LAYERS:
        return range(last, last + 1)
    return range(1 if op is Op.EMBED else last)


def _buffer_problems(sizes: ModelSizes, op: Op, it: Instruction) -> Iterator[str]:
    words = sizes.values is None  # any worker can read a word's whole embedding
    sources = {InputSource.X0, InputSource.X1} | ({InputSource.EMBED} if words else set())
    if "src" in _USED[op] and it.src not in sources:
        yield f"src {it.src}"
    if "dst" in _USED[op] and it.dst not in (InputSource.X0, InputSource.X1):
        yield f"dst {it.dst}"


def _blocks(sizes: ModelSizes) -> dict[Op, int]:
    """Return the number of blocks over all workers."""
    blocks = {Op.FC1: sizes.ff_dim // 16, Op.HEAD: sizes.vocab_blocks}
    if sizes.values is not None:
        blocks |= {Op.INNER: sizes.values.inner_blocks, Op.BINS: sizes.values.bin_blocks}
    return blocks


def _block_problems(sizes: ModelSizes, worker: int, op: Op, it: Instruction) -> Iterator[str]:
    own = {Op.QKV: 3, Op.FC2: 1, Op.OUT: 1, Op.ATTEND: 0, Op.MERGE: 0, Op.EMBED: 1}
    own[Op.SAMPLE] = own[Op.VALUE] = own[Op.SETTLE] = sizes.sampled_rows(worker)
    once = {Op.LISTEN: worker == 0, Op.PLACE: worker == 0, Op.WEIGH: True}
    if it.num_blocks != once.get(op, it.num_blocks):
        yield f"num_blocks {it.num_blocks}"
    if op in own and (it.block, it.num_blocks) != (worker, own[op]):
        yield f"block {it.block} and num_blocks {it.num_blocks}"
    most = _blocks(sizes).get(op)
    if most is not None:
        last = it.block + (it.num_blocks - 1) * sizes.num_workers
        if it.block < 0 or it.num_blocks < 1 or last >= most:
            yield f"block {it.block} and num_blocks {it.num_blocks}"
    if op is Op.FC1 and it.num_blocks > BLOCKS_AT_ONCE:
        yield f"num_blocks {it.num_blocks}"
    if op is Op.FC2:
        within = it.chunk >= 0 and it.chunk + it.num_chunks <= sizes.ff_ratio * sizes.chunks
        if it.num_chunks < 1 or not within:
            yield f"chunk {it.chunk} and num_chunks {it.num_chunks}"
    elif "num_chunks" in _USED[op] and it.num_chunks != sizes.chunks:
        yield f"num_chunks {it.num_chunks}"


# ---------------------------------------------------------------- validator

# Proof that a program computes its model's step, before it runs anywhere.
#
# For a program that is accepted, in every execution: no wait lasts for ever; every read finds the
# value that the model's definition wants there, written by an instruction that is over; nothing is
# overwritten while it may still be read, by the loaders' copies neither; every operand is in range.
#
# Three steps in a row are examined. The counters' targets grow by the same number each step, and a
# step begins when all workers have ended the last one's head, so that more steps repeat these.

STEPS = 3


class InvalidProgram(Exception):
    """A program that must not run; the text says where and why."""


def validate(program: Program, steps: int = STEPS) -> None:
    """Examine `steps` steps of a program, of launches that draw and of those that do not.

    Raises:
        InvalidProgram: it may wait for ever, read what is not there, or overwrite what is needed.
    """
    fault = _operand_fault(program)
    if fault:
        raise InvalidProgram(fault)
    for each in (program, _without_draws(program)):
        _examine(each, steps)


def _without_draws(program: Program) -> Program:
    """Return the program for launches of greedy rows only: it skips sampling."""
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
        for instructions in program.workers
    )
    return dataclasses.replace(program, workers=tuple(workers))


def _examine(program: Program, steps: int) -> None:
    try:
        order = Order(program, steps)
    except Stuck as stuck:
        raise InvalidProgram(str(stuck)) from stuck
    execution = _Execution(program, order)
    for event in order.events:
        execution.run(event)
    execution.end(steps)


@dataclasses.dataclass(slots=True)
class _Cells:
    """State of a buffer's cells: last writer, what it wrote, and each worker's last reader."""

    writer: np.ndarray
    event: np.ndarray
    version: list[Version]
    readers: np.ndarray

    @classmethod
    def make(cls, count: int, workers: int) -> _Cells:
        return cls(
            np.zeros(count, np.int32),
            np.full(count, -1, np.int32),
            [UNWRITTEN] * count,
            np.zeros((count, workers), np.int32),
        )


@dataclasses.dataclass(slots=True)
class _Worker:
    """State of a worker.

    A residual stream's moments, sums up to a chunk, whether a layer's heads are merged, which
    values a step needs, a step's token.
    """

    moments: Version = UNWRITTEN
    sums: Version = UNWRITTEN
    next_chunk: int = 0
    merged: Version = UNWRITTEN
    needed: Version = UNWRITTEN
    token: int = 0


class _Execution:
    """One execution, whose events are ordered as in all of them as far as `order` says."""

    def __init__(self, program: Program, order: Order) -> None:
        self._program, self._sizes, self._order = program, program.sizes, order
        sizes = program.sizes
        self._part_chunks = (1 + sizes.ff_ratio) * sizes.chunks // sizes.out_parts
        num = self._sizes.num_workers
        self._cells = {
            (Buffer.X0, 0, 0): _Cells.make(num, num),
            (Buffer.X1, 0, 0): _Cells.make(num, num),
            (Buffer.ACT, 0, 0): _Cells.make(self._sizes.ff_dim // 16, num),
            (Buffer.Q, 0, 0): _Cells.make(num, num),
            (Buffer.PART, 0, 0): _Cells.make(num, num),
            (Buffer.HEADS, 0, 0): _Cells.make(num, num),
            (Buffer.BEST, 0, 0): _Cells.make(num, num),
            (Buffer.LOGITS, 0, 0): _Cells.make(self._sizes.vocab_blocks, num),
            (Buffer.TOKEN, 0, 0): _Cells.make(MAX_TOKENS, num),
            (Buffer.STOP, 0, 0): _Cells.make(1, num),
        }
        if (values := self._sizes.values) is not None:
            self._cells |= {
                (Buffer.VACT, 0, 0): _Cells.make(values.inner_blocks, num),
                (Buffer.BINS, 0, 0): _Cells.make(values.bin_blocks, num),
                (Buffer.VALUE, 0, 0): _Cells.make(MAX_TOKENS, num),
            }
        if self._sizes.drafts:
            self._cells |= {
                (Buffer.DRAFT, 0, 0): _Cells.make(MAX_TOKENS, num),
                (Buffer.PLACED, 0, 0): _Cells.make(1, num),
            }
        self._workers = [_Worker() for _ in range(num)]
        self._chosen: list[range] = [range(0)] * num  # the blocks of each BEST
        self._ahead = [RunAhead(program, worker) for worker in range(num)]

    def run(self, event: Event) -> None:
        """Do an event's reads and writes."""
        instructions = self._program.workers[event.worker]
        step, index = divmod(event.index, len(instructions))
        it = instructions[index]
        where = f"worker {event.worker}, instruction {index} of step {step}, {Op(it.op).name}"
        for access in reads(self._sizes, event.worker, it, step):
            self._read(event, access, where)
        self._run_own(event.worker, it, step, where)
        for access in writes(self._sizes, event.worker, it, step):
            self._write(event, access, where)

    def end(self, steps: int) -> None:
        """Every worker has committed every step."""
        for number, worker in enumerate(self._workers):
            if worker.token != steps:
                raise InvalidProgram(f"worker {number} commits {worker.token} steps of {steps}")

    def _read(self, event: Event, access: Access, where: str) -> None:
        cells = self._find(access)
        index = _indices(access)
        begin = event
        if access.copied:
            begin = Event(event.worker, self._ahead[event.worker].begin(event.index))
        before = self._order.before(begin)
        if (cells.event[index] >= before[cells.writer[index]]).any():
            raise InvalidProgram(f"{where}: reads {access.buffer.name} that may not be written yet")
        for cell in range(access.first, access.first + access.count * access.stride, access.stride):
            if cells.version[cell] != access.version:
                raise InvalidProgram(
                    f"{where}: reads {access.buffer.name} {cell} of step and layer "
                    f"{cells.version[cell]} instead of {access.version}"
                )
        cells.readers[index, event.worker] = event.index + 1

    def _write(self, event: Event, access: Access, where: str) -> None:
        cells, index = self._find(access), _indices(access)
        before = self._order.before(event).copy()
        before[event.worker] = event.index + 1
        if (cells.event[index] >= before[cells.writer[index]]).any():
            raise InvalidProgram(f"{where}: writes {access.buffer.name} beside another writer")
        if (cells.readers[index] > before).any():
            raise InvalidProgram(f"{where}: writes {access.buffer.name} that may still be read")
        cells.writer[index], cells.event[index] = event.worker, event.index
        for cell in range(access.first, access.first + access.count * access.stride, access.stride):
            cells.version[cell] = access.version

    def _run_own(self, number: int, it: Instruction, step: int, where: str) -> None:
        """Check and change what the worker holds itself."""
        worker, version = self._workers[number], (step, it.layer)
        if it.src == InputSource.EMBED or it.op == Op.EMBED:
            _require(it.layer == 0 and worker.token == step, where, "embeds another step's token")
        self._run_layer(worker, it, version, where)
        if it.op == Op.SAMPLE and it.num_blocks:
            blocks = sorted(block for chosen in self._chosen for block in chosen)
            whole = blocks == list(range(self._sizes.vocab_blocks))
            _require(whole, where, "the head's blocks are not each computed once")
        elif it.op == Op.COMMIT:
            _require(worker.token == step, where, "commits the step again")
            worker.token = step + 1
        elif it.op in (Op.INNER, Op.BINS, Op.VALUE):
            _know_needed(worker, it, version, where)
        if it.op == Op.HEAD:
            stride = self._sizes.num_workers
            self._chosen[number] = range(it.block, it.block + it.num_blocks * stride, stride)

    def _run_layer(self, worker: _Worker, it: Instruction, version: Version, where: str) -> None:
        if it.op in (Op.FC1, Op.HEAD):
            worker.moments = version
        elif it.op == Op.QKV:
            _require(worker.moments == version, where, f"has the moments of {worker.moments}")
        elif it.op == Op.FC2:
            begun = worker.sums == version and worker.next_chunk == it.chunk
            _require(it.chunk == 0 or begun, where, f"adds to {worker.sums}")
            _require(self._may_add_parts(worker, it, version), where, "adds up parts at no barrier")
            worker.sums, worker.next_chunk = version, it.chunk + it.num_chunks
        elif it.op == Op.ATTEND:
            over = worker.next_chunk // self._part_chunks if worker.sums == version else 0
            _require(over <= 1, where, f"writes where {over} parts of sums lie")
        elif it.op == Op.MERGE:
            worker.merged = version
        elif it.op == Op.OUT:
            whole = worker.next_chunk == self._sizes.ff_ratio * self._sizes.chunks
            _require(worker.sums == version and whole, where, "lacks chunks of fc2")
            worker.sums = UNWRITTEN

    def _may_add_parts(self, worker: _Worker, it: Instruction, version: Version) -> bool:
        """Return whether a barrier separates stores of finished parts from the FC2 that adds them.

        MERGE has one.
        """
        last = it.chunk + it.num_chunks == self._sizes.ff_ratio * self._sizes.chunks
        return not last or it.chunk < self._part_chunks or worker.merged == version

    def _find(self, access: Access) -> _Cells:
        key = (access.buffer, access.layer, access.position)
        if key not in self._cells:
            num = self._sizes.num_workers
            self._cells[key] = _Cells.make(num, num)
        return self._cells[key]


def _know_needed(worker: _Worker, it: Instruction, version: Version, where: str) -> None:
    """Note that INNER finds the decoders that a step's tokens need."""
    if it.op == Op.INNER:
        worker.needed = version
    _require(worker.needed == version, where, f"knows what {worker.needed} needs")


def _indices(access: Access) -> slice:
    return slice(access.first, access.first + access.count * access.stride, access.stride)


def _require(condition: bool, where: str, problem: str) -> None:
    if not condition:
        raise InvalidProgram(f"{where}: {problem}")
