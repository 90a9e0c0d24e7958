"""Metric catalogue: kind, meaning, labels and bounds.

Names are without the suffix `_total` of counters, which the text format adds.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from legato_engine.ipc.messages import SECONDS_BOUNDS


class MetricKind(enum.StrEnum):
    """The kinds of Prometheus that are used here."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Metric(NamedTuple):
    """Metric; `bounds` are a histogram's, `repeats` names the metric that this one aliases."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    repeats: str = ""

    @property
    def is_additive(self) -> bool:
        """Return whether the metric only grows, so that dead processes still count."""
        return self.kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM)


CALL_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Seconds."""

TOKEN_BOUNDS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 768.0, 1024.0, 2048.0, 4096.0, 8192.0)
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Seconds."""

_REQUEST = ("skill", "tenant")
_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

CALLS = (
    Metric("grpc_server_call_started", _C, "RPCs that began.", ("grpc_method",)),
    Metric(
        "grpc_server_call_duration_seconds",
        _H,
        "Time of RPCs in the server.",
        ("grpc_method", "grpc_status"),
        CALL_BOUNDS,
    ),
    Metric("legato_rpcs", _C, "RPCs that ended.", ("method", "code", "reason")),
    Metric(
        "legato_admission_rejections",
        _C,
        "RPCs refused before any work, by the reason of the error.",
        ("reason",),
    ),
)
REQUESTS = (
    Metric(
        "legato_requests",
        _C,
        "Requests that the engine finished; RunTasks and sessions have several in one RPC.",
        (*_REQUEST, "finish_reason"),
    ),
    Metric("legato_prompt_tokens", _C, "Prompt and image tokens of requests.", _REQUEST),
    Metric("legato_cached_tokens", _C, "Of them, from the prefix cache.", _REQUEST),
    Metric("legato_output_tokens", _C, "Tokens generated for requests.", _REQUEST),
    Metric(
        "legato_request_image_seconds",
        _H,
        "Time to decode and prepare a request's image.",
        _REQUEST,
        CALL_BOUNDS,
    ),
    Metric("legato_request_queue_seconds", _H, "Time in the queue.", _REQUEST, CALL_BOUNDS),
    Metric(
        "legato_request_prefill_seconds",
        _H,
        "Time from the launch of the prefill to the first token.",
        _REQUEST,
        CALL_BOUNDS,
    ),
    Metric(
        "legato_request_first_token_seconds",
        _H,
        "Time from arrival at the engine to the first token.",
        _REQUEST,
        CALL_BOUNDS,
    ),
    Metric(
        "legato_request_decode_seconds",
        _H,
        "Time from the first token to the last.",
        _REQUEST,
        CALL_BOUNDS,
    ),
    Metric(
        "legato_request_token_seconds",
        _H,
        "Mean time between the tokens of a request of at least two.",
        _REQUEST,
        SECONDS_BOUNDS,
    ),
    Metric("legato_request_seconds", _H, "Time in the engine.", _REQUEST, CALL_BOUNDS),
    Metric(
        "legato_request_prompt_size_tokens",
        _H,
        "Prompt and image tokens of a request.",
        _REQUEST,
        TOKEN_BOUNDS,
    ),
    Metric(
        "legato_request_output_size_tokens",
        _H,
        "Tokens generated for a request.",
        _REQUEST,
        TOKEN_BOUNDS,
    ),
    Metric(
        "legato_wait_estimate_error_seconds",
        _H,
        "Difference of the wait estimated at admission and the time in the queue.",
        (),
        CALL_BOUNDS,
    ),
)
PROCESSES = (
    Metric("legato_requests_in_flight", _G, "Requests that service processes have open."),
    Metric("legato_requests_resumed", _C, "Times that requests went on with another engine."),
    Metric("legato_requests_poisoned", _C, "Requests that ended because they end engines."),
    Metric("legato_sessions_open", _G, "Sessions that are open."),
    Metric(
        "legato_sessions_waiting_for_credits", _G, "Sessions whose results wait for the client."
    ),
    Metric("legato_session_frames", _C, "Frames that sessions received."),
    Metric("legato_session_frames_dropped", _C, "Frames dropped, by reason.", ("reason",)),
    Metric(
        "legato_session_frame_age_seconds",
        _H,
        "Age of a frame when its last result was sent.",
        (),
        CALL_BOUNDS,
    ),
    Metric(
        "legato_event_loop_lag_seconds",
        _H,
        "Delay of a timer on a service process's event loop.",
        (),
        LAG_BOUNDS,
    ),
    Metric(
        "legato_event_loop_longest_stall_seconds",
        _G,
        "Longest stall of a service process's event loop in about the last minute.",
        ("process",),
    ),
    Metric("legato_log_lines_dropped", _C, "Log lines that could not be written."),
    Metric(
        "legato_access_reload_failures",
        _C,
        "Changed files of certificates or credentials that were rejected.",
        ("files",),
    ),
    Metric(
        "legato_process_resident_memory_bytes", _G, "Resident memory of a process.", ("process",)
    ),
    Metric("legato_process_cpu_seconds", _C, "CPU time of a process.", ("process",)),
    Metric("legato_process_open_fds", _G, "Open files of a process.", ("process",)),
)


def _engine(
    name: str,
    kind: MetricKind,
    help: str,
    labels: tuple[str, ...] = (),
    bounds: tuple[float, ...] = (),
) -> Metric:
    return Metric(name, kind, help, ("engine", *labels), bounds)


ENGINE = (
    Metric("legato_build", MetricKind.INFO, "The server.", ("version", "python", "processes")),
    _engine(
        "legato_model",
        MetricKind.INFO,
        "The served model.",
        ("model", "device", "dtype", "kv_dtype"),
    ),
    _engine("legato_engine_state", _G, "1 for the engine's state, else 0.", ("state",)),
    _engine("legato_engine_restarts", _C, "Engines started after one was lost."),
    _engine("legato_engine_heartbeat_age_seconds", _G, "Time since the engine's last heartbeat."),
    _engine("legato_engine_requests_running", _G, "Requests that decode."),
    _engine("legato_engine_requests_waiting", _G, "Requests that wait."),
    _engine("legato_engine_requests_limit", _G, "Requests that may decode at a time."),
    _engine("legato_engine_queue_limit", _G, "Requests that may wait."),
    _engine("legato_engine_launches_in_flight", _G, "Launches not yet committed."),
    _engine("legato_engine_estimated_wait_seconds", _G, "Time that a new request would wait."),
    _engine("legato_engine_steps", _C, "Launches committed since the engine started."),
    _engine("legato_engine_launches", _C, "Launches committed, by kind.", ("kind",)),
    _engine("legato_engine_tokens", _C, "Tokens generated."),
    _engine("legato_kv_pages_used", _G, "KV pages of live requests."),
    _engine("legato_kv_pages_cached", _G, "KV pages of the prefix cache that may be evicted."),
    _engine("legato_kv_pages_limit", _G, "KV pages of the pool."),
    _engine("legato_prefix_cache_queries", _C, "Prompt positions looked up in the prefix cache."),
    _engine("legato_prefix_cache_hits", _C, "Of them, found."),
    _engine("legato_image_cache_queries", _C, "Images looked up in the image cache."),
    _engine("legato_image_cache_hits", _C, "Of them, found."),
    _engine("legato_images_decoded", _C, "Images decoded."),
    _engine("legato_image_cache_bytes", _G, "Prepared images in the cache, without held ones."),
    _engine("legato_image_held_bytes", _G, "Prepared images held for their owners."),
    _engine("legato_images_cached", _G, "Prepared images, held ones included."),
    _engine("legato_adapter_slots_used", _G, "Adapter slots of live requests."),
    _engine("legato_preemptions", _C, "Requests preempted to free KV pages for others."),
    _engine("legato_recomputed_tokens", _C, "Positions computed again after preemptions."),
    _engine(
        "legato_engine_step_seconds",
        _H,
        "Time of a decode step after a decode step; those of a loop share its time.",
        (),
        SECONDS_BOUNDS,
    ),
    _engine(
        "legato_inter_token_seconds",
        _H,
        "Time between two tokens of one request.",
        (),
        SECONDS_BOUNDS,
    ),
    _engine(
        "legato_engine_step_part_seconds",
        _G,
        "Median part of the latest single decode steps, decode loops left out.",
        ("part",),
    ),
    _engine("legato_engine_decode_seconds", _C, "Time of all decode steps and loops after others."),
    _engine("legato_engine_device_idle_seconds", _C, "Of it, while the device had no work."),
    _engine(
        "legato_engine_batch_rows",
        _G,
        "Mean number of requests in the latest single decode steps, decode loops left out.",
    ),
    _engine(
        "legato_pipeline_predicted_gain_ratio",
        _G,
        "Throughput gained by pipelining single steps, decode loops left out, from their parts; "
        "0.1 is a tenth more.",
    ),
    _engine(
        "legato_pipeline_observed_gain_ratio",
        _G,
        "Throughput gained by pipelining single steps, decode loops left out, from the time of the "
        "latest and an estimate of the blocking loop's.",
    ),
    _engine("legato_draft_tokens", _C, "Draft tokens verified."),
    _engine("legato_draft_tokens_accepted", _C, "Of them, accepted."),
    _engine("legato_draft_blocks", _C, "Blocks of draft tokens, by size.", ("size",)),
)
_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_VLLM_LABELS = ("model_name", "engine")


def _gen_ai(name: str, repeats: str) -> Metric:
    full = f"gen_ai_server_{name}"
    return Metric(full, _H, f"As {repeats}.", _GEN_AI_LABELS, repeats=repeats)


def _vllm(name: str, kind: MetricKind, repeats: str) -> Metric:
    return Metric(f"vllm:{name}", kind, f"As {repeats}.", _VLLM_LABELS, repeats=repeats)


GEN_AI = (
    _gen_ai("request_duration_seconds", "legato_request_seconds"),
    _gen_ai("time_to_first_token_seconds", "legato_request_first_token_seconds"),
    _gen_ai("time_per_output_token_seconds", "legato_request_token_seconds"),
)
VLLM = (
    _vllm("num_requests_running", _G, "legato_engine_requests_running"),
    _vllm("num_requests_waiting", _G, "legato_engine_requests_waiting"),
    Metric("vllm:kv_cache_usage_perc", _G, "Share of KV pages in use, 0 to 1.", _VLLM_LABELS),
    Metric(
        "vllm:cache_config_info",
        _G,
        "Pages of the KV cache, and the positions of one.",
        ("block_size", "num_gpu_blocks", "engine"),
    ),
    _vllm("prompt_tokens", _C, "legato_prompt_tokens"),
    _vllm("generation_tokens", _C, "legato_output_tokens"),
    _vllm("num_preemptions", _C, "legato_preemptions"),
    _vllm("prefix_cache_queries", _C, "legato_prefix_cache_queries"),
    _vllm("prefix_cache_hits", _C, "legato_prefix_cache_hits"),
    _vllm("mm_cache_queries", _C, "legato_image_cache_queries"),
    _vllm("mm_cache_hits", _C, "legato_image_cache_hits"),
    Metric("vllm:corrupted_requests", _C, "legato_rpcs of reason NUMERIC.", _VLLM_LABELS),
    Metric(
        "vllm:request_success",
        _C,
        "Finished requests, by reason.",
        (*_VLLM_LABELS, "finished_reason"),
    ),
    _vllm("time_to_first_token_seconds", _H, "legato_request_first_token_seconds"),
    _vllm("inter_token_latency_seconds", _H, "legato_inter_token_seconds"),
    _vllm("e2e_request_latency_seconds", _H, "legato_request_seconds"),
    _vllm("request_queue_time_seconds", _H, "legato_request_queue_seconds"),
    _vllm("request_prefill_time_seconds", _H, "legato_request_prefill_seconds"),
    _vllm("request_decode_time_seconds", _H, "legato_request_decode_seconds"),
    _vllm("request_time_per_output_token_seconds", _H, "legato_request_token_seconds"),
    _vllm("request_prompt_tokens", _H, "legato_request_prompt_size_tokens"),
    _vllm("request_generation_tokens", _H, "legato_request_output_size_tokens"),
)

OWN = (*CALLS, *REQUESTS, *PROCESSES, *ENGINE)
_BY_NAME = {each.name: each for each in OWN}


def bounds_of(metric: Metric) -> tuple[float, ...]:
    """Return the bounds; a repeated histogram has those of the original."""
    return _BY_NAME[metric.repeats].bounds if metric.repeats else metric.bounds
