"""The whole path of a robot's camera, in real time: frames, a session, tracks, places in 3D.

Cameras show a clip that was rendered before, 30 frames a second; a control loop asks 30 times a
second where everything is. Load is the frames that are asked about a second, relative to the
server's capacity: those that one session answers a second if a frame always waits. It is measured
first. At most 30 frames a second come from one camera; a higher load has several. In the last run
the server is killed (SIGKILL) and started again at once on its port.

Two servers: legato-tiny, which finds the things of this clip; and one without a model, `scripted`,
that answers from the truth in the time of a model on a GPU, with inexact boxes.
Options after `--` are those of `legato serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from legato_client import Client

from benchmarks import record
from benchmarks.robot import scoring
from benchmarks.robot.drive import (
    MAX_AGE,
    MortalServer,
    ShownCamera,
    play_for,
    play_with_kills,
    playing,
)
from benchmarks.robot.scene import FPS, MISSING, NOUNS, PERIOD, THINGS, VISIBLE, Clip

SERVERS = ("legato-tiny", "scripted")
OUTAGE = (
    *("serving after, s", "first answer after, s", "without predictions, s"),
    *("frames without answer", "things that kept their track"),
)
_START_TIMEOUT = 300.0  # seconds


def main(argv: Sequence[str]) -> int:
    """Render, play and score; write the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks robot", description=__doc__)
    parser.add_argument("--seconds", type=float, default=24, help="of a run; default %(default)g")
    parser.add_argument(
        "--loads", type=float, nargs="*", default=[1, 3], help="default: %(default)s"
    )
    parser.add_argument("--kills", type=int, default=2, help="of the last run's server")
    parser.add_argument(
        "--servers", nargs="*", default=SERVERS, choices=SERVERS, help="default: both"
    )
    arguments, serve = parser.parse_known_args(argv)
    serve = [option for option in serve if option != "--"]
    print(f"rendering {min(arguments.seconds, PERIOD):g} s", file=sys.stderr)
    clip = Clip(arguments.seconds)
    servers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        truth = Path(folder) / "truth.json"
        truth.write_text(json.dumps(clip.truth()))
        for name in arguments.servers:
            server = MortalServer(serve, truth if name == "scripted" else None)
            with server:
                servers[name] = _measure(server, clip, arguments)
    figures = {"serve": serve, "max_age_s": MAX_AGE, "servers": servers}
    tables = [line for name, each in servers.items() for line in _tables(name, each)]
    record.write("robot", "A robot's camera, tracks and places in 3D", figures, tables)
    return 0


def _measure(server: MortalServer, clip: Clip, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a server's capacity, play all loads, and play with its deaths."""
    server.wait_until_serving(_START_TIMEOUT, lambda text: None)
    runs: dict[str, Any] = {}
    with Client(server.target) as client:
        capacity = _capacity(client, clip, arguments.seconds / 4)
        for load in arguments.loads:
            with playing(client, clip, load * capacity) as cameras:
                play_for(cameras[0], arguments.seconds)
            _require_answers(cameras)
            runs[f"{load:g}x"] = scoring.figures(clip, cameras)
        with playing(client, clip, min(capacity, FPS)) as (camera,):
            outages = play_with_kills(server, camera, arguments.seconds, arguments.kills)
        runs[f"1x, {arguments.kills} kills"] = scoring.figures(clip, [camera])
    return {
        "capacity": capacity,
        "load_average": os.getloadavg()[0],
        "runs": runs,
        "outages": [scoring.outage(clip, camera, each) for each in outages],
    }


def _capacity(client: Client, clip: Clip, seconds: float) -> float:
    """Return the frames that one session answers a second if a frame always waits."""
    with playing(client, clip, FPS, every=True) as (camera,):
        play_for(camera, seconds, answers=3)
    _require_answers([camera])
    arrived = [each.arrived for each in camera.answers]
    return (len(arrived) - 1) / (arrived[-1] - arrived[0])


def _require_answers(cameras: Sequence[ShownCamera]) -> None:
    """Refuse figures of a server that fails: that is fast."""
    if failed := sum(camera.counters.totals().failed_tasks for camera in cameras):
        raise RuntimeError(f"{failed} tasks failed, which no load explains")


def _tables(name: str, figures: dict[str, Any]) -> list[str]:
    runs, outages = figures["runs"], figures["outages"]
    note = (
        f"{name} answers {figures['capacity']:.1f} frames a second, each asked for "
        f"{', '.join(NOUNS)}. {len(THINGS)} things; one counts while {VISIBLE:.0%} of it is seen. "
        f"Depth lacks {MISSING:.0%} of pixels, and more at edges."
    )
    kills = [[number, *outage_cells(each)] for number, each in enumerate(outages, 1)]
    tables = record.table(["", *runs], rows(runs)), record.table(["kill", *OUTAGE], kills)
    return [note, "", tables[0], "", tables[1], ""]


def rows(runs: dict[str, Any]) -> list[list[str]]:
    """Return the measures of all runs, a row each."""
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "cameras x frames a second": lambda r: f"{r['cameras']} x {_rate(r, 'offered'):.1f}",
        "answered a second": lambda r: f"{r['cameras'] * _rate(r, 'answered'):.1f}",
        "replaced before sending, dropped, lost": lambda r: (
            f"{r['replaced']}, {sum(r['dropped'].values())}, {r['lost']} of {r['offered']}"
        ),
        "age on arrival, ms (P50 / P95)": lambda r: _quantiles(r["age_s"], 1000, 0),
        "IoU when taken": lambda r: _number(r["iou"]["captured"]),
        "IoU on arrival, as answered": lambda r: _number(r["iou"]["arrival"]),
        "IoU on arrival, extrapolated": lambda r: _number(r["iou"]["arrival_expected"]),
        "IoU at any moment, newest answer": lambda r: _number(r["iou"]["any_moment"]),
        "IoU at any moment, `now()`": lambda r: _number(r["iou"]["any_moment_expected"]),
        "IDF1, switches": lambda r: _identities(r["identities"]),
        "3D error of answers, cm (P50 / P95)": lambda r: _quantiles(r["error_m"]["answer"], 100, 1),
        "answers' places within 10 cm": lambda r: _share(r["placed"]["answer"]),
        "3D error of `now()`, cm (P50 / P95)": lambda r: _quantiles(r["error_m"]["now"], 100, 1),
        "`now()`'s places within 10 cm": lambda r: _share(r["placed"]["now"]),
    }
    return [[name, *(cell(run) for run in runs.values())] for name, cell in cells.items()]


def _rate(run: dict[str, Any], field: str) -> float:
    return float(run[field] / run["seconds"] / run["cameras"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _quantiles(values: dict[str, float] | None, factor: float, digits: int) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{factor * each:.{digits}f}" for each in values.values())


def _identities(values: dict[str, float] | None) -> str:
    return "-" if values is None else f"{values['idf1']:.2f}, {values['num_switches']:.0f}"


def outage_cells(outage: dict[str, Any]) -> list[object]:
    """Return what `OUTAGE` names."""
    times = (outage[name] for name in ("serving_s", "answering_s", "without_tracks_s"))
    kept = f"{outage['kept']} of {outage['followed']}"
    return [*(f"{each:.1f}" for each in times), outage["unanswered"], kept]
