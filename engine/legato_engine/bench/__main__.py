"""`python -m legato_engine.bench` is `legato bench`."""

import sys

from legato_engine.bench.command import log_to_stderr, main

if __name__ == "__main__":
    log_to_stderr()
    sys.exit(main())
