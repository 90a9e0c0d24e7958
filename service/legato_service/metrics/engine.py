"""Metrics of an engine, from its heartbeats."""

from __future__ import annotations

import time

from legato_engine.client.monitor import EngineState
from legato_engine.ipc.figures import Durations, Load, PipelineStats, StepTotals

from legato_service.engine import Engine
from legato_service.metrics.snapshot import Bins, Snapshot

_KINDS = ("encode", "prefill", "decode", "refine")
_PARTS = ("forward", "sampling", "bookkeeping", "wait", "idle", "blocking", "step")


def write(snapshot: Snapshot, engine: Engine) -> None:
    """Counters begin anew with each engine process."""
    number = str(engine.number)
    for state in EngineState:
        snapshot.add("legato_engine_state", float(engine.state is state), number, state.value)
    snapshot.add("legato_engine_restarts", engine.restarts, number)
    age = time.monotonic() - engine.last_heartbeat
    snapshot.add("legato_engine_heartbeat_age_seconds", max(0.0, age), number)
    snapshot.add("legato_engine_estimated_wait_seconds", engine.estimated_wait, number)
    snapshot.add("legato_engine_steps", engine.step, number)
    model = engine.model
    if model is not None:
        labels = (model.name, model.device, model.dtype, model.kv_dtype)
        snapshot.add("legato_model", 1, number, *labels)
        snapshot.add("legato_engine_requests_limit", model.max_running, number)
        snapshot.add("legato_engine_queue_limit", model.max_waiting, number)
    _write_load(snapshot, engine.load, number)
    _write_steps(snapshot, engine.step_totals, number)
    _write_decode_steps(snapshot, engine.load.decode_steps, number)
    images = engine.image_totals
    snapshot.add("legato_images_decoded", images.decoded, number)
    snapshot.add("legato_image_cache_hits", images.found, number)
    snapshot.add("legato_image_cache_queries", images.found + images.decoded, number)
    snapshot.add("legato_image_cache_bytes", images.cached_bytes, number)
    snapshot.add("legato_image_held_bytes", images.held_bytes, number)


def _write_load(snapshot: Snapshot, load: Load, number: str) -> None:
    snapshot.add("legato_engine_requests_running", load.running, number)
    snapshot.add("legato_engine_requests_waiting", load.waiting, number)
    snapshot.add("legato_engine_launches_in_flight", load.inflight, number)
    snapshot.add("legato_kv_pages_used", load.pages_used, number)
    snapshot.add("legato_kv_pages_cached", load.prefix_pages, number)
    snapshot.add("legato_kv_pages_limit", load.pages_total, number)
    snapshot.add("legato_adapter_slots_used", load.adapters_used, number)
    snapshot.add("legato_images_cached", load.images_cached, number)
    kv = load.kv
    found = kv.found_tokens if kv else 0
    snapshot.add("legato_prefix_cache_hits", found, number)
    snapshot.add("legato_prefix_cache_queries", found + (kv.computed_tokens if kv else 0), number)
    snapshot.add("legato_preemptions", kv.preemptions if kv else 0, number)
    snapshot.add("legato_recomputed_tokens", kv.recomputed_tokens if kv else 0, number)


def _write_steps(snapshot: Snapshot, totals: StepTotals, number: str) -> None:
    for kind in _KINDS:
        snapshot.add("legato_engine_launches", totals.launches.get(kind, 0), number, kind)
    snapshot.add("legato_engine_tokens", totals.tokens, number)
    _write_durations(snapshot, "legato_engine_step_seconds", totals.step_times, number)
    _write_durations(snapshot, "legato_inter_token_seconds", totals.token_gaps, number)
    snapshot.add("legato_engine_decode_seconds", totals.decode_seconds, number)
    snapshot.add("legato_engine_device_idle_seconds", totals.idle_seconds, number)
    snapshot.add("legato_draft_tokens", totals.drafted, number)
    snapshot.add("legato_draft_tokens_accepted", totals.accepted, number)
    for size, count in totals.blocks.items():
        snapshot.add("legato_draft_blocks", count, number, str(size))


def _write_durations(snapshot: Snapshot, name: str, durations: Durations, number: str) -> None:
    snapshot.bins.append(Bins(name, (number,), list(durations.counts), durations.total))


def _write_decode_steps(snapshot: Snapshot, steps: PipelineStats | None, number: str) -> None:
    for part in _PARTS:
        milliseconds = getattr(steps, f"{part}_ms") if steps else 0.0
        snapshot.add("legato_engine_step_part_seconds", milliseconds / 1000, number, part)
    snapshot.add("legato_engine_batch_rows", steps.rows if steps else 0.0, number)
    predicted = steps.predicted_gain if steps else 0.0
    snapshot.add("legato_pipeline_predicted_gain_ratio", predicted, number)
    observed = steps.observed_gain if steps else 0.0
    snapshot.add("legato_pipeline_observed_gain_ratio", observed, number)
