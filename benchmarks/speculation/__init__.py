"""`python -m benchmarks speculation`: measure, record and draw what speculation gains."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.core.assembly import assemble

from benchmarks import shared_options
from benchmarks.speculation.report import SETTINGS, WORKLOADS, Plan, measure, write
from benchmarks.speculation.workloads import FEWEST, read_texts


def main(argv: Sequence[str]) -> int:
    """Measure every setting and write its record."""
    arguments = parse(argv)
    write(arguments.name, measured(arguments))
    return 0


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each workload and setting, ready for JSON.

    Raises:
        InvalidField: a setting or workload is unknown.
    """
    config = model_config(arguments)
    most = max(arguments.streams)
    config = msgspec.structs.replace(
        config, max_running=most, max_waiting=config.max_waiting + most, crops_per_launch=0
    )
    assembly = assemble(config)
    texts = read_texts(arguments.texts) if arguments.texts else {}
    workloads = arguments.workloads or tuple(texts) or WORKLOADS
    plan = Plan(
        streams=arguments.streams,
        length=arguments.length,
        repeats=arguments.repeats,
        settings=arguments.settings,
        workloads=workloads,
        context=arguments.context,
        fewest=arguments.requests,
        texts={name: texts[name] for name in texts if name in workloads},
    )
    try:
        rows = measure(assembly, plan)
    finally:
        assembly.device.close()
    return {
        "model": msgspec.to_builtins(assembly.info),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options; the model's are those of `legato bench`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="speculation", help="of the record")
    parser.add_argument(
        "--streams", default=[1, 8], type=shared_options.numbers, help="e.g. 1,8,32"
    )
    parser.add_argument("--length", default=110, type=int, help="tokens per request")
    parser.add_argument(
        "--context", default=0, type=int, help="position of the first token; 0: as the task has it"
    )
    parser.add_argument("--repeats", default=3, type=int, help="timed runs of each setting")
    parser.add_argument(
        "--settings", default=SETTINGS, type=shared_options.names, help="e.g. fixed:4,seed"
    )
    parser.add_argument(
        "--workloads",
        default=(),
        type=shared_options.names,
        help=f"of {', '.join(WORKLOADS)}, or of the files of --texts; by default all of either",
    )
    parser.add_argument(
        "--texts", type=Path, help="a folder of real prompts, as benchmarks/speculation/texts"
    )
    parser.add_argument(
        "--requests", default=FEWEST, type=int, help="at least so many of each profile"
    )
    return parser.parse_args(argv)
