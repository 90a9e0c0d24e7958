"""The stages of a single request: new images one after another, through gRPC.

The client's clock and the engine's timeline are one clock, so a call splits into stages without
gaps:

- `there`: the client, gRPC, the service, and the engine except for the decoding of the image;
- `picture`: that decoding;
- `launch`: from the scheduler's plan until the device starts;
- `prefill`: the device's first launch, up to the first token (vision, the positions of image and
  question);
- `decode`: the device until the last token is sampled;
- `back`: from there until the client has the answer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from legato_client import Client, Sampling
from legato_client.cli.demo import LocalServer
from legato_engine.telemetry import LANES, timeline_path

from benchmarks import record
from benchmarks.image import charts
from benchmarks.image.charts import stamped
from benchmarks.serve import load

STAGES = ("there", "picture", "launch", "prefill", "decode", "back")
QUESTION = "What is there?"
POOL = 8  # images, stamped anew for each call
UNCOUNTED = 10
START_TIMEOUT = 300.0
DUMP_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call: microseconds of the shared clock, and of decoding."""

    start: float
    end: float
    picture: float


def split(call: Call, spans: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return milliseconds of a call's `STAGES`; `spans` are a timeline's complete events.

    Raises:
        ValueError: The timeline has no launch of the call.
    """
    own = [span for span in spans if call.start <= span["ts"] < call.end]
    plans = [span["ts"] for span in own if LANES[span["tid"]] == "cpu plan"]
    device = sorted(
        (span["ts"], span["ts"] + span["dur"])
        for span in own
        if LANES[span["tid"]] == "device compute"
    )
    if not plans or not device:
        raise ValueError("the timeline holds no launch of this call")
    marks = (
        call.start,
        min(plans) - call.picture,
        min(plans),
        device[0][0],
        device[0][1],
        max(end for _, end in device),
        call.end,
    )
    return {stage: (marks[index + 1] - marks[index]) / 1e3 for index, stage in enumerate(STAGES)}


def ask(target: str, pool: Sequence[bytes], calls: int, tokens: int) -> list[Call]:
    """Send new images one after another; the first ones are not counted."""
    sampling = Sampling(temperature=0.0, max_tokens=tokens, seed=0)
    made = []
    with Client(target) as client:
        for number in range(
            UNCOUNTED + calls + 1
        ):  # after the last one counted the timeline has it
            jpeg = stamped(pool[number % len(pool)], number)
            start = time.monotonic_ns()
            answer = client.query(jpeg, QUESTION, sampling=sampling)
            end = time.monotonic_ns()
            assert answer.info.timings is not None, "every answer says how long it took"
            made.append(Call(start / 1e3, end / 1e3, answer.info.timings.image * 1e6))
    return made[UNCOUNTED:-1]


def timeline(service: int) -> list[dict[str, Any]]:
    """Return the spans that the engine of the service process `service` has kept."""
    engine = load.engine(service)
    path = timeline_path(engine)
    path.unlink(missing_ok=True)
    os.kill(engine, signal.SIGUSR1)
    end = time.monotonic() + DUMP_TIMEOUT
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    events = json.loads(path.read_text())["traceEvents"]
    path.unlink()
    return [event for event in events if event["ph"] == "X"]


def main(argv: Sequence[str]) -> int:
    """Measure and record."""
    arguments, serve = _parse(argv)
    size = (arguments.width, arguments.height)
    pool = charts.jpegs(arguments.pictures, POOL, size)
    with LocalServer(serve) as server:
        server.wait_until_serving(START_TIMEOUT, lambda _: None)
        calls = ask(server.target, pool, arguments.calls, arguments.tokens)
        spans = timeline(server.pid)
    ways = [split(call, spans) for call in calls]
    whole = [(call.end - call.start) / 1e3 for call in calls]
    stages = {stage: [way[stage] for way in ways] for stage in STAGES} | {"whole": whole}
    figures = {
        "serve": serve,
        "size": size,
        "pictures": arguments.pictures,
        "jpeg_bytes": statistics.fmean(len(image) for image in pool),
        "tokens": arguments.tokens,
        "median_ms": {name: statistics.median(values) for name, values in stages.items()},
        "calls_ms": stages,
    }
    heads = ("stage", "median ms", "least", "most")
    cells = [
        [name, *(f"{value:.2f}" for value in (statistics.median(each), min(each), max(each)))]
        for name, each in stages.items()
    ]
    title = f"A lone new {arguments.pictures}, {arguments.tokens} tokens: {' '.join(serve)}"
    notes = f"{size[0]}x{size[1]}, JPEGs of {figures['jpeg_bytes'] / 1e3:.0f} kB."
    record.write(arguments.name, title, figures, [record.table(heads, cells), "", notes])
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks lone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Options of `legato serve` follow behind --.",
    )
    parser.add_argument("--name", default="lone", help="of the record")
    parser.add_argument("--width", type=int, default=850)
    parser.add_argument("--height", type=int, default=600)
    charts.add_option(parser)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("serve", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    return arguments, arguments.serve
