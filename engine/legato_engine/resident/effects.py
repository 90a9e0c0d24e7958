"""What instructions read and write, in cells, and which values they have to find there.

A cell is a block of 16 outputs of a buffer, for all rows. Its version says which value it holds:
step and layer. The cells of PART, BEST, WEIGHED and HEADS are workers (of HEADS: what a worker
merges), those of TOKEN and VALUE tokens, those of DRAFT rows; STOP and PLACED have one.

A program with drafts is examined with the draft tokens that reuse most memory: each step writes two
positions of a row, the second of which the next step writes again, as its token was wrong.
"""

from __future__ import annotations

import dataclasses
import enum

from legato_engine.resident.instructions import Instruction, Op, Source
from legato_engine.resident.sizes import BLOCK, MAX_ROWS, SPLITS, ModelSizes, ValueDims

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
    step on. `copied`: the producer reads it, as early as its ring allows.
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
    """What an instruction reads of other workers' results."""
    everybody, version = sizes.num_workers, (step, it.layer)
    match it.op:
        case Op.FC1 | Op.QKV | Op.HEAD if it.src != Source.EMBED:
            return [Access(Buffer(it.src), 0, everybody, version)]
        case Op.FC2:
            blocks = sizes.chunk // BLOCK
            return [Access(Buffer.ACT, it.chunk * blocks, it.num_chunks * blocks, version)]
        case Op.ATTEND | Op.MERGE:
            return _head_reads(sizes, worker, it, step)
        case Op.OUT:
            merged = Access(Buffer.HEADS, 0, everybody, version)
            if it.src == Source.EMBED:
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
    """A step's tokens, and their values."""
    buffers = [Buffer.TOKEN] if sizes.values is None else [Buffer.TOKEN, Buffer.VALUE]
    return [Access(buffer, 0, MAX_ROWS, version) for buffer in buffers]


def _sampling_reads(sizes: ModelSizes, it: Instruction, version: Version) -> list[Access]:
    """Of greedy rows the best alone."""
    everybody = sizes.num_workers
    best = Access(Buffer.BEST, 0, everybody, version)
    logits = Access(Buffer.LOGITS, 0, sizes.vocab_blocks, version)
    if it.op == Op.WEIGH:
        return [best, logits]
    weighed = Access(Buffer.WEIGHED, 0, everybody, version)
    return [best, logits, weighed] if it.only_draws else [best]


def _head_reads(sizes: ModelSizes, worker: int, it: Instruction, step: int) -> list[Access]:
    """What the workers of the head have left, keys and values of all positions among it."""
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
            tokens = Access(Buffer.TOKEN, 0, MAX_ROWS, version)
            drafts = Access(Buffer.DRAFT, 0, MAX_ROWS, version)
            return [tokens, drafts, Access(Buffer.STOP, 0, 1, version)]
        case Op.COMMIT:
            newest = Access(Buffer.DRAFT, 0, MAX_ROWS, version)
            return [*_chosen(sizes, version), Access(Buffer.PLACED, 0, 1, version), newest]
    return []


def _value_reads(
    sizes: ModelSizes, values: ValueDims, it: Instruction, version: Version
) -> list[Access]:
    match it.op:
        case Op.INNER:
            hidden = Access(Buffer(it.src), 0, sizes.num_workers, version)
            return [Access(Buffer.TOKEN, 0, MAX_ROWS, version), hidden]
        case Op.BINS:
            return [Access(Buffer.VACT, 0, values.inner_blocks, version)]
        case Op.VALUE if it.num_blocks:
            logits = Access(Buffer.LOGITS, 0, sizes.vocab_blocks, version)
            return [Access(Buffer.BINS, 0, values.bin_blocks, version), logits]
    return []


def writes(sizes: ModelSizes, worker: int, it: Instruction, step: int) -> list[Access]:
    """What an instruction leaves for other workers."""
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
            drafts = Access(Buffer.DRAFT, 0, MAX_ROWS, version)  # block sizes
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
