"""Autotuning: choice between megakernel and captured graph by measured step time.

Both paths give the same bits, so the choice affects speed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import msgspec

from legato_engine.kernels.cache import cache_folder, store
from legato_engine.kernels.decode_loop import BatchKind, Build

_TURNS = 3  # of both paths; the shortest step of each counts


Seconds = Annotated[float, msgspec.Meta(gt=0.0)]


class StepTimes(msgspec.Struct, frozen=True, order=True):
    """Times of a step in the megakernel (`resident`) and in a captured loop.

    All rows are `drawn`, or all greedy; with `common` they share an image's pages.
    """

    kind: BatchKind
    rows: int
    drawn: bool
    common: bool
    resident: Seconds
    loop: Seconds


Timer = Callable[..., float]
"""Measure a step's seconds: a kind and its rows, all `drawn` or all greedy, with pages in `common`
or none, `in_megakernel` or captured.
"""


class PathTable:
    """Decides by measured times which eligible launches use the megakernel.

    Between measured row counts the next larger one decides; launches beyond get the `default`.
    """

    def __init__(self, times: Iterable[StepTimes] = (), *, default: bool = False) -> None:
        self.times = tuple(sorted(times))
        self._default = default

    def takes(self, kind: BatchKind, num_rows: int, *, drawn: bool, common: bool) -> bool:
        """`drawn`: a row samples. `common`: most rows share leading pages with the row before."""
        wanted = kind, drawn, common and _may_share(kind, num_rows)
        same = (each for each in self.times if (each.kind, each.drawn, each.common) == wanted)
        least = next((each for each in same if each.rows >= num_rows), None)
        return self._default if least is None else _wins(least)

    def wanted(self, builds: Sequence[Build]) -> tuple[Build, ...]:
        """List the builds that launches need, sampled or greedy."""
        wins = {(each.kind, each.rows) for each in self.times if _wins(each)}
        return tuple(
            build
            for build in builds
            if any((each.kind, each.rows) in wins for each in _measured_by(build, builds))
        )

    def milliseconds(self) -> list[dict[str, str | int | float]]:
        return [
            {
                **msgspec.structs.asdict(each),
                "kind": str(each.kind),
                "resident": round(each.resident * 1e3, 4),
                "loop": round(each.loop * 1e3, 4),
            }
            for each in self.times
        ]


ALL, NONE = PathTable(default=True), PathTable()


def measure(builds: Sequence[Build], seconds: Timer) -> PathTable:
    """Measure a lone row of each kind and the maximum rows of each build, both paths in turns.

    Each is measured greedy and drawn, without and with common pages.
    """
    counts = [each for build in builds for each in _measured_by(build, builds)]
    times = []
    for (kind, rows), drawn, common in product(counts, (False, True), (False, True)):
        if common and not _may_share(kind, rows):
            continue
        turns = [
            [
                seconds(kind, rows, drawn=drawn, common=common, in_megakernel=in_megakernel)
                for in_megakernel in (True, False)
            ]
            for _ in range(_TURNS)
        ]
        times.append(StepTimes(kind, rows, drawn, common, *map(min, zip(*turns, strict=True))))
    return PathTable(times)


class Kept:
    """File of a table in the folder of compiled kernels.

    `subject`: everything that its times depend on.
    """

    def __init__(self, subject: Mapping[str, str]) -> None:
        self._subject = dict(subject)

    def path(self) -> Path:
        digest = hashlib.sha256(repr(sorted(self._subject.items())).encode()).hexdigest()
        return cache_folder() / f"decode-paths-{digest[:16]}.json"

    def read(self) -> PathTable | None:
        """Read the stored times; None if missing, unreadable or of another subject."""
        try:
            file = msgspec.json.decode(self.path().read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError):
            return None
        return PathTable(file.times) if file.subject == self._subject and file.times else None

    def write(self, table: PathTable) -> None:
        """Store the times; without a writable folder the next start measures again."""
        file = msgspec.json.encode(_File(self._subject, table.times))
        store(self.path(), msgspec.json.format(file, indent=2))


class _File(msgspec.Struct, frozen=True):
    subject: dict[str, str]
    times: tuple[StepTimes, ...]


def _wins(times: StepTimes) -> bool:
    return times.resident < times.loop


def _may_share(kind: BatchKind, num_rows: int) -> bool:
    """Return whether shared pages make a difference; drafting rows do not share."""
    return num_rows > 1 and kind is not BatchKind.DRAFTS


def _measured_by(build: Build, builds: Sequence[Build]) -> list[Build]:
    """List the row counts that are measured with a build."""
    first = next(each for each in builds if each.kind == build.kind)
    lone = build == first and build.rows > 1
    return [Build(build.kind, 1), build] if lone else [build]
