"""A process that writes one slot again and again, each time with one byte all over.

`python -m tests.service.slot_writer SIZE` prints the region's name and writes until its input ends.
"""

from __future__ import annotations

import random
import sys
import threading
import time

from legato_client._images.sources import SharedFrames


def main() -> None:
    """Write until the input ends."""
    size = int(sys.argv[1])
    frames = [bytes([value]) * size for value in range(1, 6)]
    ended = threading.Event()
    threading.Thread(target=_listen, args=(ended,), daemon=True).start()
    with SharedFrames(size, num_slots=1) as ring:
        sys.stdout.write(ring.region + "\n")
        sys.stdout.flush()
        while not ended.is_set():
            ring.write(random.choice(frames)).release()
            time.sleep(random.choice((0, 0, 0.001, 0.01)))


def _listen(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main()
