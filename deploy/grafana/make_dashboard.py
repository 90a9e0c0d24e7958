"""Writes legato.json beside this file: python deploy/grafana/make_dashboard.py."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

_GRAPH, _FIGURE = (8, 8), (4, 4)  # width and height of a panel
_COLUMNS = 24  # of the dashboard
_SELECT = 'instance=~"$instance"'
_READY = 'state="ready"'
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


class Panel(NamedTuple):
    """Graph, or with `is_figure` one of the numbers at the top.

    `steps` are the values from which it is yellow and red; `worse_below` turns them round.
    """

    title: str
    unit: str
    queries: list[tuple[str, str]]
    description: str
    steps: tuple[float, ...] = ()
    worse_below: bool = False
    is_figure: bool = False


_CALLS = 'method!~"grpc.*"'
_ERRORS = f'code=~"INTERNAL|UNKNOWN|UNAVAILABLE|DATA_LOSS", {_CALLS}'
_UNWANTED = 'reason!="superseded"'
_OPEN_ROWS = ("Overview", "Sessions")

PANELS: dict[str, list[Panel]] = {
    "Overview": [
        Panel(
            "Up",
            "bool_yes_no",
            [(f"min(max by (instance) ({_gauge('legato_engine_state', _READY)}))", "ready")],
            "Whether every chosen server has an engine that is ready.",
            steps=(1,),
            worse_below=True,
            is_figure=True,
        ),
        Panel(
            "Request P95",
            "s",
            [(_quantile(0.95, "legato_request_seconds"), "P95")],
            "95 % of requests take at most this long in the engine.",
            steps=(1, 5),
            is_figure=True,
        ),
        Panel(
            "Frame age P95",
            "s",
            [(_quantile(0.95, "legato_session_frame_age_seconds"), "P95")],
            "95 % of a session's results are at most this old when they are sent.",
            steps=(0.5, 2),
            is_figure=True,
        ),
        Panel(
            "Frames dropped",
            "percentunit",
            [
                (
                    f"{_rate('legato_session_frames_dropped_total', more=_UNWANTED)}"
                    f" / {_rate('legato_session_frames_total')}",
                    "dropped",
                )
            ],
            "Share of session frames that were too old, beyond the credits or cancelled. Frames "
            "superseded by a newer one are not counted: any fast camera has them.",
            steps=(0.01, 0.1),
            is_figure=True,
        ),
        Panel(
            "Failed calls",
            "percentunit",
            [
                (
                    f"({_rate('legato_rpcs_total', more=_ERRORS)} or vector(0))"
                    f" / {_rate('legato_rpcs_total', more=_CALLS)}",
                    "failed",
                )
            ],
            "Share of calls that failed by the server's fault. The objective is 0.1 %.",
            steps=(0.001, 0.0144),
            is_figure=True,
        ),
        Panel(
            "Queue P95",
            "s",
            [(_quantile(0.95, "legato_request_queue_seconds"), "P95")],
            "95 % of requests wait at most this long.",
            steps=(0.5, 2),
            is_figure=True,
        ),
    ],
    "Sessions": [
        Panel(
            "Sessions",
            "short",
            [
                (_gauge("legato_sessions_open"), "open"),
                (_gauge("legato_sessions_waiting_for_credits"), "waiting for credits"),
            ],
            "Open sessions, and those whose results wait for the client to read.",
        ),
        Panel(
            "Frames",
            "suffix: frames/s",
            [
                (_rate("legato_session_frames_total"), "received a second"),
                (_rate("legato_session_frames_dropped_total", by="reason"), "dropped: {{reason}}"),
            ],
            "Frames received, and dropped by reason. superseded: a newer frame came, as intended.",
        ),
        Panel(
            "Age of a frame at its result",
            "s",
            _quantiles("legato_session_frame_age_seconds"),
            "From a frame's capture to its last result.",
            steps=(0.5, 2),
        ),
    ],
    "Latency": [
        Panel(
            "Whole request",
            "s",
            _quantiles("legato_request_seconds", "skill"),
            "Time in the engine.",
        ),
        Panel(
            "First token",
            "s",
            _quantiles("legato_request_first_token_seconds", "skill"),
            "Time from arrival at the engine to the first token.",
        ),
        Panel(
            "Between tokens",
            "s",
            _quantiles("legato_inter_token_seconds"),
            "Time between two tokens of one request.",
        ),
        Panel(
            "Queue",
            "s",
            _quantiles("legato_request_queue_seconds"),
            "Time in the queue. Lower the load or add a server if it stays above the line.",
            steps=(2,),
        ),
        Panel(
            "Prefill",
            "s",
            _quantiles("legato_request_prefill_seconds"),
            "Time from the launch of the prefill to the first token.",
        ),
        Panel(
            "Decode",
            "s",
            _quantiles("legato_request_decode_seconds"),
            "Time from the first token to the last.",
        ),
        Panel(
            "Image",
            "s",
            _quantiles("legato_request_image_seconds"),
            "Time to decode and prepare a request's image.",
        ),
        Panel(
            "RPC",
            "s",
            _quantiles("grpc_server_call_duration_seconds", "grpc_method"),
            "Time of calls in the server, with what clients wait for.",
        ),
        Panel(
            "Time per token of a request",
            "s",
            _quantiles("legato_request_token_seconds", "skill"),
            "Mean time between the tokens of a request.",
        ),
    ],
    "Load": [
        Panel(
            "Requests",
            "short",
            [
                (_gauge("legato_engine_requests_running"), "running {{engine}}"),
                (_gauge("legato_engine_requests_waiting"), "waiting {{engine}}"),
                (_gauge("legato_engine_requests_limit"), "limit {{engine}}"),
            ],
            "Requests that decode or wait, and how many may decode at a time.",
        ),
        Panel(
            "Finished requests by skill",
            "reqps",
            [(_rate("legato_requests_total", by="skill"), "{{skill}}")],
            "Finished requests a second.",
        ),
        Panel(
            "Tokens",
            "suffix: tokens/s",
            [
                (_rate("legato_output_tokens_total"), "generated a second"),
                (_rate("legato_prompt_tokens_total"), "prompt a second"),
            ],
            "Tokens a second: generated, and of prompts and images.",
        ),
        Panel(
            "Finished requests by tenant",
            "reqps",
            [(_rate("legato_requests_total", by="tenant"), "{{tenant}}")],
            "Finished requests a second; without credentials all have one tenant.",
        ),
        Panel(
            "Estimated wait",
            "s",
            [(_gauge("legato_engine_estimated_wait_seconds"), "{{instance}} {{engine}}")],
            "Time that a new request would wait.",
            steps=(2,),
        ),
        Panel(
            "Error of the estimate",
            "s",
            _quantiles("legato_wait_estimate_error_seconds"),
            "Difference between the estimated and the actual wait.",
        ),
    ],
    "Errors": [
        Panel(
            "Failed RPCs by reason",
            "reqps",
            [
                (
                    _rate("legato_rpcs_total", by="code, reason", more='code!="OK"'),
                    "{{code}} {{reason}}",
                )
            ],
            "Failed calls a second; the reasons are those of the contract.",
        ),
        Panel(
            "Rejections",
            "reqps",
            [(_rate("legato_admission_rejections_total", by="reason"), "{{reason}}")],
            "Calls refused before any work. QUEUE_FULL: too little capacity.",
        ),
        Panel(
            "Log lines dropped",
            "suffix: lines/s",
            [(_rate("legato_log_lines_dropped_total"), "a second")],
            "Log lines that could not be written: nothing reads standard error fast enough.",
        ),
    ],
    "Engine": [
        Panel(
            "State",
            "short",
            [(_gauge("legato_engine_state"), "{{engine}} {{state}}")],
            "1 for each engine's state: starting, ready, lost and so on.",
        ),
        Panel(
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
            "Engines started after one was lost, and requests that another engine continued.",
        ),
        Panel(
            "Heartbeat age",
            "s",
            [(_gauge("legato_engine_heartbeat_age_seconds"), "{{instance}} {{engine}}")],
            "Time since each engine's last heartbeat. Above 10 s it is killed and restarted.",
            steps=(5,),
        ),
        Panel(
            "Decode step",
            "s",
            _quantiles("legato_engine_step_seconds"),
            "Time of one decode step.",
        ),
        Panel(
            "Parts of a decode step (median)",
            "s",
            [(_gauge("legato_engine_step_part_seconds"), "{{engine}} {{part}}")],
            "Where the time of single decode steps goes; decode loops are left out.",
        ),
        Panel(
            "Launches",
            "ops",
            [(_rate("legato_engine_launches_total", by="kind"), "{{kind}}")],
            "Launches committed a second, by kind.",
        ),
        Panel(
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
            "Share of the decode time without work for the device. High: the host is too slow.",
            steps=(0.2, 0.5),
        ),
        Panel(
            "Rows of a decode step",
            "short",
            [(_gauge("legato_engine_batch_rows"), "{{instance}} {{engine}}")],
            "Mean batch size of single decode steps.",
        ),
        Panel(
            "Gain of pipelining",
            "percentunit",
            [
                (_gauge("legato_pipeline_predicted_gain_ratio"), "predicted {{engine}}"),
                (_gauge("legato_pipeline_observed_gain_ratio"), "observed {{engine}}"),
            ],
            "Throughput gained by launching a step before the last one is read back; 0 at depth 1.",
        ),
    ],
    "Caches": [
        Panel(
            "KV pages",
            "short",
            [
                (_gauge("legato_kv_pages_used"), "used {{engine}}"),
                (_gauge("legato_kv_pages_cached"), "cached {{engine}}"),
                (_gauge("legato_kv_pages_limit"), "limit {{engine}}"),
            ],
            "Pages of live requests and of the prefix cache, and the pool's size.",
        ),
        Panel(
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
            "Share of prompt positions and images found in their caches.",
        ),
        Panel(
            "Preemptions",
            "ops",
            [
                (_rate("legato_preemptions_total"), "requests a second"),
                (_rate("legato_recomputed_tokens_total"), "positions computed again a second"),
            ],
            "Requests that gave up their KV pages, and what they had to compute again.",
        ),
        Panel(
            "Image memory",
            "bytes",
            [
                (_gauge("legato_image_cache_bytes"), "cached {{engine}}"),
                (_gauge("legato_image_held_bytes"), "held {{engine}}"),
            ],
            "Prepared images, cached and held for their owners.",
        ),
        Panel(
            "Images decoded",
            "ops",
            [(_rate("legato_images_decoded_total"), "a second")],
            "Images decoded a second; cached images are not decoded again.",
        ),
        Panel(
            "Adapter slots",
            "short",
            [(_gauge("legato_adapter_slots_used"), "used {{engine}}")],
            "Adapter slots that live requests use.",
        ),
    ],
    "Speculation": [
        Panel(
            "Acceptance",
            "percentunit",
            [
                (
                    _share("legato_draft_tokens_accepted_total", "legato_draft_tokens_total"),
                    "accepted",
                )
            ],
            "Share of draft tokens that verification accepted.",
        ),
        Panel(
            "Draft tokens",
            "suffix: tokens/s",
            [(_rate("legato_draft_tokens_total"), "a second")],
            "Draft tokens verified a second.",
        ),
        Panel(
            "Blocks by size",
            "suffix: blocks/s",
            [(_rate("legato_draft_blocks_total", by="size"), "{{size}}")],
            "Verified blocks a second, by number of draft tokens.",
        ),
    ],
    "Processes": [
        Panel(
            "Memory",
            "bytes",
            [(_gauge("legato_process_resident_memory_bytes"), "{{process}}")],
            "Resident memory of each process.",
        ),
        Panel(
            "CPU",
            "suffix: cores",
            [(_rate("legato_process_cpu_seconds_total", by="process"), "{{process}}")],
            "Cores in use by each process.",
        ),
        Panel(
            "Event loop lag",
            "s",
            [
                *_quantiles("legato_event_loop_lag_seconds"),
                (_gauge("legato_event_loop_longest_stall_seconds"), "longest, {{process}}"),
            ],
            "Delay of a timer in a service process. High: it lacks CPU time.",
            steps=(0.1,),
        ),
        Panel(
            "Open files",
            "short",
            [(_gauge("legato_process_open_fds"), "{{process}}")],
            "Open file descriptors, with sockets.",
        ),
        Panel(
            "Requests in flight",
            "short",
            [(_gauge("legato_requests_in_flight"), "{{instance}}")],
            "Requests that service processes have open.",
        ),
        Panel(
            "RPCs begun",
            "reqps",
            [(_rate("grpc_server_call_started_total", by="grpc_method"), "{{grpc_method}}")],
            "Calls begun a second, by method.",
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return what Grafana imports."""
    panels: list[dict[str, Any]] = []
    numbers = itertools.count(1)
    y = 0
    for title, contents in PANELS.items():
        row = _row(next(numbers), title, y)
        wide, high = _FIGURE if contents[0].is_figure else _GRAPH
        columns = _COLUMNS // wide
        for index, panel in enumerate(contents):
            x, line = index % columns * wide, index // columns
            place = {"h": high, "w": wide, "x": x, "y": y + 1 + line * high}
            row["panels"].append(_panel(next(numbers), panel, place))
        y += 1
        panels.append(row)
        if title in _OPEN_ROWS:  # a collapsed row holds its panels
            panels += row["panels"]
            row |= {"collapsed": False, "panels": []}
            y += -(-len(contents) // columns) * high
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
        "collapsed": True,
        "gridPos": place,
        "panels": [],
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    shown = _stat() if panel.is_figure else _graph(panel)
    defaults = {"unit": panel.unit, "thresholds": _thresholds(panel), **shown.pop("defaults")}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
        **shown,
    }


def _stat() -> dict[str, Any]:
    return {
        "type": "stat",
        "defaults": {"noValue": "no data"},
        "options": {
            "colorMode": "background",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        },
    }


def _graph(panel: Panel) -> dict[str, Any]:
    style = {"thresholdsStyle": {"mode": "dashed" if panel.steps else "off"}}
    return {
        "type": "timeseries",
        "defaults": {"custom": style},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        },
    }


def _thresholds(panel: Panel) -> dict[str, Any]:
    """Return the colours by value; one step is from good to bad."""
    colors = ["green", "yellow", "red"] if len(panel.steps) > 1 else ["green", "red"]
    if panel.worse_below:
        colors.reverse()
    values = (None, *panel.steps)
    steps = [{"color": colors[index], "value": value} for index, value in enumerate(values)]
    return {"mode": "absolute", "steps": steps}


if __name__ == "__main__":
    _PATH.write_text(json.dumps(dashboard(), indent=2) + "\n")
