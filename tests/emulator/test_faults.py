"""Planted faults in the megakernel's source.

Each is found by the emulated machine in a few launches, so the tests that pass can fail.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from legato_engine.kernels.cuda import decoder
from legato_engine.kernels.megakernel.kernel import SOURCE, source_folder

from benchmarks.megakernel.model import forward
from tests.emulator.module import (
    CPU,
    SMALL,
    EmulatedFault,
    EmulatedModule,
    Patch,
    emulated,
    sources,
)
from tests.emulator.test_steps import PARTS, plain
from tests.gpu import test_kernels
from tests.gpu.test_kernels import world_of
from tests.megakernel.words import Rows, World

LAUNCHES, EARLY_ENDS = 6, 40
WRONG = "wrong logits"
ANYTHING = ""


@dataclasses.dataclass(frozen=True)
class Planted:
    """Changes of the source, and what tells of them: a fault's text, or `WRONG`."""

    patches: tuple[Patch, ...]
    says: str = WRONG


def _without(file: str, text: str) -> tuple[Patch, ...]:
    return ((file, text, ""),)


_SYNC = "  workers_sync();\n"
FAULTS = {
    "sums read before all warps have stored theirs": Planted(
        (("residual.cuh", "sums, PARTS - 1);\n" + _SYNC, "sums, PARTS - 1);\n"),)
    ),
    "a signal before what it tells of": Planted(
        (
            (
                "loader.cuh",
                "      if (counter == NONE) continue;\n      signalling_sync();\n",
                "      if (counter == NONE) continue;\n",
            ),
            (
                "loader.cuh",
                "      __syncwarp();  // or the other lanes",
                "      signalling_sync();\n      __syncwarp();  // or the other lanes",
            ),
        ),
        "deadlock|wrong logits",
    ),
    "a wait for one more than there are": Planted(
        (("loader.cuh", "it.wait, it.wait_count +", "it.wait, it.wait_count + 1 +"),),
        "deadlock",
    ),
    "a wait for one less than there are": Planted(
        (("loader.cuh", "it.wait, it.wait_count +", "it.wait, it.wait_count - 1 +"),)
    ),
    "a stage released before it is read": Planted(
        (
            (
                "matrix.cuh",
                "      if (active()) next.load(stage);\n    }\n"
                "    if (active()) sums.add(mine, in);\n"
                "    if (more) ring.release(a, next.read());",
                "      ring.release(a, 0);\n      if (active()) next.load(stage);\n    }\n"
                "    if (active()) sums.add(mine, in);",
            ),
        )
    ),
    "attention's stages released before they are read": Planted(
        (
            (
                "attention.cuh",
                "    track.add(q, page, position);\n"
                "    ring.release_for(a, __float_as_uint(track.out[0].x), place",
                "    ring.release_for(a, 0, place",
            ),
            (
                "attention.cuh",
                "WARPS - others);\n",
                "WARPS - others);\n    track.add(q, page, position);\n",
            ),
        )
    ),
    "attention's stages taken without a look at their lap": Planted(
        (("attention.cuh", "ring.get_ahead(a, at)", "ring.get(a, at)"),),
        "more arrivals|deadlock|wrong logits",
    ),
    "attention's stages let go by those alone that have pages": Planted(
        (("attention.cuh", "place ? 1 : WARPS - others", "1"),), "deadlock"
    ),
    "a stage begun before its place is free": Planted(
        (("loader.cuh", "if (is_free && landed) break;", "if (landed) break;"),),
        "deadlock|more arrivals|wrong logits",
    ),
    "a row that does not go on from the pages in common": Planted(
        _without(
            "attention.cuh",
            "    if (!begins && has_pages) track.load(shared, unit.token, mine);\n",
        )
    ),
    "a row that goes on before the pages in common are over": Planted(
        (
            (
                "attention.cuh",
                "  __syncwarp();\n  workers_sync();\n}\n\n// Attend to all pages, in the order",
                "}\n\n// Attend to all pages, in the order",
            ),
        )
    ),
    "the newest position left out of its page": Planted(
        (("attention.cuh", "if (which == written.page &&", "if (which < 0 &&"),)
    ),
    "moments read before all warps have stored theirs": Planted(
        (
            (
                "matrix.cuh",
                "ring, in, it.num_blocks, true);\n" + _SYNC,
                "ring, in, it.num_blocks, true);\n",
            ),
        )
    ),
    "parts of a softmax merged before all are there": Planted(
        (("attention.cuh", _SYNC + "  // A quarter has", "  // A quarter has"),)
    ),
    "a stage read before its copy has landed": Planted(
        (("ring.cuh", "if (!barrier_done(full, parity()) && !at.dead)", "if (false)"),),
        "wrong logits|want",  # a wait that is given up says what it wanted
    ),
    "a stage free when one warp still reads it": Planted(
        (
            (
                "step.cu",
                "barrier_init(shared.empty + i, WARPS)",
                "barrier_init(shared.empty + i, 7)",
            ),
        ),
        "deadlock|more arrivals|wrong logits",
    ),
    "fewer bytes than a copy has": Planted(
        (("loader.cuh", "ring, turn, STAGE_BYTES)", "ring, turn, STAGE_BYTES - 16)"),), "deadlock"
    ),
    "a block that ends before its copies have landed": Planted(
        (("step.cu", "      finish_copies(shared);\n", ""),), "copies are under way"
    ),
    "a barrier for too few warps": Planted(
        (("ring.cuh", "threads_sync<2, SIGNALLING>()", "threads_sync<2, THREADS>()"),), "deadlock"
    ),
    "threads that begin before shared memory is ready": Planted(
        (("step.cu", "  __syncthreads();\n  const int warp", "  const int warp"),),
        ANYTHING,
    ),
    "an index beyond shared memory": Planted(
        (("output.cuh", "shared.best[i][threadIdx.x]", "shared.best[i + 1][threadIdx.x]"),),
        "undefined|outside of its memory",
    ),
}
SOON = ("a signal before what it tells of", "a wait for one more than there are")
"""Not slow."""


