"""The program of a step, and what the device knows of it."""

from __future__ import annotations

import dataclasses
import importlib.resources
from typing import Any

import pytest
from legato_engine.kernels.megakernel import program as header
from legato_engine.kernels.megakernel.program import (
    FIELDS,
    WORDS,
    Matrix,
    Op,
    build_program,
    max_instructions,
    qkv_rows,
    worker_stages,
)
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, MOONDREAM2, ModelSizes, ValueDims

_VALUES = ValueDims(inner_dim=8192, scalar_bins=1024, pair_bins=2048)


def test_the_header_on_disk_is_the_one_that_is_generated() -> None:
    """The device's constants and its instruction have not drifted from the program's."""
    file = importlib.resources.files("legato_engine.kernels.megakernel") / "sources" / header.FILE
    assert file.read_text() == header.header()


@pytest.mark.parametrize("sizes", [MOONDREAM2, LEGATO_TINY], ids=["moondream2", "tiny"])
def test_every_weight_is_streamed_once(sizes: ModelSizes) -> None:
    """The workers' streams hold every block and chunk of every matrix once."""
    program = build_program(sizes, 12)
    stages = [
        stage for worker in range(sizes.num_workers) for stage in worker_stages(program, worker)
    ]
    assert len(set(stages)) == len(stages)
    blocks = {
        Matrix.FC1: (sizes.num_layers * sizes.ff_dim, sizes.chunks),
        Matrix.QKV: (sizes.num_layers * 3 * sizes.dim, sizes.chunks),
        Matrix.FC2: (sizes.num_layers * sizes.dim, sizes.chunks * sizes.ff_ratio),
        Matrix.PROJ: (sizes.num_layers * sizes.dim, sizes.chunks),
        Matrix.HEAD: (sizes.vocab_size, sizes.chunks),
    }
    for matrix, (rows, chunks) in blocks.items():
        count = sum(stage.matrix is matrix for stage in stages)
        assert count == rows // 16 * chunks, matrix


@pytest.mark.parametrize("layers", [1, 3, 24])
def test_no_worker_has_more_instructions_than_its_layers_allow(layers: int) -> None:
    """Those of a program with values and drafts are the most."""
    sizes = dataclasses.replace(MOONDREAM2, num_layers=layers)
    kinds = (
        sizes,
        dataclasses.replace(sizes, drafts=True),
        dataclasses.replace(sizes, values=_VALUES),
        dataclasses.replace(sizes, values=_VALUES, drafts=True),
    )
    counts = [max(map(len, build_program(each, 12).workers)) for each in kinds]
    assert max(counts) == max_instructions(layers)


def test_moondream_workers_have_the_same_work() -> None:
    """Every worker of Moondream 2 streams the same number of stages."""
    program = build_program(MOONDREAM2, 12)
    counts = {program.stream_stages(worker) for worker in range(MOONDREAM2.num_workers)}
    assert counts == {24 * (16 + 12 + 16 + 4) + 100}


def test_rows_of_a_head_are_in_one_of_its_blocks_each() -> None:
    """The blocks of the query, key and value map hold every row once, rotated pairs together."""
    rows = [row for block in range(3 * LEGATO_TINY.num_workers) for row in qkv_rows(block)]
    assert sorted(rows) == list(range(3 * LEGATO_TINY.dim))
    for block in range(3 * LEGATO_TINY.num_workers):
        if block % 4 < 2:
            low, high = qkv_rows(block)[:8], qkv_rows(block)[8:]
            assert [row + 16 for row in low] == high


def test_a_table_has_every_field_of_every_instruction() -> None:
    """The device's words are the program's fields."""
    sizes = ModelSizes(64, 2, 1, 128)
    program = build_program(sizes, 4)
    table = program.table()
    length = len(program.workers[0])
    assert len(table) == sizes.num_workers * length * WORDS
    for worker, instructions in enumerate(program.workers):
        for index, it in enumerate(instructions):
            first = (worker * length + index) * WORDS
            words = table[first : first + WORDS]
            assert words == [*dataclasses.astuple(it), *[0] * (WORDS - len(FIELDS))]


def test_a_shorter_list_ends_in_words_that_are_no_instruction() -> None:
    """Lists that are not as long as the longest are filled with an op that there is not."""
    program = build_program(ModelSizes(64, 2, 1, 128), 4)
    shorter = program.workers[0][:-1]
    uneven = dataclasses.replace(program, workers=(shorter, *program.workers[1:]))
    length = len(program.workers[1])
    filled = uneven.table()[(length - 1) * WORDS : length * WORDS]
    assert set(filled) == {-1}
    assert -1 not in list(Op)


@pytest.mark.parametrize(
    "sizes",
    [
        (100, 4, 1, 512),
        (128, 1, 1, 512),
        (128, 2, 0, 512),
        (128, 2, 1, 120),
        (128, 2, 1, 512, ValueDims(48, 512, 512)),
        (128, 2, 1, 512, ValueDims(64, 32, 64)),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[Any, ...]) -> None:
    """A model that the workers cannot share evenly is an error."""
    with pytest.raises(ValueError, match=r"is not a multiple|too small|too few"):
        ModelSizes(*sizes)
