"""Many more random schedules: `python -m tests.engine.scheduler.soak --schedules 1000000`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence

from tests.engine.scheduler.schedules import Totals, run_all

REPORTED = 50  # lines of progress
MAX_PART_SIZE = 10_000  # schedules


def main(argv: Sequence[str] | None = None) -> int:
    """Run the schedules and print progress; the first failure ends the run."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--schedules", default=1_000_000, type=int)
    parser.add_argument("--first", default=0, type=int, help="seed of the first")
    parser.add_argument("--processes", default=os.cpu_count() or 1, type=int)
    arguments = parser.parse_args(argv)
    total, size = arguments.schedules, part_size(arguments.schedules, arguments.processes)
    stop = arguments.first + total
    parts = [range(at, min(at + size, stop)) for at in range(arguments.first, stop, size)]
    start, totals, done = time.monotonic(), Totals(), 0
    for number, (part, more) in enumerate(run_parts(parts, arguments.processes), start=1):
        totals.join(more)
        done += len(part)
        if number * REPORTED % len(parts) < REPORTED:
            seconds = time.monotonic() - start
            sys.stdout.write(f"{done} of {total} in {seconds:.0f} s: {totals}\n")
            sys.stdout.flush()
    return 0


def part_size(total: int, processes: int) -> int:
    """Return the schedules per part, few enough that all processes end together."""
    return max(1, min(MAX_PART_SIZE, total // (20 * processes)))


def run_parts(parts: Sequence[range], processes: int) -> Iterator[tuple[range, Totals]]:
    """Yield each part's totals in order; raise the first failure, which names its seed."""
    if processes == 1:
        yield from zip(parts, map(run_all, parts), strict=True)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from zip(parts, pool.imap(run_all, parts), strict=True)


if __name__ == "__main__":
    sys.exit(main())
