"""Operands of instructions: what the device takes without looking."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from legato_engine.resident.instructions import (
    FIELDS,
    NONE,
    WORD_BYTES,
    Instruction,
    Op,
    Source,
    num_counters,
)
from legato_engine.resident.program import Program
from legato_engine.resident.sizes import ModelSizes

BLOCKS_AT_ONCE = 4
"""Blocks of FC1 whose sums a worker's shared memory holds."""

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


def check_operands(program: Program) -> str | None:
    """The first operand out of range, in words, or None."""
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
    """Cached, as most instructions of a changed program are those of the unchanged one."""
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
    """Those of which an instruction may be; what follows the layers is of one more."""
    last = sizes.num_layers
    if op in _AFTER_LAYERS:
        return range(last, last + 1)
    return range(1 if op is Op.EMBED else last)


def _buffer_problems(sizes: ModelSizes, op: Op, it: Instruction) -> Iterator[str]:
    words = sizes.values is None  # whose embedding any worker can read whole
    sources = {Source.X0, Source.X1} | ({Source.EMBED} if words else set())
    if "src" in _USED[op] and it.src not in sources:
        yield f"src {it.src}"
    if "dst" in _USED[op] and it.dst not in (Source.X0, Source.X1):
        yield f"dst {it.dst}"


def _blocks(sizes: ModelSizes) -> dict[Op, int]:
    """Of all workers together."""
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
