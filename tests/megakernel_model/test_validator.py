"""Faults that the validator refuses; it refuses no program of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from legato_engine.kernels.megakernel.program import (
    NONE,
    CounterKind,
    InputSource,
    Instruction,
    Op,
    Program,
    build_program,
    counter,
)
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, MOONDREAM2, ModelSizes, ValueDims

from tests.megakernel_model.validator import InvalidProgram, validate

SMALL = ModelSizes(64, 2, 2, 128)
PARTED = ModelSizes(1024, 3, 1, 1024)
"""A layer's output is a sum of four parts, of two chunks each."""
DRAFTING = dataclasses.replace(SMALL, drafts=True)
VALUED = dataclasses.replace(SMALL, values=ValueDims(64, 32, 96))
BOTH = dataclasses.replace(VALUED, drafts=True)
Lists = list[list[Instruction]]


@pytest.mark.parametrize(
    "sizes",
    [
        SMALL,
        ModelSizes(128, 3, 1, 256),
        ModelSizes(64, 3, 5, 80),
        LEGATO_TINY,
        dataclasses.replace(MOONDREAM2, num_layers=1),
        VALUED,
        ModelSizes(64, 3, 5, 80, ValueDims(48, 48, 32)),
        dataclasses.replace(LEGATO_TINY, values=ValueDims(320, 1024, 2048)),
        DRAFTING,
        dataclasses.replace(LEGATO_TINY, drafts=True),
        BOTH,
        dataclasses.replace(LEGATO_TINY, values=ValueDims(320, 1024, 2048), drafts=True),
    ],
    ids=[
        "64",
        "128",
        "64x5",
        "tiny",
        "moondream2 of one layer",
        "64 with values",
        "64x5 with values",
        "tiny with values",
        "64 with drafts",
        "tiny with drafts",
        "64 with both",
        "tiny with both",
    ],
)
def test_programs_of_models_are_accepted(sizes: ModelSizes) -> None:
    """Every program that the generator makes is valid, over more steps than are examined."""
    program = build_program(sizes, 4 if sizes.dim <= 128 else 12)
    validate(program)


def test_more_steps_are_as_valid_as_three() -> None:
    """The examined steps stand for those after them."""
    validate(build_program(SMALL, 4), steps=7)
    validate(build_program(VALUED, 4), steps=7)
    validate(build_program(DRAFTING, 4), steps=7)
    validate(build_program(BOTH, 4), steps=7)


def test_a_ring_that_holds_a_whole_layer_twice_is_refused() -> None:
    """A loader so far ahead copies keys and values before they are written."""
    with pytest.raises(InvalidProgram, match="ATTEND: reads KV that may not be written"):
        validate(build_program(dataclasses.replace(SMALL, num_layers=1), 40))


def test_with_drafts_a_ring_of_any_size_waits_for_a_steps_tokens() -> None:
    """Their keys and values are copied after the step before is over everywhere."""
    validate(build_program(dataclasses.replace(DRAFTING, num_layers=1), 40))


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op.SETTLE, "SETTLE: reads TOKEN"),
        (Op.COMMIT, "COMMIT: reads PLACED"),
    ],
    ids=lambda each: each.name if isinstance(each, Op) else "",
)
def test_a_wait_of_drafts_that_is_dropped_is_refused(op: Op, text: str) -> None:
    with pytest.raises(InvalidProgram, match=text):
        _validate_changed(op, _without_wait, sizes=DRAFTING)


@pytest.mark.parametrize(
    ("op", "kind", "text"),
    [
        (Op.SETTLE, CounterKind.TOKEN, "SETTLE: reads VALUE"),
        (Op.COMMIT, CounterKind.VALUE, "COMMIT: reads PLACED"),
    ],
    ids=lambda each: each.name if isinstance(each, Op) else "",
)
def test_a_wait_for_what_comes_before_values_or_drafts_is_refused(
    op: Op, kind: CounterKind, text: str
) -> None:
    """With both each has a hop of its own."""
    which = counter(BOTH, kind)
    with pytest.raises(InvalidProgram, match=text):
        _validate_changed(op, lambda it: dataclasses.replace(it, wait=which), sizes=BOTH)


def test_tokens_that_are_placed_before_rows_are_settled_are_refused() -> None:
    program = build_program(DRAFTING, 4)
    workers: Lists = [list(instructions) for instructions in program.workers]
    index = next(i for i, it in enumerate(workers[0]) if it.op == Op.PLACE)
    workers[0][index] = _without_wait(workers[0][index])
    with pytest.raises(InvalidProgram, match="PLACE: reads DRAFT"):
        validate(Program(DRAFTING, 4, tuple(map(tuple, workers))))


