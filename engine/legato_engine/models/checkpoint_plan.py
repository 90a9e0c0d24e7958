"""The strict match of stored tensors with parameters, from headers alone."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from legato_engine.errors import InvalidField
from legato_engine.models.checkpoint_files import Header

_MAX_NAMED = 20  # problems that an error spells out; more are counted
_CAST = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class Destination(NamedTuple):
    """The parameter that a stored tensor fills, whole or from `first_row`.

    `transposed`: the file swaps rows and columns. `flat`: the file may have any shape.
    """

    name: str
    first_row: int | None = None
    transposed: bool = False
    flat: bool = False


Rename = Callable[[str], str | Destination | None]
"""Maps a stored name to its destination; None: known and unused."""


class Move(NamedTuple):
    """A stored tensor and its destination."""

    header: Header
    destination: Destination

    @property
    def shape(self) -> tuple[int, ...]:
        if self.destination.flat:
            return (math.prod(self.header.shape),)
        return self.header.shape[::-1] if self.destination.transposed else self.header.shape

    @property
    def source(self) -> str:
        return f"{self.header.name} in {self.header.file.name}"

    @property
    def label(self) -> str:
        """The stored name, and the parameter's if that differs by more than a prefix."""
        stored, name = self.header.name, self.destination.name
        return name if stored.endswith(name) else f"{stored} ({name})"

    def rows(self, full: Sequence[int]) -> range:
        if self.destination.first_row is None:
            return range(*full[:1] or (1,))
        return range(self.destination.first_row, self.destination.first_row + (*self.shape, 1)[0])


def plan(network: nn.Module, headers: Iterable[Header], rename: Rename) -> tuple[Move, ...]:
    """Assign stored tensors their destinations, in the order of the headers.

    Raises:
        InvalidField: tensors are missing, unknown, given twice, or of a wrong shape or dtype.
    """
    expected: dict[str, torch.Tensor] = network.state_dict()
    moves = tuple(_moves(headers, rename))
    problems = _problems(moves, expected)
    if problems:
        raise InvalidField(_summary(problems), field="weights", problems=len(problems))
    return moves


def _moves(headers: Iterable[Header], rename: Rename) -> Iterator[Move]:
    for header in headers:
        destination = rename(header.name)
        if destination is not None:
            yield Move(
                header, Destination(destination) if isinstance(destination, str) else destination
            )


def _problems(moves: Iterable[Move], expected: Mapping[str, torch.Tensor]) -> list[str]:
    by_destination: dict[str, list[Move]] = {name: [] for name in expected}
    unknown: list[Move] = []
    for move in moves:
        by_destination.get(move.destination.name, unknown).append(move)
    found: list[str] = []
    for name, given in sorted(by_destination.items()):
        found += _of_parameter(name, given, expected[name])
    return found + list(_of_unknown(sorted(unknown), expected))


def _of_parameter(name: str, given: list[Move], wanted: torch.Tensor) -> list[str]:
    full = tuple(wanted.shape)
    if not given:
        return [f"{name}: missing, expected {list(full)}"]
    if problems := [problem for move in given if (problem := _misfit(move, wanted))]:
        return problems
    given = sorted(given, key=lambda move: (move.rows(full).start, move.source))
    if twice := [
        f"{name}: given twice, as {before.source} and {after.source}"
        for before, after in itertools.pairwise(given)
        if after.rows(full).start < before.rows(full).stop
    ]:
        return twice
    lacking = (*full, 1)[0] - sum(len(move.rows(full)) for move in given)
    return [f"{name}: {lacking} of its {full[0]} rows are missing"] if lacking else []


def _misfit(move: Move, wanted: torch.Tensor) -> str | None:
    full = tuple(wanted.shape)
    if move.destination.first_row is None:
        fits, shape = move.shape == full, list(full[::-1] if move.destination.transposed else full)
        expected = str(shape)
    else:
        fits = move.shape[1:] == full[1:] and move.rows(full).stop <= full[0]
        expected = f"rows from {move.destination.first_row} on of {list(full)}"
    if not fits:
        return f"{move.label}: shape {list(move.header.shape)}, expected {expected}"
    if move.header.dtype != wanted.dtype and not {move.header.dtype, wanted.dtype} <= _CAST:
        stored, runs = dtype_name(move.header.dtype), dtype_name(wanted.dtype)
        return f"{move.label}: stored as {stored}, which is not cast to {runs}"
    return None


def _of_unknown(moves: Iterable[Move], expected: Mapping[str, torch.Tensor]) -> Iterator[str]:
    for index, move in enumerate(moves):
        if index < _MAX_NAMED:  # the search compares with every name
            nearest = difflib.get_close_matches(move.destination.name, expected, n=1, cutoff=0.0)[0]
            yield f"{move.label}: unknown, the nearest expected name is {nearest}"
        else:
            yield f"{move.label}: unknown"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _summary(problems: Sequence[str]) -> str:
    lines = [f"the checkpoint does not fit the model in {len(problems)} tensors:"]
    lines += [f"  {problem}" for problem in problems[:_MAX_NAMED]]
    if len(problems) > _MAX_NAMED:
        lines.append(f"  and {len(problems) - _MAX_NAMED} more")
    return "\n".join(lines)
