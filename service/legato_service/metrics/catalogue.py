"""Metric catalogue: kind, meaning, labels and bounds.

Names are without the suffix `_total` of counters, which the text format adds.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from legato_engine.ipc.messages import SECONDS_BOUNDS

MetricKind: TypeAlias = Literal["counter", "gauge", "histogram", "info"]


class Metric(NamedTuple):
    """Metric; `bounds` are a histogram's, `repeats` names the metric that this one aliases."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    repeats: str = ""


CALL_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Seconds."""

TOKEN_BOUNDS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 768.0, 1024.0, 2048.0, 4096.0, 8192.0)
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Seconds."""


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "counter", help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "gauge", help, labels)


def _histogram(
    name: str, help: str, *labels: str, bounds: tuple[float, ...] = CALL_BOUNDS
) -> Metric:
    return Metric(name, "histogram", help, labels, bounds)


def _by(labels: tuple[str, ...], *metrics: Metric) -> tuple[Metric, ...]:
    """Return the metrics with these labels before their own."""
    return tuple(each._replace(labels=(*labels, *each.labels)) for each in metrics)


CALLS = (
    _counter("grpc_server_call_started", "RPCs that began.", "grpc_method"),
    _histogram(
        "grpc_server_call_duration_seconds",
        "Time of RPCs in the server.",
        *("grpc_method", "grpc_status"),
    ),
    _counter("legato_rpcs", "RPCs that ended.", "method", "code", "reason"),
    _counter(
        "legato_admission_rejections",
        "RPCs refused before any work, by the reason of the error.",
        "reason",
    ),
)
REQUESTS = (
    *_by(
        ("skill", "tenant"),
        _counter(
            "legato_requests",
            "Requests that the engine finished; RunTasks and sessions have several in one RPC.",
            "finish_reason",
        ),
        _counter("legato_prompt_tokens", "Prompt and image tokens of requests."),
        _counter("legato_cached_tokens", "Of them, from the prefix cache."),
        _counter("legato_output_tokens", "Tokens generated for requests."),
        _histogram("legato_request_image_seconds", "Time to decode and prepare a request's image."),
        _histogram("legato_request_queue_seconds", "Time in the queue."),
        _histogram(
            "legato_request_prefill_seconds",
            "Time from the launch of the prefill to the first token.",
        ),
        _histogram(
            "legato_request_first_token_seconds",
            "Time from arrival at the engine to the first token.",
        ),
        _histogram("legato_request_decode_seconds", "Time from the first token to the last."),
        _histogram(
            "legato_request_token_seconds",
            "Mean time between the tokens of a request of at least two.",
            bounds=SECONDS_BOUNDS,
        ),
        _histogram("legato_request_seconds", "Time in the engine."),
        _histogram(
            "legato_request_prompt_size_tokens",
            "Prompt and image tokens of a request.",
            bounds=TOKEN_BOUNDS,
        ),
        _histogram(
            "legato_request_output_size_tokens",
            "Tokens generated for a request.",
            bounds=TOKEN_BOUNDS,
        ),
    ),
    _histogram(
        "legato_wait_estimate_error_seconds",
        "Difference of the wait estimated at admission and the time in the queue.",
    ),
)
PROCESSES = (
    _gauge("legato_requests_in_flight", "Requests that service processes have open."),
    _counter("legato_requests_resumed", "Times that requests went on with another engine."),
    _counter("legato_requests_poisoned", "Requests that ended because they end engines."),
    _gauge("legato_sessions_open", "Sessions that are open."),
    _gauge("legato_sessions_waiting_for_credits", "Sessions whose results wait for the client."),
    _counter("legato_session_frames", "Frames that sessions received."),
    _counter("legato_session_frames_dropped", "Frames dropped, by reason.", "reason"),
    _histogram("legato_session_frame_age_seconds", "Age of a frame when its last result was sent."),
    _histogram(
        "legato_event_loop_lag_seconds",
        "Delay of a timer on a service process's event loop.",
        bounds=LAG_BOUNDS,
    ),
    _gauge(
        "legato_event_loop_longest_stall_seconds",
        "Longest stall of a service process's event loop in about the last minute.",
        "process",
    ),
    _counter("legato_log_lines_dropped", "Log lines that could not be written."),
    _counter(
        "legato_access_reload_failures",
        "Changed files of certificates or credentials that were rejected.",
        "files",
    ),
    _gauge("legato_process_resident_memory_bytes", "Resident memory of a process.", "process"),
    _counter("legato_process_cpu_seconds", "CPU time of a process.", "process"),
    _gauge("legato_process_open_fds", "Open files of a process.", "process"),
)
ENGINE = (
    Metric("legato_build", "info", "The server.", ("version", "python", "processes")),
    *_by(
        ("engine",),
        Metric(
            "legato_model",
            "info",
            "The served model.",
            ("model", "device", "dtype", "kv_dtype"),
        ),
        _gauge("legato_engine_state", "1 for the engine's state, else 0.", "state"),
        _counter("legato_engine_restarts", "Engines started after one was lost."),
        _gauge("legato_engine_heartbeat_age_seconds", "Time since the engine's last heartbeat."),
        _gauge("legato_engine_requests_running", "Requests that decode."),
        _gauge("legato_engine_requests_waiting", "Requests that wait."),
        _gauge("legato_engine_requests_limit", "Requests that may decode at a time."),
        _gauge("legato_engine_queue_limit", "Requests that may wait."),
        _gauge("legato_engine_launches_in_flight", "Launches not yet committed."),
        _gauge("legato_engine_estimated_wait_seconds", "Time that a new request would wait."),
        _counter("legato_engine_steps", "Launches committed since the engine started."),
        _counter("legato_engine_launches", "Launches committed, by kind.", "kind"),
        _counter("legato_engine_tokens", "Tokens generated."),
        _gauge("legato_kv_pages_used", "KV pages of live requests."),
        _gauge("legato_kv_pages_cached", "KV pages of the prefix cache that may be evicted."),
        _gauge("legato_kv_pages_limit", "KV pages of the pool."),
        _counter("legato_prefix_cache_queries", "Prompt positions looked up in the prefix cache."),
        _counter("legato_prefix_cache_hits", "Of them, found."),
        _counter("legato_image_cache_queries", "Images looked up in the image cache."),
        _counter("legato_image_cache_hits", "Of them, found."),
        _counter("legato_images_decoded", "Images decoded."),
        _gauge("legato_image_cache_bytes", "Prepared images in the cache, without held ones."),
        _gauge("legato_image_held_bytes", "Prepared images held for their owners."),
        _gauge("legato_images_cached", "Prepared images, held ones included."),
        _gauge("legato_adapter_slots_used", "Adapter slots of live requests."),
        _counter("legato_preemptions", "Requests preempted to free KV pages for others."),
        _counter("legato_recomputed_tokens", "Positions computed again after preemptions."),
        _histogram(
            "legato_engine_step_seconds",
            "Time of a decode step after a decode step; those of a loop share its time.",
            bounds=SECONDS_BOUNDS,
        ),
        _histogram(
            "legato_inter_token_seconds",
            "Time between two tokens of one request.",
            bounds=SECONDS_BOUNDS,
        ),
        _gauge(
            "legato_engine_step_part_seconds",
            "Median part of the latest single decode steps, decode loops left out.",
            "part",
        ),
        _counter(
            "legato_engine_decode_seconds", "Time of all decode steps and loops after others."
        ),
        _counter("legato_engine_device_idle_seconds", "Of it, while the device had no work."),
        _gauge(
            "legato_engine_batch_rows",
            "Mean number of requests in the latest single decode steps, decode loops left out.",
        ),
        _gauge(
            "legato_pipeline_predicted_gain_ratio",
            "Throughput gained by pipelining single steps, decode loops left out, from their "
            "parts; 0.1 is a tenth more.",
        ),
        _gauge(
            "legato_pipeline_observed_gain_ratio",
            "Throughput gained by pipelining single steps, decode loops left out, from the time "
            "of the latest and an estimate of the blocking loop's.",
        ),
        _counter("legato_forced_tokens", "Tokens that took no step because a grammar forced them."),
        _counter("legato_draft_tokens", "Draft tokens verified."),
        _counter("legato_draft_tokens_accepted", "Of them, accepted."),
        _counter("legato_draft_blocks", "Blocks of draft tokens, by size.", "size"),
    ),
)
OWN = (*CALLS, *REQUESTS, *PROCESSES, *ENGINE)
_BY_NAME = {each.name: each for each in OWN}
_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_VLLM_LABELS = ("model_name", "engine")