@pytest.mark.parametrize("op", [Op.SETTLE, Op.PLACE], ids=lambda op: op.name)
def test_a_program_without_drafts_has_none_of_their_instructions(op: Op) -> None:
    with pytest.raises(InvalidProgram, match="without drafts"):
        _validate_changed(Op.LISTEN, lambda it: dataclasses.replace(it, op=op))


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        (Op.SETTLE, {"num_blocks": 1}),
        (Op.SETTLE, {"layer": 0}),
        (Op.PLACE, {"num_blocks": 1}),
        (Op.PLACE, {"src": 0}),
    ],
    ids=str,
)
def test_an_operand_of_drafts_out_of_range_is_refused(op: Op, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidProgram, match=r"instruction \d+: "):
        _validate_changed(op, lambda it: _with(it, fields), sizes=DRAFTING)


def test_a_wait_for_too_many_signals_is_refused() -> None:
    """The text names the worker, the instruction and the counter."""
    with pytest.raises(InvalidProgram, match=r"worker 1 waits at instruction 6 .* 5 signals"):
        _validate_changed(Op.OUT, lambda it: dataclasses.replace(it, wait_count=5))


def test_a_wait_for_the_first_of_several_signals_is_refused() -> None:
    """Three of four signals say nothing about any one of them."""
    with pytest.raises(InvalidProgram, match="OUT: reads HEADS that may not be written yet"):
        _validate_changed(Op.OUT, lambda it: dataclasses.replace(it, wait_count=3))


def test_a_missing_signal_is_refused() -> None:
    """The others wait for it for ever."""
    with pytest.raises(InvalidProgram, match=r"counter \d+, which gets"):
        _validate_changed(Op.FC1, lambda it: dataclasses.replace(it, signal=NONE))


def test_attention_of_another_buffer_is_refused() -> None:
    """A norm of the buffer that this layer's output goes to finds another layer's values."""
    with pytest.raises(InvalidProgram, match="FC1: reads X0"):
        _validate_changed(Op.FC1, lambda it: dataclasses.replace(it, src=InputSource.X0), which=1)


@pytest.mark.parametrize(
    ("chunks", "merges_first", "text"),
    [
        ((4, 1, 1), True, "ATTEND: writes where 2 parts"),
        ((3, 1, 2), False, "FC2: adds up parts at no barrier"),
    ],
    ids=["attention", "merge"],
)
def test_parts_are_added_up_where_all_warps_have_stored_them(
    chunks: tuple[int, ...], merges_first: bool, text: str
) -> None:
    """Not beyond a barrier, nor from under attention's results."""
    program = build_program(PARTED, 4)
    workers: Lists = [list(instructions) for instructions in program.workers]
    own = workers[1]
    indices = [i for i, it in enumerate(own) if it.op == Op.FC2]
    stage, chunk = own[indices[0]].stage, 0
    for index, count in zip(indices, chunks, strict=True):
        own[index] = _with(
            own[index], {"chunk": chunk, "num_chunks": count, "stage": stage + chunk}
        )
        chunk += count
    if not merges_first:
        own[indices[2] - 1], own[indices[2]] = own[indices[2]], own[indices[2] - 1]
    with pytest.raises(InvalidProgram, match=text):
        validate(Program(PARTED, 4, tuple(map(tuple, workers))))


def test_a_wait_that_is_dropped_is_refused() -> None:
    """Without its wait a product of attention's results may come first."""
    with pytest.raises(InvalidProgram, match="OUT: reads HEADS"):
        _validate_changed(Op.OUT, _without_wait)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op.FC1, "FC1: reads X0 that may not be written"),
        (Op.INNER, "INNER: reads TOKEN"),
        (Op.BINS, "BINS: reads VACT"),
        (Op.VALUE, "VALUE: reads BINS that may not be written"),
        (Op.COMMIT, "COMMIT: reads VALUE"),
    ],
    ids=lambda each: each.name if isinstance(each, Op) else "",
)
def test_a_wait_of_values_that_is_dropped_is_refused(op: Op, text: str) -> None:
    """Each hop between reading values and feeding them back has its own."""
    with pytest.raises(InvalidProgram, match=text):
        _validate_changed(op, _without_wait, sizes=VALUED)


def test_a_commit_that_waits_for_tokens_alone_is_refused() -> None:
    """Values come after them."""
    token = counter(VALUED, CounterKind.TOKEN)
    with pytest.raises(InvalidProgram, match="COMMIT: reads VALUE"):
        _validate_changed(Op.COMMIT, lambda it: dataclasses.replace(it, wait=token), sizes=VALUED)


