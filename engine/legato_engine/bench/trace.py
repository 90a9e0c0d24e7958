"""A timeline of a short run: `python -m legato_engine.bench.trace --output trace.json`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console

from legato_engine.bench.command import model_config
from legato_engine.bench.options import trace_parser
from legato_engine.bench.workload import Workload
from legato_engine.core.assembly import assemble
from legato_engine.scheduler.output import SilentSink
from legato_engine.telemetry import Timeline, step_feed


def main(argv: Sequence[str] | None = None) -> int:
    arguments = trace_parser().parse_args(argv)
    config = model_config(arguments)
    assembly = assemble(msgspec.structs.replace(config, max_running=arguments.streams))
    workload = Workload(
        assembly, kind=arguments.task, count=arguments.streams, length=arguments.length
    )
    timeline = Timeline(capacity=2 * workload.num_tokens + arguments.streams)
    observer = step_feed(assembly.runner.times, (timeline.add,))
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=arguments.depth, observer=observer)
    for sequence in workload.sequences():
        scheduler.submit(sequence)
    scheduler.drain()
    arguments.output.write_text(timeline.to_json())
    Console().print(f"{len(timeline.steps)} launches in {arguments.output}")
    assembly.device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
