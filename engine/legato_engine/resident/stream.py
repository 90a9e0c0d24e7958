"""Which weights a stage of a worker's stream holds: the order in which they are packed.

A stage is a block of 16 rows of one matrix by a chunk of its inputs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from legato_engine.resident.instructions import Instruction, Op
from legato_engine.resident.program import Program
from legato_engine.resident.sizes import BLOCK, HEAD_DIM, ROTARY_DIM, SPLITS


class Matrix(enum.Enum):
    """Weights of a model, by the names of their outputs."""

    FC1 = "fc1"
    QKV = "qkv"
    FC2 = "fc2"
    PROJ = "proj"
    HEAD = "lm_head"


MATRICES = {
    Op.FC1: Matrix.FC1,
    Op.QKV: Matrix.QKV,
    Op.FC2: Matrix.FC2,
    Op.OUT: Matrix.PROJ,
    Op.HEAD: Matrix.HEAD,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """`layer` is the number of layers for the head."""

    matrix: Matrix
    layer: int
    block: int
    chunk: int


def instruction_stages(instruction: Instruction, num_workers: int) -> Iterator[Stage]:
    """The stages of an instruction in the order of the stream: block after block."""
    if instruction.num_stages == 0:
        return
    matrix = MATRICES[Op(instruction.op)]
    for index in range(instruction.num_blocks):
        block = instruction.block + index * num_workers
        for chunk in range(instruction.chunk, instruction.chunk + instruction.num_chunks):
            yield Stage(matrix, instruction.layer, block, chunk)


def worker_stages(program: Program, worker: int) -> list[Stage]:
    """A worker's whole stream."""
    num_workers = program.sizes.num_workers
    return [
        stage
        for instruction in program.workers[worker]
        for stage in instruction_stages(instruction, num_workers)
    ]


def qkv_rows(block: int) -> list[int]:
    """Rows of the joint query, key and value map in a block, in its order.

    The rotated pairs (i, i + 16) of a head's first 32 rows are rows g and g + 8 of a block.
    """
    head, part = divmod(block, SPLITS)
    first, half = head * HEAD_DIM, ROTARY_DIM // 2
    if part < ROTARY_DIM // BLOCK:
        low = range(first + part * 8, first + part * 8 + 8)
        return [*low, *(row + half for row in low)]
    return list(range(first + part * BLOCK, first + (part + 1) * BLOCK))
