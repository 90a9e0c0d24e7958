"""On a GPU: launches that are no decodes of Moondream 2 neither synchronise nor allocate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from legato_engine.bench.workload import fixed_length
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.models.moondream.refiner import Crop
from legato_engine.scheduler.batch import LaunchKind, Refinement
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import Sequence
from legato_engine.types import QuerySpec, Request, RequestKey, SamplingParams

from benchmarks.decode.loops import NUM_SKILLS, picture, recorded, skilled, values_of
from benchmarks.decode.parts import prompts
from benchmarks.speculation.run import with_settings
from tests.engine.models.moondream.refiner import scripted
from tests.gpu.guard import GRAPHS, KERNELS, ROWS, Decodes, close, decoding, guarded

LONG = "Tell me, in as many words as you like, what stands beside the red cup. "

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def large() -> Iterator[Assembly]:
    """Moondream 2's shape with random weights, whose tokenizer has a token for each byte."""
    config = EngineConfig(
        model="moondream2",
        random_weights=True,
        device="cuda",
        max_running=ROWS,
        kv_memory_fraction=0.2,
        decode_path="graph",
    )
    assembly = assemble(config)
    yield assembly
    close(assembly)


def asking(assembly: Assembly, name: str, text: str) -> Sequence:
    """A question, its answer with log-probabilities."""
    request = Request(
        request_id=RequestKey(name),
        task=QuerySpec(question=text),
        sampling=SamplingParams(temperature=0.8, seed=1, max_tokens=24),
        logprobs=True,
        return_tokens=True,
    )
    return make_sequence(assembly.frontend, request, None)


def answered(scheduler: Scheduler, sequence: Sequence) -> list[tuple[object, ...]]:
    (task,) = recorded([sequence])
    scheduler.submit(sequence)
    scheduler.drain()
    return values_of(sequence, task)


@pytest.mark.parametrize("repeats", [5, 6, 8, 18])
def test_a_long_prompt_is_quiet(large: Assembly, repeats: int) -> None:
    """Questions of 350 to 1,260 tokens are quiet from their prefill to their last token.

    In steps, or in one pass of fixed shape or several.
    """
    seen = Decodes()
    scheduler = large.scheduler(seen, pipeline_depth=2, observer=seen.committed)
    sequence = asking(large, "long", LONG * repeats)
    assert len(sequence.prompt) > 60 * repeats
    scheduler.submit(sequence)
    with guarded():
        scheduler.drain()
    assert seen.kinds[0] is LaunchKind.PREFILL
    assert sequence.num_committed > 0


def begun(assembly: Assembly, scheduler: Scheduler, path: str, length: int) -> None:
    """Submit an answer of so many tokens, which has 20 of them then."""
    constraints = range(len(assembly.frontend.constraints))
    first = fixed_length(asking(assembly, "first", "What?"), length, 0, constraints)
    if path == "resident":  # which leaves rows with log-probabilities to loops
        first.request = msgspec.structs.replace(first.request, logprobs=False)
    scheduler.submit(first)
    while first.num_committed < 20:
        scheduler.step()


@pytest.mark.parametrize("path", ["loop", "resident"])
@pytest.mark.parametrize("repeats", [1, 8])
def test_a_prompt_that_joins_a_loop_is_quiet(large: Assembly, repeats: int, path: str) -> None:
    """Short ones share the launch behind it with its row; a long one has it alone."""
    seen = Decodes()
    scheduler = with_settings(large, decode_path=path).scheduler(
        seen, pipeline_depth=2, observer=seen.committed
    )
    begun(large, scheduler, path, 120)
    late = asking(large, "late", LONG * repeats)
    scheduler.submit(late)
    with guarded():
        while not late.num_committed:
            scheduler.step()
    assert seen.behind == (repeats == 1)
    scheduler.drain()


@pytest.mark.parametrize("path", ["loop", "resident"])
def test_the_loop_of_a_list_begins_quietly(large: Assembly, path: str) -> None:
    """Its first constraints follow the token of its prompt. The image is cached by then."""
    seen = Decodes()
    scheduler = with_settings(large, decode_path=path).scheduler(
        seen, pipeline_depth=2, observer=seen.committed
    )
    image = picture(large)
    answered(scheduler, skilled(large, image, 0, 24))
    assert seen.following == 1
    scheduler.submit(skilled(large, image, NUM_SKILLS, 24))
    with guarded(GRAPHS, KERNELS):
        scheduler.drain()
    assert seen.following == 2


