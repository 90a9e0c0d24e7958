"""The program of a step, the ring's protocol, and builds of the kernel's source."""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import random
from typing import Any

import pytest
import torch
from legato_engine.kernels.cuda.module import compile_source
from legato_engine.kernels.megakernel import program as header
from legato_engine.kernels.megakernel.kernel import (
    RING_STAGES,
    SOURCE,
    UNDER_WAY,
    BuildDrafts,
    BuildValues,
    shared_body,
)
from legato_engine.kernels.megakernel.program import (
    FIELDS,
    WORDS,
    Op,
    build_program,
    defines,
    max_instructions,
    qkv_rows,
    worker_stages,
)
from legato_engine.kernels.megakernel.sizes import (
    LEGATO_TINY,
    MOONDREAM2,
    ModelSizes,
    ValueDims,
    ring_problem,
)
from legato_engine.speculation import (
    NO_COSTS,
    AdaptiveBlockPolicy,
    BlockPolicy,
    FixedBlockPolicy,
    TokenBudgetPolicy,
)

from tests.engine.kernels.assembly import instructions as machine_code
from tests.engine.kernels.assembly import under_way as reads_under_way
from tests.engine.kernels.test_compiler import has_nvrtc
from tests.engine.kernels.test_decode_source import usages
from tests.megakernel_model.order import WEIGHTS, RingFault, RingModel, Takers

_VALUES = ValueDims(inner_dim=8192, scalar_bins=1024, pair_bins=2048)


def test_the_header_on_disk_is_the_one_that_is_generated() -> None:
    """The device's constants and its instruction have not drifted from the program's."""
    file = importlib.resources.files("legato_engine.kernels.megakernel") / "sources" / header.FILE
    assert file.read_text() == header.header()


@pytest.mark.parametrize("sizes", [MOONDREAM2, LEGATO_TINY], ids=["moondream2", "tiny"])
def test_every_weight_is_streamed_once(sizes: ModelSizes) -> None:
    """The workers' streams hold every block and chunk of every matrix once."""
    program = build_program(sizes, 12)
    stages = [
        stage for worker in range(sizes.num_workers) for stage in worker_stages(program, worker)
    ]
    assert len(set(stages)) == len(stages)
    blocks = {
        Op.FC1: (sizes.num_layers * sizes.ff_dim, sizes.chunks),
        Op.QKV: (sizes.num_layers * 3 * sizes.dim, sizes.chunks),
        Op.FC2: (sizes.num_layers * sizes.dim, sizes.chunks * sizes.ff_ratio),
        Op.OUT: (sizes.num_layers * sizes.dim, sizes.chunks),
        Op.HEAD: (sizes.vocab_size, sizes.chunks),
    }
    for matrix, (rows, chunks) in blocks.items():
        count = sum(stage.op is matrix for stage in stages)
        assert count == rows // 16 * chunks, matrix


@pytest.mark.parametrize("layers", [1, 3, 24])
def test_no_worker_has_more_instructions_than_its_layers_allow(layers: int) -> None:
    """Those of a program with values and drafts are the most."""
    sizes = dataclasses.replace(MOONDREAM2, num_layers=layers)
    kinds = (
        sizes,
        dataclasses.replace(sizes, drafts=True),
        dataclasses.replace(sizes, values=_VALUES),
        dataclasses.replace(sizes, values=_VALUES, drafts=True),
    )
    counts = [max(map(len, build_program(each, 12).workers)) for each in kinds]
    assert max(counts) == max_instructions(layers)


def test_moondream_workers_have_the_same_work() -> None:
    """Every worker of Moondream 2 streams the same number of stages."""
    program = build_program(MOONDREAM2, 12)
    counts = {program.stream_stages(worker) for worker in range(MOONDREAM2.num_workers)}
    assert counts == {24 * (16 + 12 + 16 + 4) + 100}


