"""Metric values of a process and their text formats."""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
from legato_engine.ipc.messages import Durations
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


class Series(msgspec.Struct, array_like=True):
    """The value of a counter or gauge; of a histogram the counts of its bins, then the sum."""

    name: str
    labels: Labels
    values: list[float]


class Snapshot(msgspec.Struct, array_like=True):
    """Metrics of a process at one moment. Series of one name with equal labels add up."""

    series: list[Series] = []

    def add(self, name: str, value: float, *labels: str) -> None:
        self.series.append(Series(name, labels, [value]))

    def add_histogram(self, name: str, histogram: Histogram | Durations, *labels: str) -> None:
        self.series.append(Series(name, labels, [*histogram.counts, histogram.total]))

    def named(self, name: str) -> list[Series]:
        return [each for each in self.series if each.name == name]

    def total(self, name: str) -> float:
        """Return the sum of a counter or gauge over its labels."""
        return sum(each.values[0] for each in self.named(name))


def merged(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Add up series of one name with equal labels."""
    sums: dict[tuple[str, Labels], list[float]] = {}
    for each in itertools.chain.from_iterable(snapshot.series for snapshot in snapshots):
        known = sums.setdefault((each.name, each.labels), [0] * len(each.values))
        known[:] = [a + b for a, b in zip(known, each.values, strict=True)]
    return Snapshot([Series(*key, values) for key, values in sums.items()])


# ---------------------------------------------------------------- exposition

_OPENMETRICS = "application/openmetrics-text"
_END = b"# EOF\n"  # OpenMetrics terminator


Exposition: TypeAlias = tuple[bytes, str]
"""A text and its format, as HTTP's Content-Type names it."""


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
    series: dict[str, list[Series]] = {}
    for each in merged((snapshot,)).series:
        series.setdefault(each.name, []).append(each)
    parts: list[bytes] = []
    end = b""
    for metric in metrics:
        text = encode(_One(_family(metric, series.get(metric.name, []))))
        end = _END if text.endswith(_END) else b""
        parts.append(text.removesuffix(_END))
        await asyncio.sleep(0)
    return b"".join((*parts, end)), content_type


def _family(metric: catalogue.Metric, series: list[Series]) -> Metric:
    names = metric.labels
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=names)
        bounds = [*map(floatToGoString, metric.bounds), "+Inf"]
        for each in series:
            *counts, total = each.values
            buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
            histograms.add_metric(each.labels, buckets, total)
        return histograms
    if metric.kind == "info":
        info = InfoMetricFamily(metric.name, metric.help)
        for each in series:
            info.add_metric((), dict(zip(names, each.labels, strict=True)))
        return info
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(metric.name, metric.help, labels=names)
    for each in series:
        family.add_metric(each.labels, each.values[0])
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
        snapshot.series += [
            Series(metric.name, (each.labels[0], PROVIDER, model), each.values)
            for each in snapshot.named(metric.repeats)
        ]


def add_vllm(snapshot: Snapshot, model: str, page_size: int) -> None:
    """Add one series per metric."""
    labels = (model, _ENGINE)
    used, limit = (snapshot.total(f"legato_kv_pages_{each}") for each in ("used", "limit"))
    snapshot.add("vllm:kv_cache_usage_perc", used / limit if limit else 0.0, *labels)
    snapshot.add("vllm:cache_config_info", 1, str(page_size), f"{limit:.0f}", _ENGINE)
    rpcs = snapshot.named("legato_rpcs")
    corrupted = sum(each.values[0] for each in rpcs if each.labels[2] == "NUMERIC")
    snapshot.add("vllm:corrupted_requests", corrupted, *labels)
    for reason in dict.fromkeys(_FINISHED_REASONS.values()):
        snapshot.add("vllm:request_success", 0, *labels, reason)
    for each in snapshot.named("legato_requests"):
        reason = _FINISHED_REASONS[FinishReason(each.labels[2])]
        snapshot.add("vllm:request_success", each.values[0], *labels, reason)
    for metric in catalogue.VLLM:
        if metric.repeats and metric.kind != "histogram":
            snapshot.add(metric.name, 0, *labels)  # also without a series to repeat
        repeated = snapshot.named(metric.repeats)
        snapshot.series += [Series(metric.name, labels, each.values) for each in repeated]