def _alias(name: str, repeats: str, labels: tuple[str, ...]) -> Metric:
    original = _BY_NAME[repeats]
    return original._replace(name=name, help=f"As {repeats}.", labels=labels, repeats=repeats)


def _gen_ai(name: str, repeats: str) -> Metric:
    return _alias(f"gen_ai_server_{name}", repeats, _GEN_AI_LABELS)


def _vllm(name: str, repeats: str) -> Metric:
    return _alias(f"vllm:{name}", repeats, _VLLM_LABELS)


GEN_AI = (
    _gen_ai("request_duration_seconds", "legato_request_seconds"),
    _gen_ai("time_to_first_token_seconds", "legato_request_first_token_seconds"),
    _gen_ai("time_per_output_token_seconds", "legato_request_token_seconds"),
)
VLLM = (
    _vllm("num_requests_running", "legato_engine_requests_running"),
    _vllm("num_requests_waiting", "legato_engine_requests_waiting"),
    _gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", *_VLLM_LABELS),
    _gauge(
        "vllm:cache_config_info",
        "Pages of the KV cache, and the positions of one.",
        *("block_size", "num_gpu_blocks", "engine"),
    ),
    _vllm("prompt_tokens", "legato_prompt_tokens"),
    _vllm("generation_tokens", "legato_output_tokens"),
    _vllm("num_preemptions", "legato_preemptions"),
    _vllm("prefix_cache_queries", "legato_prefix_cache_queries"),
    _vllm("prefix_cache_hits", "legato_prefix_cache_hits"),
    _vllm("mm_cache_queries", "legato_image_cache_queries"),
    _vllm("mm_cache_hits", "legato_image_cache_hits"),
    _counter("vllm:corrupted_requests", "legato_rpcs of reason NUMERIC.", *_VLLM_LABELS),
    _counter(
        "vllm:request_success", "Finished requests, by reason.", *_VLLM_LABELS, "finished_reason"
    ),
    _vllm("time_to_first_token_seconds", "legato_request_first_token_seconds"),
    _vllm("inter_token_latency_seconds", "legato_inter_token_seconds"),
    _vllm("e2e_request_latency_seconds", "legato_request_seconds"),
    _vllm("request_queue_time_seconds", "legato_request_queue_seconds"),
    _vllm("request_prefill_time_seconds", "legato_request_prefill_seconds"),
    _vllm("request_decode_time_seconds", "legato_request_decode_seconds"),
    _vllm("request_time_per_output_token_seconds", "legato_request_token_seconds"),
    _vllm("request_prompt_tokens", "legato_request_prompt_size_tokens"),
    _vllm("request_generation_tokens", "legato_request_output_size_tokens"),
)