def test_rows_of_a_head_are_in_one_of_its_blocks_each() -> None:
    """The blocks of the query, key and value map hold every row once, rotated pairs together."""
    rows = [row for block in range(3 * LEGATO_TINY.num_workers) for row in qkv_rows(block)]
    assert sorted(rows) == list(range(3 * LEGATO_TINY.dim))
    for block in range(3 * LEGATO_TINY.num_workers):
        if block % 4 < 2:
            low, high = qkv_rows(block)[:8], qkv_rows(block)[8:]
            assert [row + 16 for row in low] == high


def test_a_table_has_every_field_of_every_instruction() -> None:
    """The device's words are the program's fields."""
    sizes = ModelSizes(64, 2, 1, 128)
    program = build_program(sizes, 4)
    table = program.table()
    length = len(program.workers[0])
    assert len(table) == sizes.num_workers * length * WORDS
    for worker, instructions in enumerate(program.workers):
        for index, it in enumerate(instructions):
            first = (worker * length + index) * WORDS
            words = table[first : first + WORDS]
            assert words == [*dataclasses.astuple(it), *[0] * (WORDS - len(FIELDS))]


def test_a_shorter_list_ends_in_words_that_are_no_instruction() -> None:
    """Lists that are not as long as the longest are filled with an op that there is not."""
    program = build_program(ModelSizes(64, 2, 1, 128), 4)
    shorter = program.workers[0][:-1]
    uneven = dataclasses.replace(program, workers=(shorter, *program.workers[1:]))
    length = len(program.workers[1])
    filled = uneven.table()[(length - 1) * WORDS : length * WORDS]
    assert set(filled) == {-1}
    assert -1 not in list(Op)


