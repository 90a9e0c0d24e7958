"""`python -m benchmarks [--dirty] NAME [options]`; without a name, those that any machine can run.

A benchmark starts only in a clean tree, because its record names a commit; with `--dirty` the
record says `dirty`.
"""

from __future__ import annotations

import importlib
import os
import sys

from benchmarks import provenance

EVERYWHERE = ("decode", "rpc", "tick")  # short on a CPU too
TOOLS = {  # write no record
    "pack": "provenance",
    "publish": "publish",
    "sizing": "fleet.sizing",
    "summary": "summary",
    "timeline": "timeline",
}
BENCHMARKS = (
    *EVERYWHERE,
    "access",
    "adapters",
    "beside",
    "confidence",
    "cpu_peers",
    "devices",
    "drafting_paths",
    "e2e",
    "fleet",
    "fp8",
    "hop",
    "image",
    "intake",
    "kernels",
    "kv",
    "lone",
    "loops",
    "memory",
    "mesh",
    "parts",
    "paths",
    "peers",
    "portable",
    "prompts",
    "reference",
    "rounding",
    "serve",
    "speculation",
    "start",
    "telemetry",
    "text_step",
    "tracking",
)


def main() -> int:
    """Run the named benchmark or tool; without a name, all benchmarks that run everywhere."""
    arguments = sys.argv[1:]
    if "--dirty" in arguments[:1]:
        os.environ[provenance.ALLOW_DIRTY] = "1"
        del arguments[0]
    name, *options = arguments or [""]
    if name in TOOLS:
        return run(TOOLS[name], options)
    if name and name not in BENCHMARKS:
        known = ", ".join((*BENCHMARKS, *TOOLS))
        print(f"unknown benchmark {name!r}; known: {known}", file=sys.stderr)
        return 2
    try:
        provenance.recordable()  # before hours of measuring rather than after them
    except provenance.DirtyTreeError as error:
        print(error, file=sys.stderr)
        return 1
    return run(name, options) if name else max(run(each, []) for each in EVERYWHERE)


def run(name: str, options: list[str]) -> int:
    """Import one benchmark only, because load processes import this module without torch."""
    status: int = importlib.import_module(f"benchmarks.{name}").main(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
