"""Loops of decode steps on a GPU: one launch with the bits of single steps, and quiet when warm.

Both in captured loops and in the megakernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from cuda.bindings import driver, runtime
from legato_engine.config import LOOP_PATHS, RESIDENT_PATH, EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.kernels.accelerated import WhileLoop
from legato_engine.kernels.decode_loop import (
    DONE,
    STOP,
    AnyLoop,
    DraftLoopTensors,
)
from legato_engine.models.moondream.presets import moondream2_config
from legato_engine.runtime.sampler import successor_table
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.sequence import Constraint
from legato_engine.speculation import CostTable, TokenBudgetPolicy
from legato_engine.types import RequestKey

from benchmarks.decode.loops import Decodes, question, randomly, recorded
from benchmarks.speculation.drafting_paths import answer, both_paths, oracle, teach
from benchmarks.speculation.run import with_settings
from tests.adapters import random_adapter, safetensors_file
from tests.engine.models import hub_folder
from tests.gpu.guard import (
    GRAPHS,
    KERNELS,
    RANKS,
    ROWS,
    GuardViolation,
    close,
    decoding,
    guarded,
)
from tests.gpu.guard import Decodes as LaunchCounts
from tests.loop_answers import Ask, results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def graph() -> Iterator[Assembly]:
    made = assemble(
        EngineConfig(device="cuda", decode_path="graph", max_running=9, crops_per_launch=0)
    )
    yield made
    made.device.close()


@pytest.fixture(scope="module", params=["loop", "resident"])
def looping(graph: Assembly, request: pytest.FixtureRequest) -> Assembly:
    made = with_settings(graph, decode_path=request.param)
    assert made.runner.decodes_by_loops
    if request.param == "resident" and not made.runner.megakernel_rows:
        pytest.skip("needs a GPU of compute capability 9.0")
    return made


def test_loops_are_the_default_with_kernels(graph: Assembly) -> None:
    """Without kernels a step's bits depend on its number of rows."""
    auto = with_settings(graph, decode_path="auto")
    assert auto.runner.decodes_by_loops
    assert with_settings(auto, speculation="fixed:2").runner.decodes_by_loops
    by_torch = assemble(EngineConfig(device="cuda", dtype="f32", max_running=2, num_pages=200))
    assert not by_torch.runner.decodes_by_loops
    by_torch.device.close()


def answers(assembly: Assembly, lengths: list[int]) -> tuple[list[list[int]], int]:
    sequences = [question(assembly, index, length) for index, length in enumerate(lengths)]
    tasks = recorded(sequences)
    run = Decodes(assembly, at_once=len(lengths))
    for sequence in sequences:
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    return [task.tokens for task in tasks], run.launches


@pytest.mark.parametrize("lengths", [[256], [256] * 8, [90, 7, 40, 23, 256]])
def test_answers_have_the_bits_of_single_steps(
    graph: Assembly, looping: Assembly, lengths: list[int]
) -> None:
    """Greedy and sampled; a lone answer of 256 tokens is one launch, whose end is one wait."""
    plain, _ = answers(graph, lengths)
    looped, num_loops = answers(looping, lengths)
    assert looped == plain
    assert num_loops <= 1 + 3 * (len(set(lengths)) - 1)


