"""`python -m benchmarks NAME [options]`; without a name, those that any machine can run."""

from __future__ import annotations

import importlib
import sys

EVERYWHERE = ("decode", "rpc", "tick")  # short on a CPU, too
BENCHMARKS = (
    *EVERYWHERE,
    "adapters",
    "e2e",
    "fp8",
    "hop",
    "image",
    "intake",
    "kernels",
    "kv",
    "lone",
    "peers",
    "reference",
    "serve",
    "speculation",
    "summary",
)


def main() -> int:
    """Run the named benchmark, or all that run everywhere."""
    name, *options = sys.argv[1:] or [""]
    if name in BENCHMARKS:
        return run(name, options)
    if name:
        print(f"unknown benchmark {name!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return max(run(each, []) for each in EVERYWHERE)


def run(name: str, options: list[str]) -> int:
    """Load a benchmark and nothing else: load processes import this module, and need no torch."""
    status: int = importlib.import_module(f"benchmarks.{name}").main(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
