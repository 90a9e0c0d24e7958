"""Launches of the megakernel for a sanitizer to watch: `python -m tests.gpu.watched_launches`.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m ...

Two layers of legato-tiny's width, builds for 8 and 16 tokens, greedy and drawn rows, with pages
of their own and in common. Drafts are checked against single tokens, too. The watchdog waits ten
minutes, as a watched launch is slow.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from unittest import mock

from legato_engine.kernels.megakernel import kernel
from legato_engine.kernels.megakernel.sizes import LEGATO_TINY, PAGE

from tests.megakernel import both, drafts, values, words

SIZES = dataclasses.replace(LEGATO_TINY, num_layers=2)
ROWS = (5, 13)
STEPS = (1, 3)
SCENE = drafts.Scene(tokens=10, back=20)
RULES = ((0.7, 0.9, 0), (1.0, 1.0, 40), (2.0, 1.0, 0))
"""Temperature, top-p and top-k, in turns with greedy rows."""


def launch_words() -> None:
    world = words.World(SIZES)
    for count, common in itertools.product(ROWS, (0, 20)):
        rows = words.Rows(world, count)
        if common:
            rows.cache.pages[:, :common] = rows.cache.pages[0, :common].clone()
            rows.positions = common * PAGE + rows.positions % 300
        for index, (temperature, top_p, top_k) in enumerate(RULES):
            some = slice(index, count, 1 + len(RULES))
            rows.rules.temperature_R[some] = temperature
            rows.rules.top_p_R[some], rows.rules.top_k_R[some] = top_p, top_k
        for steps in STEPS:
            rows.run(world.kernel(count), steps)


def launch_values() -> None:
    world = values.World(SIZES)
    for count in ROWS:
        for steps in STEPS:
            values.Rows(world, count).run(world.kernel(count), steps)


def launch_both() -> None:
    world = both.World(SIZES, dataclasses.replace(SCENE, places=(300, 63, 255), most=3))
    for seed in (0, 1):  # greedy, drawn
        both.check(world, "budget", 0.7, seed)


def launch_drafts() -> None:
    world = drafts.World(SIZES, SCENE)
    for name in drafts.POLICIES:
        for count in (1, 2):
            for seed in (0, 1):  # greedy, drawn
                drafts.check(world, world.drafting(name, count), 0.7, seed)


KINDS = {
    "words": launch_words,
    "values": launch_values,
    "drafts": launch_drafts,
    "both": launch_both,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="kind", choices=KINDS)
    with mock.patch.object(kernel, "PATIENCE_MS", 600_000):
        for kind in parser.parse_args().kinds:
            KINDS[kind]()
            sys.stdout.write(f"{kind}: all launches are over\n")


if __name__ == "__main__":
    main()
