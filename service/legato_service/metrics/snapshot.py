"""Numbers of one process at one moment, which add up over processes."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import msgspec

Labels = tuple[str, ...]
"""Values of a metric's labels, in the order of its `catalogue` entry."""


class Histogram:
    """Counts per bin of `bounds` (upper, inclusive) and above the last, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value


class Value(msgspec.Struct, array_like=True):
    """A counter or a gauge."""

    name: str
    labels: Labels
    value: float


class Bins(msgspec.Struct, array_like=True):
    """A histogram; its bounds are those of its `catalogue` entry."""

    name: str
    labels: Labels
    counts: list[int]
    total: float


class Snapshot(msgspec.Struct, array_like=True):
    """All metrics of a process."""

    values: list[Value] = []
    bins: list[Bins] = []

    def add(self, name: str, value: float, *labels: str) -> None:
        self.values.append(Value(name, labels, value))

    def add_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        self.bins.append(Bins(name, labels, list(histogram.counts), histogram.total))

    def total(self, name: str) -> float:
        """The sum of a metric over its labels."""
        return sum(each.value for each in self.values if each.name == name)

    def only(self, names: Iterable[str]) -> Snapshot:
        kept = frozenset(names)
        return Snapshot(
            [each for each in self.values if each.name in kept],
            [each for each in self.bins if each.name in kept],
        )


def merged(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Add up what has the same name and labels."""
    values: dict[tuple[str, Labels], Value] = {}
    bins: dict[tuple[str, Labels], Bins] = {}
    for snapshot in snapshots:
        for value in snapshot.values:
            key = value.name, value.labels
            known = values.get(key)
            sum_ = value.value + (known.value if known else 0.0)
            values[key] = Value(*key, sum_)
        for each in snapshot.bins:
            key = each.name, each.labels
            other = bins.get(key)
            bins[key] = _sum(other, each) if other else each
    return Snapshot(list(values.values()), list(bins.values()))


def regrouped(bins: Iterable[Bins], name: str, labels: Iterable[Labels]) -> list[Bins]:
    """Add up histograms that get the same labels, under another name."""
    groups: dict[Labels, Bins] = {}
    for each, label in zip(bins, labels, strict=True):
        renamed = Bins(name, label, each.counts, each.total)
        groups[label] = _sum(groups[label], renamed) if label in groups else renamed
    return list(groups.values())


def _sum(one: Bins, other: Bins) -> Bins:
    counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
    return Bins(one.name, one.labels, counts, one.total + other.total)
