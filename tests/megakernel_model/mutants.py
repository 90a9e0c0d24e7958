"""Programs with a planted fault, or several."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from legato_engine.kernels.megakernel.program import NONE, Instruction, Program, num_counters

Lists = list[list[Instruction]]


def mutate(program: Program, chance: random.Random) -> Program:
    """One to three random changes."""
    workers = [list(instructions) for instructions in program.workers]
    ring = program.ring_stages
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if chance.random() < 0.03:
            ring = chance.choice((1, 2, 20, 60, 200))
        else:
            chance.choice(_CHANGES)(program, workers, chance)
    if chance.random() < 0.7:
        workers = [_numbered(instructions) for instructions in workers]
    return Program(program.sizes, ring, tuple(map(tuple, workers)))


def _change_field(program: Program, workers: Lists, chance: random.Random) -> None:
    """Change one field of one worker's instruction, or of all workers'."""
    worker, index = _place(workers, chance)
    it = workers[worker][index]
    field = chance.choice(dataclasses.fields(it)).name
    old = getattr(it, field)
    other = getattr(workers[chance.randrange(len(workers))][chance.randrange(index + 1)], field)
    new = chance.choice((old + 1, old - 1, 0, NONE, other))
    everywhere = chance.random() < 0.4
    for number, instructions in enumerate(workers):
        if number == worker or (everywhere and index < len(instructions)):
            instructions[index] = dataclasses.replace(instructions[index], **{field: new})


def _change_counter(program: Program, workers: Lists, chance: random.Random) -> None:
    """Replace a counter to wait for or to signal, maybe by none."""
    worker, index = _place(workers, chance)
    it = workers[worker][index]
    which = NONE if chance.random() < 0.5 else chance.randrange(num_counters(program.sizes))
    field = "wait" if it.wait != NONE and chance.random() < 0.7 else "signal"
    workers[worker][index] = dataclasses.replace(it, **{field: which})


def _drop_wait(program: Program, workers: Lists, chance: random.Random) -> None:
    """One wait less, for a worker or for all."""
    del program
    worker, index = _place(workers, chance)
    everywhere = chance.random() < 0.5
    for number, instructions in enumerate(workers):
        if (number == worker or everywhere) and index < len(instructions):
            it = dataclasses.replace(instructions[index], wait=NONE, wait_count=0, wait_stride=0)
            instructions[index] = it


def _weaken_wait(program: Program, workers: Lists, chance: random.Random) -> None:
    """Fewer signals, or more."""
    del program
    worker, index = _place(workers, chance)
    it = workers[worker][index]
    count = it.wait_count + chance.choice((-2, -1, 1, it.wait_stride))
    stride = it.wait_stride if chance.random() < 0.7 else it.wait_stride + chance.choice((-1, 1))
    workers[worker][index] = dataclasses.replace(it, wait_count=count, wait_stride=stride)


def _swap(program: Program, workers: Lists, chance: random.Random) -> None:
    """Two neighbours in another order, for a worker or for all."""
    del program
    worker, index = _place(workers, chance)
    everywhere = chance.random() < 0.5
    for number, instructions in enumerate(workers):
        if (number == worker or everywhere) and index + 1 < len(instructions):
            pair = instructions[index : index + 2]
            instructions[index : index + 2] = pair[::-1]


def _swap_apart(program: Program, workers: Lists, chance: random.Random) -> None:
    """Two instructions of a worker in each other's place, or two workers' of the same place."""
    del program
    worker, index = _place(workers, chance)
    other = chance.randrange(len(workers)) if chance.random() < 0.5 else worker
    to = min(index, len(workers[other]) - 1) if other != worker else _place(workers, chance)[1]
    to = min(to, len(workers[other]) - 1)
    one, two = workers[worker][index], workers[other][to]
    workers[worker][index], workers[other][to] = two, one


def _drop(program: Program, workers: Lists, chance: random.Random) -> None:
    """One instruction less for all workers, so that the lists stay as long as each other."""
    del program
    _, index = _place(workers, chance)
    for instructions in workers:
        del instructions[index]


def _repeat(program: Program, workers: Lists, chance: random.Random) -> None:
    """Repeat an instruction, for all workers."""
    del program
    _, index = _place(workers, chance)
    for instructions in workers:
        instructions.insert(index, instructions[index])


_CHANGES: tuple[Callable[[Program, Lists, random.Random], None], ...] = (
    _change_field,
    _change_field,
    _change_counter,
    _drop_wait,
    _weaken_wait,
    _swap,
    _swap_apart,
    _drop,
    _repeat,
)


def _place(workers: Lists, chance: random.Random) -> tuple[int, int]:
    worker = chance.randrange(len(workers))
    return worker, chance.randrange(len(workers[worker]))


def _numbered(instructions: list[Instruction]) -> list[Instruction]:
    numbered, stage = [], 0
    for it in instructions:
        at = stage if it.num_stages else 0
        numbered.append(it if it.stage == at else dataclasses.replace(it, stage=at))
        stage += it.num_stages
    return numbered
