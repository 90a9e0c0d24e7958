"""Metric values of a process and their text formats."""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from legato_engine.types import FinishReason
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from legato_service.metrics import catalogue
from legato_service.metrics.catalogue import MetricKind

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


class MetricValue(msgspec.Struct, array_like=True):
    """A counter or a gauge."""

    name: str
    labels: Labels
    value: float


class HistogramCounts(msgspec.Struct, array_like=True):
    """A histogram; its bounds are those of its `catalogue` entry."""

    name: str
    labels: Labels
    counts: list[int]
    total: float


class Snapshot(msgspec.Struct, array_like=True):
    """Metrics of a process at one moment."""

    values: list[MetricValue] = []
    bins: list[HistogramCounts] = []

    def add(self, name: str, value: float, *labels: str) -> None:
        self.values.append(MetricValue(name, labels, value))

    def add_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        self.bins.append(HistogramCounts(name, labels, list(histogram.counts), histogram.total))

    def total(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return sum(each.value for each in self.values if each.name == name)

    def only(self, names: Iterable[str]) -> Snapshot:
        kept = frozenset(names)
        return Snapshot(
            [each for each in self.values if each.name in kept],
            [each for each in self.bins if each.name in kept],
        )


def merged(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Add up what has the same name and labels."""
    values: dict[tuple[str, Labels], MetricValue] = {}
    bins: dict[tuple[str, Labels], HistogramCounts] = {}
    for snapshot in snapshots:
        for value in snapshot.values:
            key = value.name, value.labels
            known = values.get(key)
            sum_ = value.value + (known.value if known else 0.0)
            values[key] = MetricValue(*key, sum_)
        for each in snapshot.bins:
            key = each.name, each.labels
            other = bins.get(key)
            bins[key] = _sum(other, each) if other else each
    return Snapshot(list(values.values()), list(bins.values()))


def regrouped(
    bins: Iterable[HistogramCounts], name: str, labels: Iterable[Labels]
) -> list[HistogramCounts]:
    """Add up histograms that get the same labels, under another name."""
    groups: dict[Labels, HistogramCounts] = {}
    for each, label in zip(bins, labels, strict=True):
        renamed = HistogramCounts(name, label, each.counts, each.total)
        groups[label] = _sum(groups[label], renamed) if label in groups else renamed
    return list(groups.values())


def _sum(one: HistogramCounts, other: HistogramCounts) -> HistogramCounts:
    counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
    return HistogramCounts(one.name, one.labels, counts, one.total + other.total)


# ---------------------------------------------------------------- exposition

_OPENMETRICS = "application/openmetrics-text"
_END = b"# EOF\n"  # OpenMetrics terminator


class Exposition(NamedTuple):
    """A text and its format, as HTTP's Content-Type names it."""

    text: bytes
    content_type: str


class _One(Collector):
    """A family as what the encoders of prometheus_client take."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


async def render(
    snapshot: Snapshot, metrics: Iterable[catalogue.Metric], accept: str = ""
) -> Exposition:
    """Write the `metrics` of a snapshot; `accept` is as HTTP's header.

    The event loop gets its turn after each family, because a whole text takes milliseconds.
    """
    encode, content_type = choose_encoder(accept)
    if content_type.startswith(_OPENMETRICS):
        # All names are valid as they are; its other escapings replace the colons of samples.
        encode = functools.partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
    values: dict[str, list[MetricValue]] = {}
    bins: dict[str, list[HistogramCounts]] = {}
    for value in snapshot.values:
        values.setdefault(value.name, []).append(value)
    for each in snapshot.bins:
        bins.setdefault(each.name, []).append(each)
    parts: list[bytes] = []
    end = b""
    for metric in metrics:
        for family in _families(metric, values.get(metric.name, []), bins.get(metric.name, [])):
            text = encode(_One(family))
            end = _END if text.endswith(_END) else b""
            parts.append(text.removesuffix(_END))
            await asyncio.sleep(0)
    return Exposition(b"".join((*parts, end)), content_type)


def _families(
    metric: catalogue.Metric, values: list[MetricValue], bins: list[HistogramCounts]
) -> Iterator[Metric]:
    names = metric.labels
    if metric.kind is MetricKind.HISTOGRAM:
        yield _histogram(metric, bins)
        return
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind is MetricKind.INFO:
        info = InfoMetricFamily(metric.name, metric.help)
        for each in values:
            info.add_metric((), dict(zip(names, each.labels, strict=True)))
        yield info
        return
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=names)
    for each in values:
        family.add_metric(each.labels, each.value)
    yield family


def _histogram(metric: catalogue.Metric, bins: list[HistogramCounts]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*map(floatToGoString, catalogue.bounds_of(metric)), "+Inf"]
    for each in bins:
        counts = itertools.accumulate(each.counts)
        family.add_metric(each.labels, list(zip(bounds, counts, strict=True)), each.total)
    return family


# ---------------------------------------------------------------- aliases

# Metrics under OpenTelemetry's and vLLM's names, derived from Legato's own.

PROVIDER = "legato"
_ENGINE = "0"
_FINISHED_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.MAX_OBJECTS: "length",
    FinishReason.CANCELLED: "abort",
}


def add_gen_ai(snapshot: Snapshot, model: str) -> None:
    """Add one series per skill."""
    for metric in catalogue.GEN_AI:
        found = list(_bins(snapshot, metric.repeats))
        labels: list[Labels] = [(each.labels[0], PROVIDER, model) for each in found]
        snapshot.bins += regrouped(found, metric.name, labels)


def add_vllm(snapshot: Snapshot, model: str, page_size: int) -> None:
    """Add one series per metric."""
    labels = (model, _ENGINE)
    used, limit = (snapshot.total(f"legato_kv_pages_{each}") for each in ("used", "limit"))
    snapshot.add("vllm:kv_cache_usage_perc", used / limit if limit else 0.0, *labels)
    snapshot.add("vllm:cache_config_info", 1, str(page_size), f"{limit:.0f}", _ENGINE)
    corrupted = sum(
        each.value
        for each in snapshot.values
        if each.name == "legato_rpcs" and each.labels[2] == "NUMERIC"
    )
    snapshot.add("vllm:corrupted_requests", corrupted, *labels)
    _add_successes(snapshot, labels)
    for metric in catalogue.VLLM:
        if metric.kind is catalogue.MetricKind.HISTOGRAM:
            found = list(_bins(snapshot, metric.repeats))
            snapshot.bins += regrouped(found, metric.name, [labels] * len(found))
        elif metric.repeats:
            snapshot.add(metric.name, snapshot.total(metric.repeats), *labels)


def _add_successes(snapshot: Snapshot, labels: Labels) -> None:
    counts = dict.fromkeys(_FINISHED_REASONS.values(), 0.0)
    for each in snapshot.values:
        if each.name == "legato_requests":
            counts[_FINISHED_REASONS[FinishReason(each.labels[2])]] += each.value
    for reason, count in counts.items():
        snapshot.add("vllm:request_success", count, *labels, reason)


def _bins(snapshot: Snapshot, name: str) -> Iterator[HistogramCounts]:
    return (each for each in snapshot.bins if each.name == name)
