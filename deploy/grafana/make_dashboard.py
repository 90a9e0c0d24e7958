"""Writes legato.json beside this file: python deploy/grafana/make_dashboard.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT = 8, 8  # of a panel; a row has 24 columns
_COLUMNS = 3
_SELECT = 'instance=~"$instance"'
_PATH = Path(__file__).with_name("legato.json")


def _rate(metric: str, *, by: str = "", more: str = "") -> str:
    select = f"{_SELECT}{', ' + more if more else ''}"
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}{{{select}}}[$__rate_interval]))"


def _share(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


def _quantile(share: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {_rate(metric + '_bucket', by=labels)})"


def _gauge(metric: str, more: str = "") -> str:
    return f"{metric}{{{_SELECT}{', ' + more if more else ''}}}"


def _quantiles(metric: str, by: str = "") -> list[tuple[str, str]]:
    suffix = f" {{{{{by}}}}}" if by else ""
    return [(_quantile(share, metric, by), f"P{share * 100:g}{suffix}") for share in (0.5, 0.95)]


PANELS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "Load": [
        (
            "Requests",
            "short",
            [
                (_gauge("legato_engine_requests_running"), "running {{engine}}"),
                (_gauge("legato_engine_requests_waiting"), "waiting {{engine}}"),
                (_gauge("legato_engine_requests_limit"), "limit {{engine}}"),
            ],
        ),
        (
            "Finished requests by skill",
            "reqps",
            [(_rate("legato_requests_total", by="skill"), "{{skill}}")],
        ),
        (
            "Tokens",
            "short",
            [
                (_rate("legato_output_tokens_total"), "generated a second"),
                (_rate("legato_prompt_tokens_total"), "prompt a second"),
            ],
        ),
        (
            "Finished requests by tenant",
            "reqps",
            [(_rate("legato_requests_total", by="tenant"), "{{tenant}}")],
        ),
        (
            "Estimated wait",
            "s",
            [(_gauge("legato_engine_estimated_wait_seconds"), "{{instance}} {{engine}}")],
        ),
        ("Error of the estimate", "s", _quantiles("legato_wait_estimate_error_seconds")),
    ],
    "Latency": [
        ("Whole request", "s", _quantiles("legato_request_seconds", "skill")),
        ("First token", "s", _quantiles("legato_request_first_token_seconds", "skill")),
        ("Between tokens", "s", _quantiles("legato_inter_token_seconds")),
        ("Queue", "s", _quantiles("legato_request_queue_seconds")),
        ("Prefill", "s", _quantiles("legato_request_prefill_seconds")),
        ("Decode", "s", _quantiles("legato_request_decode_seconds")),
        ("Image", "s", _quantiles("legato_request_image_seconds")),
        ("RPC", "s", _quantiles("grpc_server_call_duration_seconds", "grpc_method")),
        ("Time per token of a request", "s", _quantiles("legato_request_token_seconds", "skill")),
    ],
    "Engine": [
        ("State", "short", [(_gauge("legato_engine_state"), "{{engine}} {{state}}")]),
        (
            "Restarts and resumed requests",
            "short",
            [
                (
                    f"increase({_gauge('legato_engine_restarts_total')}[$__rate_interval])",
                    "restarts {{engine}}",
                ),
                (
                    f"increase({_gauge('legato_requests_resumed_total')}[$__rate_interval])",
                    "resumed",
                ),
            ],
        ),
        (
            "Heartbeat age",
            "s",
            [(_gauge("legato_engine_heartbeat_age_seconds"), "{{instance}} {{engine}}")],
        ),
        ("Decode step", "s", _quantiles("legato_engine_step_seconds")),
        (
            "Parts of a decode step (median)",
            "s",
            [(_gauge("legato_engine_step_part_seconds"), "{{engine}} {{part}}")],
        ),
        ("Launches", "ops", [(_rate("legato_engine_launches_total", by="kind"), "{{kind}}")]),
        (
            "Device idle",
            "percentunit",
            [
                (
                    _share(
                        "legato_engine_device_idle_seconds_total",
                        "legato_engine_decode_seconds_total",
                    ),
                    "of decode time",
                )
            ],
        ),
        (
            "Rows of a decode step",
            "short",
            [(_gauge("legato_engine_batch_rows"), "{{instance}} {{engine}}")],
        ),
        (
            "Gain of pipelining",
            "percentunit",
            [
                (_gauge("legato_pipeline_predicted_gain_ratio"), "predicted {{engine}}"),
                (_gauge("legato_pipeline_observed_gain_ratio"), "observed {{engine}}"),
            ],
        ),
    ],
    "Speculation": [
        (
            "Acceptance",
            "percentunit",
            [
                (
                    _share("legato_draft_tokens_accepted_total", "legato_draft_tokens_total"),
                    "accepted",
                )
            ],
        ),
        ("Draft tokens", "short", [(_rate("legato_draft_tokens_total"), "a second")]),
        ("Blocks by size", "short", [(_rate("legato_draft_blocks_total", by="size"), "{{size}}")]),
    ],
    "Caches": [
        (
            "KV pages",
            "short",
            [
                (_gauge("legato_kv_pages_used"), "used {{engine}}"),
                (_gauge("legato_kv_pages_cached"), "cached {{engine}}"),
                (_gauge("legato_kv_pages_limit"), "limit {{engine}}"),
            ],
        ),
        (
            "Hit ratio",
            "percentunit",
            [
                (
                    _share("legato_prefix_cache_hits_total", "legato_prefix_cache_queries_total"),
                    "prefix cache",
                ),
                (
                    _share("legato_image_cache_hits_total", "legato_image_cache_queries_total"),
                    "image cache",
                ),
            ],
        ),
        (
            "Preemptions",
            "short",
            [
                (_rate("legato_preemptions_total"), "requests a second"),
                (_rate("legato_recomputed_tokens_total"), "positions computed again a second"),
            ],
        ),
        (
            "Image memory",
            "bytes",
            [
                (_gauge("legato_image_cache_bytes"), "cached {{engine}}"),
                (_gauge("legato_image_held_bytes"), "held {{engine}}"),
            ],
        ),
        ("Images decoded", "ops", [(_rate("legato_images_decoded_total"), "a second")]),
        ("Adapter slots", "short", [(_gauge("legato_adapter_slots_used"), "used {{engine}}")]),
    ],
    "Sessions": [
        (
            "Sessions",
            "short",
            [
                (_gauge("legato_sessions_open"), "open"),
                (_gauge("legato_sessions_waiting_for_credits"), "waiting for credits"),
            ],
        ),
        (
            "Frames",
            "short",
            [
                (_rate("legato_session_frames_total"), "received a second"),
                (_rate("legato_session_frames_dropped_total", by="reason"), "dropped: {{reason}}"),
            ],
        ),
        ("Age of a frame at its result", "s", _quantiles("legato_session_frame_age_seconds")),
    ],
    "Errors": [
        (
            "Failed RPCs by reason",
            "reqps",
            [
                (
                    _rate("legato_rpcs_total", by="code, reason", more='code!="OK"'),
                    "{{code}} {{reason}}",
                )
            ],
        ),
        (
            "Rejections",
            "reqps",
            [(_rate("legato_admission_rejections_total", by="reason"), "{{reason}}")],
        ),
        ("Log lines dropped", "short", [(_rate("legato_log_lines_dropped_total"), "a second")]),
    ],
    "Processes": [
        ("Memory", "bytes", [(_gauge("legato_process_resident_memory_bytes"), "{{process}}")]),
        (
            "CPU",
            "short",
            [(_rate("legato_process_cpu_seconds_total", by="process"), "{{process}}")],
        ),
        (
            "Event loop lag",
            "s",
            [
                *_quantiles("legato_event_loop_lag_seconds"),
                (_gauge("legato_event_loop_longest_stall_seconds"), "longest, {{process}}"),
            ],
        ),
        ("Open files", "short", [(_gauge("legato_process_open_fds"), "{{process}}")]),
        ("Requests in flight", "short", [(_gauge("legato_requests_in_flight"), "{{instance}}")]),
        (
            "RPCs begun",
            "reqps",
            [(_rate("grpc_server_call_started_total", by="grpc_method"), "{{grpc_method}}")],
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return what Grafana imports."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, contents in PANELS.items():
        panels.append(_row(len(panels) + 1, row, y))
        y += 1
        for index, (title, unit, queries) in enumerate(contents):
            x, line = index % _COLUMNS * _WIDTH, index // _COLUMNS
            panels.append(_panel(len(panels) + 1, title, unit, queries, x, y + line * _HEIGHT))
        y += -(-len(contents) // _COLUMNS) * _HEIGHT
    return {
        "uid": "legato",
        "title": "Legato",
        "tags": ["legato"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "definition": "label_values(legato_build_info, instance)",
                    "query": {
                        "query": "label_values(legato_build_info, instance)",
                        "refId": "instances",
                    },
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                    "current": {"text": ["All"], "value": ["$__all"]},
                },
            ]
        },
        "panels": panels,
    }


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": 24, "x": 0, "y": y}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(
    number: int, title: str, unit: str, queries: list[tuple[str, str]], x: int, y: int
) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    _PATH.write_text(json.dumps(dashboard(), indent=2) + "\n")