@pytest.mark.parametrize(
    "sizes",
    [
        (100, 4, 1, 512),
        (128, 1, 1, 512),
        (128, 2, 0, 512),
        (128, 2, 1, 120),
        (128, 2, 1, 512, ValueDims(48, 512, 512)),
        (128, 2, 1, 512, ValueDims(64, 32, 64)),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_are_refused(sizes: tuple[Any, ...]) -> None:
    """A model that the workers cannot share evenly is an error."""
    with pytest.raises(ValueError, match=r"is not a multiple|too small|too few"):
        ModelSizes(*sizes)


# ---------------------------------------------------------------- ring
# The ring's protocol in random orders, and faults that it would not survive.

STAGES, WARPS = 60, 4


def plan_of(chance: random.Random) -> list[Takers]:
    """Plan weights and rows of attention in turns.

    A row's pages are each warp's in turns, from any one on; a short row leaves most warps without
    any.
    """
    plan: list[Takers] = []
    while len(plan) < STAGES:
        plan += [WEIGHTS] * chance.randrange(4)
        for _ in range(chance.randrange(1, 12)):
            first, pages = chance.randrange(WARPS), chance.choice((1, 1, 2, 3, 7))
            warps = [(first + page) % WARPS for page in range(pages)]
            plan += [tuple(warps[i : i + 2]) for i in range(0, pages, 2)]
    return [*plan, WEIGHTS]


def fault_of(
    plan: list[Takers], ring_stages: int, under_way: int, chance: random.Random, **planted: bool
) -> list[str]:
    try:
        RingModel(ring_stages, under_way, warps=WARPS, **planted).run(plan, chance)
    except RingFault as fault:
        return [str(fault)]
    return []


def faults(ring_stages: int, under_way: int, orders: int, **planted: bool) -> list[str]:
    """Return the faults of random plans and orders."""
    found = []
    for seed in range(orders):
        chance = random.Random(seed)
        found += fault_of(plan_of(chance), ring_stages, under_way, chance, **planted)
    return found


def test_accepted_rings_hand_every_stage_over_in_every_order() -> None:
    """Every ring of up to 12 stages, and those of the engine's builds among them."""
    accepted = [
        (ring, under_way)
        for ring, under_way in itertools.product(range(2, 13), range(1, 7))
        if ring_problem(ring, under_way) is None
    ]
    assert {(ring, UNDER_WAY) for ring in RING_STAGES.values()} <= set(accepted)
    for ring, under_way in accepted:
        assert not faults(ring, under_way, orders=6), (ring, under_way)


@pytest.mark.parametrize(("ring", "under_way"), [(11, 2), (11, 4), (9, 2)])
def test_a_refused_ring_stops(ring: int, under_way: int) -> None:
    """A loader takes a stage that the other one has filled again for one that never lands."""
    assert ring_problem(ring, under_way) is not None
    assert any("wait for ever" in fault for fault in faults(ring, under_way, orders=60))


@pytest.mark.parametrize("ring", [4, 8, 12])
def test_a_stage_let_go_before_its_reads_are_over_is_overwritten(ring: int) -> None:
    """Some order reads another stage's weights."""
    assert any(
        "in place of" in fault for fault in faults(ring, 3 if ring > 4 else 2, 60, early=True)
    )


@pytest.mark.parametrize("ring", [8, 10, 12])
@pytest.mark.parametrize(("fault", "after"), [("looks_at_lap", (1, 0)), ("meets", WEIGHTS)])
def test_a_warp_that_is_a_lap_ahead_takes_what_is_not_there(
    ring: int, fault: str, after: Takers
) -> None:
    """A warp goes past as many stages of others as the ring has, to one that looks full."""
    plan = [WEIGHTS, *[(0,)] * ring, after, WEIGHTS]

    def found(**planted: bool) -> list[str]:
        orders = map(random.Random, range(60))
        return [each for order in orders for each in fault_of(plan, ring, 3, order, **planted)]

    assert any("in place of" in each for each in found(**{fault: False}))
    assert not found()


# ---------------------------------------------------------------- builds

_CPU = torch.device("cpu")
_VALUE_MACROS = {
    "VALUES": 1,
    "INNER": 1280,
    "INNER_CHUNK": 320,
    "VALUE_PARTS": 1,
    "SCALAR": 5,
    "PAIR": 6,
    "END": 0,
    "SCALAR_BINS": 1024,
    "SCALAR_DIVISOR": 1024,
    "SCALAR_REACH": 2,
    "SCALAR_FEATURES": 256,
    "PAIR_BINS": 2048,
    "PAIR_REACH": 2,
    "PAIR_FEATURES": 256,
}
_IN_PARTS = {"INNER": 8192, "INNER_CHUNK": 512, "VALUE_PARTS": 4}
_WORDS = BuildValues(None, 8, _CPU).defines
_NO_DRAFTS = BuildDrafts(None, _CPU).defines
_POLICIES: tuple[BlockPolicy, ...] = (
    FixedBlockPolicy(7),
    AdaptiveBlockPolicy(),
    TokenBudgetPolicy(NO_COSTS),
)
BUILDS = [
    (1, _WORDS | _NO_DRAFTS),
    (1, _VALUE_MACROS | _NO_DRAFTS),
    (2, _VALUE_MACROS | _IN_PARTS | _NO_DRAFTS),
    *(
        (tiles, _WORDS | BuildDrafts(policy, _CPU).defines)
        for tiles, policy in zip((1, 2, 2), _POLICIES, strict=True)
    ),
    (2, _VALUE_MACROS | _IN_PARTS | BuildDrafts(_POLICIES[-1], _CPU).defines),
]


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "kind"), BUILDS, ids=("words", "values", "parts", "fixed", "seed", "budget", "both")
)
def test_every_kind_of_build_compiles(tiles: int, kind: dict[str, int]) -> None:
    """With room for what a thread block shares; no stage is let go before it is read."""
    ring = RING_STAGES[tiles]
    constants = defines(LEGATO_TINY, ring, UNDER_WAY, tiles)
    constants |= kind | {"SHARED": shared_body(LEGATO_TINY, ring, 8 * tiles)}
    folder = importlib.resources.files("legato_engine.kernels.megakernel") / "sources"
    code = compile_source(SOURCE, constants, "sm_90a", folder=folder)
    assert set(usages(code)) == {"steps"}
    stages, early = reads_under_way(machine_code(code, "steps"))
    assert stages > 0
    assert not early
