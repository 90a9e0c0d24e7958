"""Metrics of RPCs and requests, recorded when their log records are written."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from legato_engine.ipc.messages import Done
from legato_engine.types import SKILL_OF_RESULT

from legato_service.metrics.catalogue import CALL_BOUNDS, REQUESTS
from legato_service.metrics.snapshot import Histogram, Snapshot
from legato_service.rpc.call_log import EndedCall, EndedRequest

OTHER = "other"
"""Shared label of the tenants without a label of their own."""

REJECTIONS = (
    "QUEUE_FULL",
    "QUOTA_EXCEEDED",
    "DEADLINE_UNREACHABLE",
    "ENGINE_STARTING",
    "ENGINE_LOST",
    "DRAINING",
)
"""Reasons of errors with which an RPC is refused before any work."""


class _RequestSeries:
    """The requests of one skill and tenant."""

    def __init__(self) -> None:
        self._histograms = {
            metric.name: Histogram(metric.bounds)
            for metric in REQUESTS
            if metric.name.startswith("legato_request_")
        }
        self._cached_tokens = 0
        self._finish_reasons = collections.Counter[str]()

    def add(self, done: Done) -> None:
        timings, usage = done.timings, done.usage
        observed = {
            "queue_seconds": timings.queue,
            "prefill_seconds": timings.prefill,
            "first_token_seconds": timings.first_token,
            "decode_seconds": timings.decode,
            "seconds": timings.total,
            "prompt_size_tokens": usage.input_tokens,
            "output_size_tokens": usage.output_tokens,
        }
        if timings.image:
            observed["image_seconds"] = timings.image
        if usage.output_tokens > 1:
            observed["token_seconds"] = timings.decode / (usage.output_tokens - 1)
        for name, value in observed.items():
            self._histograms[f"legato_request_{name}"].add(value)
        self._cached_tokens += usage.cached_tokens
        self._finish_reasons[done.finish_reason] += 1

    def write(self, snapshot: Snapshot, *labels: str) -> None:
        for reason, count in self._finish_reasons.items():
            snapshot.add("legato_requests", count, *labels, reason)
        snapshot.add("legato_cached_tokens", self._cached_tokens, *labels)
        for kind in ("prompt", "output"):
            sizes = self._histograms[f"legato_request_{kind}_size_tokens"]
            snapshot.add(f"legato_{kind}_tokens", sizes.total, *labels)
        for name, histogram in self._histograms.items():
            snapshot.add_histogram(name, histogram, *labels)


class CallMetrics:
    """Histograms and counts of calls; `observe` is a `call_log.CallObserver`."""

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._tenants: set[str] = set()  # the first that came, with a label of their own
        self._calls = collections.defaultdict[tuple[str, str, str], Histogram](
            lambda: Histogram(CALL_BOUNDS)
        )  # by method, code and reason
        self._requests = collections.defaultdict[tuple[type, str], _RequestSeries](
            _RequestSeries
        )  # by type of result and tenant
        self._wait_error = Histogram(CALL_BOUNDS)

    def observe(self, calls: Sequence[EndedCall], requests: Sequence[EndedRequest]) -> None:
        for call, code, reason, seconds, _ in calls:
            self._calls[call.method, code, reason].add(seconds)
        for call, done, _ in requests:
            self._requests[type(done.result), self._label(call.tenant)].add(done)
            if call.estimated_wait is not None:
                self._wait_error.add(abs(call.estimated_wait - done.timings.queue))

    def _label(self, tenant: str) -> str:
        if tenant and len(self._tenants) < self._max_tenants:
            self._tenants.add(tenant)
        return tenant if not tenant or tenant in self._tenants else OTHER

    def write(self, snapshot: Snapshot, starts: dict[str, int]) -> None:
        """Write the metrics; `starts` are counts of begun RPCs by method."""
        for method, count in starts.items():
            snapshot.add("grpc_server_call_started", count, method.lstrip("/"))
        rejections = dict.fromkeys(REJECTIONS, 0)
        for (path, code, reason), series in self._calls.items():
            count, method = sum(series.counts), path.lstrip("/")
            snapshot.add("legato_rpcs", count, method, code, reason)
            if reason in rejections:
                rejections[reason] += count
            snapshot.add_histogram("grpc_server_call_duration_seconds", series, method, code)
        for reason, count in rejections.items():
            snapshot.add("legato_admission_rejections", count, reason)
        for (result, tenant), requests in self._requests.items():
            requests.write(snapshot, SKILL_OF_RESULT.get(result, OTHER), tenant)
        snapshot.add_histogram("legato_wait_estimate_error_seconds", self._wait_error)
