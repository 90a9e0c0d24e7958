"""Many simulated histories: `python -m tests.simulation --seeds 500000`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from tests.simulation.run import Totals, run_all

PART = 500  # seeds


def main() -> int:
    """Print progress; the first failure ends the run and names its seed."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", default=500_000, type=int)
    parser.add_argument("--first", default=0, type=int)
    parser.add_argument("--processes", default=os.cpu_count() or 1, type=int)
    arguments = parser.parse_args()
    stop = arguments.first + arguments.seeds
    parts = [range(at, min(at + PART, stop)) for at in range(arguments.first, stop, PART)]
    totals, start = Totals(), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for part in pool.imap(run_all, parts):
            totals.join(part)
            sys.stdout.write(f"{time.monotonic() - start:.0f} s: {totals}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