def test_decoders_that_are_not_known_to_be_needed_are_refused() -> None:
    """BINS before INNER would take those of the step before."""
    program = build_program(VALUED, 4)
    workers: Lists = [list(instructions) for instructions in program.workers]
    for worker, instructions in enumerate(workers):
        inner = next(i for i, it in enumerate(instructions) if it.op == Op.INNER)
        listens = {"op": Op.LISTEN, "src": NONE, "block": 0, "num_blocks": int(worker == 0)}
        instructions[inner] = dataclasses.replace(instructions[inner], **listens)
    with pytest.raises(InvalidProgram, match=r"BINS: (reads VACT|knows what)"):
        validate(Program(VALUED, 4, tuple(map(tuple, workers))))


@pytest.mark.parametrize("op", [Op.EMBED, Op.INNER, Op.BINS, Op.VALUE], ids=lambda op: op.name)
def test_a_program_of_words_has_no_instruction_of_values(op: Op) -> None:
    with pytest.raises(InvalidProgram, match="without values"):
        _validate_changed(Op.LISTEN, lambda it: dataclasses.replace(it, op=op))


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        (Op.EMBED, {"dst": InputSource.EMBED}),
        (Op.EMBED, {"layer": 1}),
        (Op.FC1, {"src": InputSource.EMBED}),
        (Op.INNER, {"num_blocks": 9}),
        (Op.INNER, {"num_chunks": 1}),
        (Op.INNER, {"src": InputSource.EMBED}),
        (Op.BINS, {"num_blocks": 9}),
        (Op.BINS, {"layer": 0}),
        (Op.VALUE, {"num_blocks": 9}),
        (Op.VALUE, {"src": 0}),
    ],
    ids=str,
)
def test_an_operand_of_values_out_of_range_is_refused(op: Op, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidProgram, match=r"instruction \d+: "):
        _validate_changed(op, lambda it: _with(it, fields), sizes=VALUED)


def test_an_inner_block_that_is_not_computed_is_refused() -> None:
    with pytest.raises(InvalidProgram, match="BINS: reads VACT"):
        _validate_changed(Op.INNER, lambda it: _with(it, {"num_blocks": 1}), sizes=VALUED)


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        (Op.FC1, {"src": 3}),
        (Op.OUT, {"dst": InputSource.EMBED}),
        (Op.FC1, {"block": 7}),
        (Op.FC1, {"num_chunks": 2}),
        (Op.FC2, {"chunk": 2}),
        (Op.QKV, {"num_blocks": 2}),
        (Op.HEAD, {"num_blocks": 3}),
        (Op.QKV, {"layer": 2}),
        (Op.SAMPLE, {"layer": 0}),
        (Op.SAMPLE, {"num_blocks": 9}),
        (Op.LISTEN, {"num_blocks": 1}),
        (Op.FC1, {"signal": 1000}),
        (Op.FC1, {"stage": 1}),
        (Op.COMMIT, {"src": 0}),
        (len(Op), {}),
    ],
    ids=str,
)
def test_an_operand_out_of_range_is_refused(op: int, fields: dict[str, int]) -> None:
    """No field may have a value that the device would take unseen."""
    fields = fields or {"op": op}
    with pytest.raises(InvalidProgram, match="instruction"):
        _validate_changed(op if op in list(Op) else Op.FC1, lambda it: _with(it, fields))


def test_lists_of_another_length_are_refused() -> None:
    """The device's table has one length."""
    program = build_program(SMALL, 4)
    shorter = (program.workers[0][:-1], *program.workers[1:])
    with pytest.raises(InvalidProgram, match="instructions"):
        validate(dataclasses.replace(program, workers=shorter))


def _validate_changed(
    op: int,
    change: Callable[[Instruction], Instruction],
    which: int = 0,
    sizes: ModelSizes = SMALL,
) -> None:
    """Validate a program with one of worker 1's instructions of this op changed."""
    program = build_program(sizes, 4)
    workers: Lists = [list(instructions) for instructions in program.workers]
    index = [i for i, it in enumerate(workers[1]) if it.op == op][which]
    workers[1][index] = change(workers[1][index])
    validate(Program(program.sizes, program.ring_stages, tuple(map(tuple, workers))))


def _with(it: Instruction, fields: dict[str, int]) -> Instruction:
    return dataclasses.replace(it, **fields)


def _without_wait(it: Instruction) -> Instruction:
    return dataclasses.replace(it, wait=NONE, wait_count=0, wait_stride=0)
