"""Metrics of the engine, from its heartbeats."""

from __future__ import annotations

import time

from legato_engine.client.engine_client import EngineState
from legato_engine.ipc.messages import Durations, Load, PipelineStats, StepTotals

from legato_service.engine import Engine
from legato_service.metrics.snapshot import Bins, Snapshot

_KINDS = ("encode", "prefill", "decode", "refine")
_PARTS = ("forward", "sampling", "bookkeeping", "wait", "idle", "blocking", "step")


def write(snapshot: Snapshot, engine: Engine) -> None:
    """Counters begin anew with each engine."""
    for state in EngineState:
        snapshot.add("legato_engine_state", float(engine.state is state), state.value)
    snapshot.add("legato_engine_restarts", engine.restarts)
    age = time.monotonic() - engine.last_heartbeat
    snapshot.add("legato_engine_heartbeat_age_seconds", max(0.0, age))
    snapshot.add("legato_engine_estimated_wait_seconds", engine.estimated_wait)
    snapshot.add("legato_engine_steps", engine.step)
    model = engine.model
    if model is not None:
        labels = (model.name, model.device, model.dtype, model.kv_dtype)
        snapshot.add("legato_model", 1, *labels)
        snapshot.add("legato_engine_requests_limit", model.max_running)
        snapshot.add("legato_engine_queue_limit", model.max_waiting)
    _write_load(snapshot, engine.load)
    _write_steps(snapshot, engine.step_totals)
    _write_decode_steps(snapshot, engine.load.decode_steps)
    images = engine.image_totals
    snapshot.add("legato_images_decoded", images.decoded)
    snapshot.add("legato_image_cache_hits", images.found)
    snapshot.add("legato_image_cache_queries", images.found + images.decoded)
    snapshot.add("legato_image_cache_bytes", images.cached_bytes)
    snapshot.add("legato_image_held_bytes", images.held_bytes)


def _write_load(snapshot: Snapshot, load: Load) -> None:
    snapshot.add("legato_engine_requests_running", load.running)
    snapshot.add("legato_engine_requests_waiting", load.waiting)
    snapshot.add("legato_engine_launches_in_flight", load.inflight)
    snapshot.add("legato_kv_pages_used", load.pages_used)
    snapshot.add("legato_kv_pages_cached", load.prefix_pages)
    snapshot.add("legato_kv_pages_limit", load.pages_total)
    snapshot.add("legato_adapter_slots_used", load.adapters_used)
    snapshot.add("legato_images_cached", load.images_cached)
    kv = load.kv
    found = kv.found_tokens if kv else 0
    snapshot.add("legato_prefix_cache_hits", found)
    snapshot.add("legato_prefix_cache_queries", found + (kv.computed_tokens if kv else 0))
    snapshot.add("legato_preemptions", kv.preemptions if kv else 0)
    snapshot.add("legato_recomputed_tokens", kv.recomputed_tokens if kv else 0)


def _write_steps(snapshot: Snapshot, totals: StepTotals) -> None:
    for kind in _KINDS:
        snapshot.add("legato_engine_launches", totals.launches.get(kind, 0), kind)
    snapshot.add("legato_engine_tokens", totals.tokens)
    _write_durations(snapshot, "legato_engine_step_seconds", totals.step_times)
    _write_durations(snapshot, "legato_inter_token_seconds", totals.token_gaps)
    snapshot.add("legato_engine_decode_seconds", totals.decode_seconds)
    snapshot.add("legato_engine_device_idle_seconds", totals.idle_seconds)
    snapshot.add("legato_draft_tokens", totals.drafted)
    snapshot.add("legato_draft_tokens_accepted", totals.accepted)
    for size, count in totals.blocks.items():
        snapshot.add("legato_draft_blocks", count, str(size))


def _write_durations(snapshot: Snapshot, name: str, durations: Durations) -> None:
    snapshot.bins.append(Bins(name, (), list(durations.counts), durations.total))


def _write_decode_steps(snapshot: Snapshot, steps: PipelineStats | None) -> None:
    for part in _PARTS:
        milliseconds = getattr(steps, f"{part}_ms") if steps else 0.0
        snapshot.add("legato_engine_step_part_seconds", milliseconds / 1000, part)
    snapshot.add("legato_engine_batch_rows", steps.rows if steps else 0.0)
    predicted = steps.predicted_gain if steps else 0.0
    snapshot.add("legato_pipeline_predicted_gain_ratio", predicted)
    observed = steps.observed_gain if steps else 0.0
    snapshot.add("legato_pipeline_observed_gain_ratio", observed)
