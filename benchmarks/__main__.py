"""`python -m benchmarks [decode|rpc] [options]`; without a name, both on the default device."""

from __future__ import annotations

import sys

from benchmarks import decode, rpc

BENCHMARKS = {"decode": decode.main, "rpc": rpc.main}


def main() -> int:
    """Run the named benchmark, or all."""
    name, *options = sys.argv[1:] or [""]
    if name in BENCHMARKS:
        return BENCHMARKS[name](options)
    if name:
        print(f"unknown benchmark {name!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return max(run([]) for run in BENCHMARKS.values())


if __name__ == "__main__":
    sys.exit(main())