SKILLS = [Ask(kind, 40, logprobs=kind % 2 == 0, after=kind) for kind in range(5)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("asked", [*([ask] for ask in SKILLS), SKILLS + SKILLS[::-1]])
def test_every_skill_has_the_bits_of_single_steps(
    graph: Assembly, looping: Assembly, asked: list[Ask], depth: int
) -> None:
    """Tokens, values, log-probabilities, events, ends and results; a lone answer is one launch."""
    plain, _ = results(graph, asked, depth)
    looped, run = results(looping, asked, depth)
    assert looped == plain
    assert len(asked) > 1 or run.launches <= 1


def test_ten_thousand_short_steps_with_arrivals_and_aborts(looping: Assembly) -> None:
    totals = randomly(looping, num_steps=10_000, seed=11)
    assert totals["different"] == 0
    assert totals["aborted"] > 100


@pytest.mark.parametrize("late", range(7))
def test_a_prompt_joins_the_rows_of_the_loop_that_it_ends(
    graph: Assembly, looping: Assembly, late: int
) -> None:
    """One launch has both, and all answers have the bits of single steps.

    That holds whatever row it finds: the last comes when the answer of the first is about to end.
    """
    asked = [
        Ask(6, 200, logprobs=True, after=0),
        Ask(0, 60, logprobs=True, after=3),
        Ask(5, 30, logprobs=False, after=20 + late),
        Ask(1, 20, logprobs=False, after=170),
    ]
    plain, _ = results(graph, asked, 2)
    looped, run = results(looping, asked, 2)
    assert looped == plain
    assert any(plan.behind and plan.prefills for plan in run.plans)


def test_a_request_joins(looping: Assembly) -> None:
    """The loop that would have the first answer to its end ends for it."""
    length = 250
    first, late = sequences = [question(looping, 0, length), question(looping, 1, 5)]
    task, late_task = recorded(sequences)
    run = Decodes(looping, at_once=1)
    run.scheduler.submit(first)
    while len(task.tokens) < 30:
        run.scheduler.step()
    run.scheduler.submit(late)
    while not late_task.tokens:
        run.scheduler.step()
    assert len(task.tokens) < length
    run.scheduler.drain()
    assert len(task.tokens) == length


def test_the_guard_notices() -> None:
    """Synchronisation, allocation and launches by torch, driver and runtime are noticed.

    So is a copy that waits because its memory is pageable; a copy to page-locked memory passes.
    """
    on_device, stream = torch.ones(4, device="cuda"), torch.cuda.current_stream().cuda_stream
    pageable, pinned = torch.ones(4), torch.ones(4, pin_memory=True)
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault

    def copied_to(host: torch.Tensor) -> None:
        runtime.cudaMemcpyAsync(host.data_ptr(), on_device.data_ptr(), 16, kind, stream)

    def synchronised() -> None:
        runtime.cudaDeviceSynchronize()

    def mapped() -> None:
        kept.append(driver.cuMemAlloc(1 << 24)[1])

    kept: list[object] = []
    for offence in (
        lambda: on_device.sum().item(),
        lambda: torch.ones(4, device="cuda"),
        lambda: driver.cuStreamSynchronize(stream),
        synchronised,
        mapped,
        lambda: copied_to(pageable),
        lambda: on_device.mul_(1.0),
    ):
        with pytest.raises((RuntimeError, GuardViolation)), guarded():
            offence()
    allocate = driver.cuMemAlloc
    with pytest.raises(GuardViolation, match="bytes of device memory"), guarded():
        kept.append(allocate(1 << 26)[1])  # as a library would, behind the bindings
    with guarded():
        copied_to(pinned)
    torch.cuda.synchronize()
    assert pinned.tolist() == [1.0] * 4
    for address in kept:
        driver.cuMemFree(address)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assembly]:
    """Moondream 2's shape with random weights and two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate(RANKS.items()):
        data = safetensors_file(random_adapter(moondream2_config().text, rank, seed))
        (folder / f"{name}.safetensors").write_bytes(data)
    config = EngineConfig(
        model="moondream2",
        random_weights=True,
        device="cuda",
        max_running=ROWS,
        adapters=str(folder),
        kv_memory_fraction=0.2,
        decode_path="graph",
    )
    assembly = assemble(config)
    yield assembly
    close(assembly)


@pytest.mark.parametrize("adapters", [(), ("x", "y")])
@pytest.mark.parametrize(
    "setting",
    [
        *("graph", "loop", "resident", "fixed:3", "seed", "budget"),
        *("loop fixed:3", "loop budget", "resident fixed:3"),
    ],
)
def test_a_warm_decode_loop_is_quiet(
    large: Assembly, setting: str, adapters: tuple[str, ...]
) -> None:
    """Plain, looping, megakernel and drafting decodes neither allocate nor synchronise.

    With rows of adapters, which the kernel leaves to loops, and without.
    """
    assembly, num_steps, num_launches = large, 40, 40
    path, _, drafts = setting.partition(" ")
    if path in LOOP_PATHS:  # of up to 256 steps; behind it is a single one
        assembly = with_settings(large, speculation=drafts) if drafts else large
        assembly = with_settings(assembly, decode_path=path)
        num_steps, num_launches = (60, 0) if drafts else (300, 2)
    elif setting != "graph":
        assembly = with_settings(large, speculation=setting)
    seen = LaunchCounts()
    scheduler = decoding(assembly, seen, length=600, adapters=adapters)
    before = len(seen.kinds)
    with guarded(GRAPHS, KERNELS) if path == RESIDENT_PATH else guarded():
        for _ in range(num_steps):
            scheduler.step()
    launches = seen.kinds[before:]
    assert launches == [LaunchKind.DECODE] * max(num_launches, len(launches))
    assert len(launches) < num_steps or path not in LOOP_PATHS
    assert scheduler.load().running == ROWS
    for index in range(ROWS):
        scheduler.abort(RequestKey(str(index)))
    scheduler.drain()


@pytest.mark.parametrize("setting", ["graph", "loop", "seed", "loop seed"])
def test_the_draft_layer_and_text_models_are_quiet(setting: str, tmp_path: Path) -> None:
    """Legato-tiny with its own draft, whose proposals depend on the block, and a Phi by torch."""
    hub_folder.write(tmp_path, hub_folder.phi())
    for model, weights in (("legato-tiny", ""), ("phi", str(tmp_path))):
        config = EngineConfig(
            model=model, weights=weights, device="cuda", max_running=ROWS, num_pages=1024
        )
        path = "loop" if setting.startswith("loop") else "graph"
        drafts = "seed" if setting.endswith("seed") else "off"
        changed = msgspec.structs.replace(config, decode_path=path, speculation=drafts)
        assembly = assemble(changed)
        num_steps, num_launches = (210, 1) if setting == "loop" else (8, 8)
        if setting == "loop seed":  # in the midst of a loop
            num_launches = 0
        seen = LaunchCounts()
        scheduler = decoding(assembly, seen, length=200)
        with guarded():
            for _ in range(num_steps):
                scheduler.step()
        if num_launches:
            assert seen.kinds[-num_launches:] == [LaunchKind.DECODE] * num_launches
        close(assembly)


MOST = 8
COSTS = TokenBudgetPolicy(CostTable(((1, 1.0), (9, 1.2), (36, 1.9)), 0.1, 0.02))
TABLE = (Constraint(), Constraint(then=2), Constraint(then=1, on=8), Constraint(then=0, on=3))


@pytest.fixture(scope="module")
def plain() -> Iterator[Assembly]:
    made = assemble(
        EngineConfig(device="cuda", decode_path="graph", max_running=MOST, crops_per_launch=0)
    )
    yield made
    close(made)


@pytest.mark.parametrize("setting", ["fixed:4", "seed", "budget"])
def test_answers_and_blocks_are_those_of_single_steps(plain: Assembly, setting: str) -> None:
    """At any acceptance; a lone answer of 256 tokens is one launch."""
    known_by, proposer = oracle(plain, MOST)
    paths = both_paths(plain, setting, proposer, COSTS)
    for lengths in ([256], [256] * MOST, [90, 7, 40, 23, 256]):
        for rate in (0.0, 0.7, 0.95):
            asked = [question(plain, index, length) for index, length in enumerate(lengths)]
            wanted = answer(plain, asked, lengths)
            teach(known_by, asked, wanted, rate)
            single, looped = (
                answer(path, [question(path, i, n) for i, n in enumerate(lengths)], lengths)
                for path in paths
            )
            assert single.tokens == looped.tokens == wanted.tokens
            assert single.blocks == looped.blocks
            if lengths == [256]:
                assert looped.run.launches == 1
                assert looped.run.waits == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("setting", ["seed", "budget"])
def test_every_skill_comes_to_the_same_bits(plain: Assembly, setting: str, depth: int) -> None:
    """By the model's own draft: tokens, values, log-probabilities, events, ends and results."""
    paths = both_paths(plain, setting, costs=COSTS)
    kinds = [Ask(kind % 7, 40 + kind, logprobs=kind % 2 > 0, after=kind) for kind in range(10)]
    single, _ = results(paths.graph, kinds, depth)
    looped, run = results(paths.loop, kinds, depth)
    assert looped == single
    assert run.launches < run.steps


