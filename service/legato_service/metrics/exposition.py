"""Metrics as text, in the formats of Prometheus."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
from legato_service.metrics.catalogue import Kind
from legato_service.metrics.snapshot import Bins, Snapshot, Value

_OPENMETRICS = "application/openmetrics-text"
_END = b"# EOF\n"  # of OpenMetrics


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
    values: dict[str, list[Value]] = {}
    bins: dict[str, list[Bins]] = {}
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


def _families(metric: catalogue.Metric, values: list[Value], bins: list[Bins]) -> Iterator[Metric]:
    names = metric.labels
    if metric.kind is Kind.HISTOGRAM:
        yield _histogram(metric, bins)
        return
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind is Kind.INFO:
        info = InfoMetricFamily(metric.name, metric.help)
        for each in values:
            info.add_metric((), dict(zip(names, each.labels, strict=True)))
        yield info
        return
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=names)
    for each in values:
        family.add_metric(each.labels, each.value)
    yield family


def _histogram(metric: catalogue.Metric, bins: list[Bins]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*map(floatToGoString, catalogue.bounds_of(metric)), "+Inf"]
    for each in bins:
        counts = itertools.accumulate(each.counts)
        family.add_metric(each.labels, list(zip(bounds, counts, strict=True)), each.total)
    return family
