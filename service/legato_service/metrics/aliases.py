"""Metrics under the names of OpenTelemetry and of vLLM, made of Legato's own."""

from __future__ import annotations

from collections.abc import Iterator

from legato_engine.core.results import FinishReason

from legato_service.metrics import catalogue
from legato_service.metrics.snapshot import Bins, Labels, Snapshot, regrouped

PROVIDER = "legato"
_ENGINE = "0"
_FINISHED_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.MAX_OBJECTS: "length",
    FinishReason.CANCELLED: "abort",
}


def add_gen_ai(snapshot: Snapshot, model: str) -> None:
    """One series per skill."""
    for metric in catalogue.GEN_AI:
        found = list(_bins(snapshot, metric.repeats))
        labels: list[Labels] = [(each.labels[0], PROVIDER, model) for each in found]
        snapshot.bins += regrouped(found, metric.name, labels)


def add_vllm(snapshot: Snapshot, model: str, page_size: int) -> None:
    """One series per metric."""
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
        if metric.kind is catalogue.Kind.HISTOGRAM:
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


def _bins(snapshot: Snapshot, name: str) -> Iterator[Bins]:
    return (each for each in snapshot.bins if each.name == name)
