"""Many more random schedules: `python -m tests.engine.scheduler.soak --schedules 1000000`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.engine.scheduler.schedules import run_all

REPORTED = 10_000  # schedules between two lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run them in order and say how it goes; the first that breaks a rule ends it."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--schedules", default=1_000_000, type=int)
    parser.add_argument("--first", default=0, type=int, help="seed of the first")
    arguments = parser.parse_args(argv)
    start, stop = time.monotonic(), arguments.first + arguments.schedules
    for first in range(arguments.first, stop, REPORTED):
        last = min(first + REPORTED, stop)
        tally = run_all(range(first, last))
        seconds = time.monotonic() - start
        sys.stdout.write(f"{last - arguments.first} in {seconds:.0f} s: {tally}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