@pytest.mark.parametrize("path", ["graph", "resident"])
@pytest.mark.parametrize(("repeats", "parts"), [(1, 2), (2, 4), (5, 11), (8, 1), (18, 2)])
def test_a_prompt_in_parts_is_quiet_and_has_its_bits(
    large: Assembly, repeats: int, parts: int, path: str
) -> None:
    """Beside a running decode, a prompt in parts is quiet and has the bits of the whole.

    In steps of 32 tokens or in passes of 512. The whole is asked beside the same decode, too: what
    both have in common is cached, and has the bits of steps.
    """
    assembly, given = with_settings(large, decode_path=path), []
    for kind in ("whole", "parts"):
        seen = Decodes()
        with prompts(assembly, kind):
            scheduler = assembly.scheduler(seen, pipeline_depth=2, observer=seen.committed)
        begun(large, scheduler, path, 400)  # longer than a loop, which ends before the guard begins
        late = asking(large, "late", LONG * repeats)
        (task,) = recorded([late])
        late.seq_id = 1
        scheduler.submit(late)
        with guarded():
            while not late.num_committed:
                scheduler.step()
        scheduler.drain()
        given.append(values_of(late, task))
        assert abs(seen.parts - parts * (kind == "parts")) <= 1
    assert given[0] == given[1]


def test_a_long_prompt_has_its_bits_however_much_is_cached(large: Assembly) -> None:
    """A conversation that continues another has the tokens that it has alone.

    So has the same prompt after others that share a part of it; log-probabilities are equal, too.
    """
    text = LONG * 6
    alone = answered(large.scheduler(Decodes(), pipeline_depth=2), asking(large, "alone", text))
    assert len(alone) > 1
    scheduler = large.scheduler(Decodes(), pipeline_depth=2)
    for index, part in enumerate((0.2, 0.35, 0.5, 0.83, 1.0)):
        other = text[: int(part * len(text))] + "And then?"
        answered(scheduler, asking(large, f"other {index}", other))
        again = asking(large, f"again {index}", text)
        assert answered(scheduler, again) == alone
        assert again.pages.cached_tokens > 16


def test_moondream3_is_quiet() -> None:
    """With experts and gains, in single steps, in loops and in a long prompt."""
    config = EngineConfig(
        model="moondream3",
        random_weights=True,
        device="cuda",
        max_running=ROWS,
        max_context=4096,
        kv_memory_fraction=0.1,
        crops_per_launch=0,
    )
    assembly = assemble(config)
    for path in ("graph", "loop"):
        looping = with_settings(assembly, decode_path=path)
        num_steps, num_launches = (120, 1) if path == "loop" else (30, 30)
        seen = Decodes()
        scheduler = decoding(looping, seen, length=200)
        before = len(seen.kinds)
        with guarded():
            for _ in range(num_steps):
                scheduler.step()
        counted = len(seen.kinds) - before
        assert counted <= num_launches
        assert set(seen.kinds[before:]) <= {LaunchKind.DECODE}
        for index in range(ROWS):
            scheduler.abort(RequestKey(str(index)))
        scheduler.drain()
    sequence = asking(assembly, "long", LONG * 18)
    scheduler = assembly.scheduler(Decodes(), pipeline_depth=2)
    scheduler.submit(sequence)
    with guarded():
        scheduler.drain()
    assert sequence.num_committed > 0
    close(assembly)


def test_a_refinement_is_quiet(tmp_path: Path) -> None:
    """From its staging to its answer, between decodes."""
    scripted.write_model(tmp_path)
    scripted.write_head(tmp_path / "head.pt")
    config = EngineConfig(
        model="legato-tiny",
        weights=str(tmp_path),
        refiner=str(tmp_path / "head.pt"),
        device="cuda",
        max_running=ROWS,
    )
    assembly = assemble(config)
    assert assembly.refiner is not None
    side = assembly.refiner.answer.shape[0]
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (side, side, 3), np.uint8)
    mask = random.integers(0, 2, (side, side), np.uint8)
    given = Crop((side, side), 0, 0, (side, side), pixels, mask)
    seen, answers = Decodes(), list[object]()
    scheduler = decoding(assembly, seen, length=100)
    scheduler.refine(Refinement(given, lambda done: answers.append(done.result)))
    with guarded():
        while not answers:
            scheduler.step()
    assert LaunchKind.REFINE in seen.kinds
    close(assembly)