def found(
    patches: tuple[Patch, ...], launches: int = LAUNCHES, early_ends: int = EARLY_ENDS
) -> str | None:
    """What tells of them in the first launch that is not as it should be."""
    world = World(SMALL, emulated(None, *patches))
    try:
        for launch in range(launches):
            rows, steps = Rows(world, 3 + launch % 2 * 3, launch), 2
            if launch % 2:
                share_pages(rows)
            cache = rows.cache.clone()
            kernel = world.kernel(rows.count)
            logits = torch.full((steps, 8, SMALL.vocab_size), torch.nan)
            kernel.run(rows.cache, rows.tokens, rows.positions, steps, logits=logits)
            if not kernel.ended("planted"):
                return kernel.fault()
            fed = rows.tokens
            for step in range(steps):
                expected, _ = forward(world.model, cache, fed, rows.positions + step)
                seen = logits[step, : rows.count]
                if not (seen - expected).norm() < 1e-2 * expected.norm():
                    return WRONG
                fed = seen.argmax(-1)
        for _ in range(early_ends):
            end_early(world)
    except EmulatedFault as fault:
        return str(fault)
    return None


def share_pages(rows: Rows) -> None:
    """More pages of each worker's than there are warps, of all rows, and own ones after them."""
    rows.cache.pages[:, :36] = rows.cache.pages[0, :36].clone()
    rows.positions = 36 * 16 + rows.positions % 300


def end_early(world: World) -> None:
    """A launch whose loaders are ahead, in steps that do not follow."""
    rows = Rows(world, 3)
    rows.cache.values.fill_(torch.nan)
    world.kernel(3).run(rows.cache, rows.tokens, rows.positions, 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_planted_where_the_source_has_its_text(name: str) -> None:
    """Once; those that are slow to find are not run each time."""
    sources(SOURCE, source_folder(), FAULTS[name].patches)


@pytest.mark.parametrize(
    ("launches", "early_ends"),
    [(2, 3), pytest.param(LAUNCHES, EARLY_ENDS, marks=pytest.mark.slow)],
)
def test_the_source_as_it_is_passes(launches: int, early_ends: int) -> None:
    """The launches that find planted faults find none without them."""
    assert found((), launches, early_ends) is None


@pytest.mark.parametrize(
    "name",
    [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS],
)
def test_a_planted_fault_is_found(name: str) -> None:
    planted = FAULTS[name]
    told = found(planted.patches)
    assert told is not None
    assert any(part in told for part in planted.says.split("|")), told


def test_a_deadlock_names_the_workers_that_wait() -> None:
    """Each with what it waits for: the polling warp, and the warps behind it."""
    told = found(FAULTS["a wait for one more than there are"].patches)
    assert told is not None
    for worker in range(SMALL.num_workers):
        assert f"block {worker} warps 10 lanes 00000001: the word at argument 1 + " in told
        compute = f"block {worker} warps 0 1 2 3 4 5 6 7 lanes ffffffff: the word at shared memory"
        assert compute in told


BATCH = 13
"""Two tiles, so that finishers let blocks pass; thread blocks of a cluster share the inputs."""
INEXACT = "errs"

_COUNT = "      if (index == 0 && token == 0) barrier_expect("
_EMPTY = "    barriers.wait_empty(block);\n"
_PASS = "      sums.skip(block, barriers);\n"
_STORE = (
    "    if (lane != rank && lane < SHARED) store_peer(moments + token, moment, begun, lane);\n"
)
BLOCK_FAULTS: dict[str, tuple[Patch, str]] = {
    "a finisher that does not let a block pass": (("block_map.cuh", _PASS, ""), "deadlock"),
    "moments that only one thread block has": (("norm_gemm.cuh", _STORE, ""), "deadlock"),
    "results before all moments are there": (
        ("norm_gemm.cuh", "  barrier_wait(begun, 0);\n", ""),
        INEXACT,
    ),
    "sums over those that are not taken yet": (
        ("block_map.cuh", _EMPTY, ""),
        f"{INEXACT}|deadlock",
    ),
    "products before their inputs are there": (
        ("block_map.cuh", "      if (block == 0) inputs.wait(chunk);\n", ""),
        INEXACT,
    ),
    "a chunk that each finisher counts": (
        ("stage_ring.cuh", _COUNT, "      if (token == 0) barrier_expect("),
        "more arrivals",
    ),
}
SOON_OF_BLOCKS = "a finisher that does not let a block pass"
"""Not slow."""


def found_in_blocks(monkeypatch: pytest.MonkeyPatch, *patches: Patch) -> str | None:
    """What tells of them in a step, if anything does."""
    patched = functools.partial(EmulatedModule, patches=patches)
    for module in (decoder, decoder):
        monkeypatch.setattr(module, "Module", patched)
    world = world_of(plain(PARTS), CPU)
    try:
        test_kernels.a_step_is_as_exact_as_torch(world, BATCH)
    except EmulatedFault as fault:
        return str(fault)
    except AssertionError:
        return INEXACT
    return None


@pytest.mark.parametrize(
    "name",
    [
        name if name == SOON_OF_BLOCKS else pytest.param(name, marks=pytest.mark.slow)
        for name in BLOCK_FAULTS
    ],
)
def test_a_planted_fault_of_blocks_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    patch, says = BLOCK_FAULTS[name]
    told = found_in_blocks(monkeypatch, patch)
    assert told is not None
    assert any(part in told for part in says.split("|")), told