def test_requests_come_and_go(plain: Assembly) -> None:
    """Arrivals and aborts at any step change no answer."""
    totals = randomly(both_paths(plain, "seed").loop, num_steps=4000, seed=5)
    assert totals["different"] == 0
    assert totals["launches"] < 0.95 * totals["steps"]


def test_a_model_by_torch_loops_with_another_as_its_draft(tmp_path: Path) -> None:
    """Its captured steps allocate memory, and the draft has a proposal for each block."""
    hub_folder.write(tmp_path, hub_folder.phi())
    for draft in ("lookup", f"phi:{tmp_path}"):
        config = EngineConfig(
            model="phi",
            weights=str(tmp_path),
            device="cuda",
            dtype="f32",
            decode_path="graph",
            draft=draft,
            max_running=1,
            num_pages=400,
        )
        made = assemble(config)
        single, looped = (
            answer(path, [question(path, 0, 60)], [60]) for path in both_paths(made, "fixed:4")
        )
        assert looped.tokens == single.tokens
        assert looped.blocks == single.blocks
        assert looped.run.launches == 1
        close(made)


def loop_of(draw: torch.Generator, device: str) -> DraftLoopTensors:
    """Rows at random positions, some of padding or without tokens."""
    rows, states, tokens = 40, 60, 160

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw)

    row_B = torch.randperm(states, generator=draw)[:rows]
    row_B[numbers(0, rows, 6)] = states
    count_B = numbers(0, 4, rows)
    count_B[row_B == states] = 0
    token_B = numbers(0, 12, tokens)
    if int(numbers(0, 4, 1)) == 0:
        token_B[numbers(0, tokens, 1)] = -1
    slack = int(numbers(0, 40, 1))
    fields = {
        "row_B": row_B,
        "room_B": numbers(-1, 9, rows),
        "reach_B": numbers(100 + slack, 140 + slack, rows),
        "start_B": count_B.cumsum(0) - count_B,
        "count_B": count_B,
        "position_R": numbers(60, 100, states),
        "limit_R": numbers(98 + slack // 2, 200, states),
        "token_B": token_B,
        "constraint_B": numbers(0, len(TABLE), rows),
        "successor_C2": successor_table(TABLE),
        "outputs_N": numbers(0, 256, 4096).to(torch.uint8),
        "limit": numbers(1, 6, 1),
        "step": torch.zeros(1, dtype=torch.int64),
    }
    on_device = {name: field.to(device) for name, field in fields.items()}
    pin = device != "cpu"
    return DraftLoopTensors(
        **on_device,
        ring_SN=torch.zeros(8, 4096, dtype=torch.uint8, pin_memory=pin),
        words=torch.zeros(2, dtype=torch.int64, pin_memory=pin),
        scratch_row=states,
    )


def test_the_control_kernel_is_as_specified(plain: Assembly) -> None:
    """Steps, ring and constraints of loops over nothing, until they end."""
    del plain  # its device has made a stream the current one
    steps = set()
    for seed in range(300):
        told, by_kernel = (
            loop_of(torch.Generator().manual_seed(seed), device) for device in ("cpu", "cuda")
        )
        for each in (told, by_kernel):
            each.words[STOP] = seed % 7 == 0
        while told.control_step():
            pass
        loop = WhileLoop((), by_kernel)
        loop()
        torch.cuda.synchronize()
        assert same(told, by_kernel)
        steps.add(int(told.words[DONE]))
    assert steps == {1, 2, 3, 4, 5}


def same(one: AnyLoop, other: AnyLoop) -> bool:
    return all(
        getattr(one, name).tolist() == getattr(other, name).tolist()
        for name in ("constraint_B", "step", "ring_SN", "words")
    )
