"""On a GPU: prompts in captured passes have the bits of eager passes, and are quiet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.models.base import Adapter
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.presets import moondream2_config
from legato_engine.runtime.graphs import GraphRunner
from legato_engine.runtime.prompts import CapturedPrompts
from legato_engine.runtime.torch_backend import CHUNK, TorchBackend
from legato_engine.scheduler.scheduler import Scheduler
from legato_engine.sequence import Sequence
from legato_engine.types import CachedImageRef, QuerySpec, Request, RequestKey, SamplingParams

from benchmarks.decode.loops import picture, recorded, values_of
from tests.adapters import random_adapter, safetensors_file
from tests.gpu.guard import RANKS, ROWS, Decodes, close, guarded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TEXT = "Tell_me,_in_as_many_words_as_you_like,_what_stands_beside_the_red_cup._" * 30


def asking(
    assembly: Assembly,
    name: str,
    num_tokens: int,
    image: PreparedImage | None = None,
    adapter: Adapter | None = None,
) -> Sequence:
    """Return a question of so many tokens, one a byte, or of fewest if that is 0."""

    def sequence(text: str) -> Sequence:
        request = Request(
            request_id=RequestKey(name),
            task=QuerySpec(question=text),
            image=None if image is None else CachedImageRef(image_id="picture"),
            sampling=SamplingParams(temperature=0.0, max_tokens=6),
            logprobs=True,
            return_tokens=True,
        )
        return make_sequence(assembly.frontend, request, image, adapter)

    fewest = len(sequence("?").prompt)
    made = sequence(TEXT[: max(1, 1 + num_tokens - fewest)])
    assert len(made.prompt) == max(num_tokens, fewest)
    return made


def answered(scheduler: Scheduler, sequence: Sequence) -> list[tuple[object, ...]]:
    (task,) = recorded([sequence])
    scheduler.submit(sequence)
    scheduler.drain()
    return values_of(sequence, task)


# ---------------------------------------------------------------- text models

TEXT_LENGTHS = (0, 30, 500, 1300)


@pytest.fixture(scope="module")
def text() -> Iterator[Assembly]:
    """Qwen3-VL 2B with random weights, asked without images."""
    config = EngineConfig(
        model="qwen3-vl",
        random_weights=True,
        device="cuda",
        max_running=ROWS,
        max_context=4096,
        kv_memory_fraction=0.2,
    )
    assembly = assemble(config)
    yield assembly
    close(assembly)


def test_a_text_models_prompt_is_quiet(text: Assembly) -> None:
    """Of any length, and the rest of one whose beginning is cached."""
    scheduler = text.scheduler(Decodes(), pipeline_depth=2)
    for length in TEXT_LENGTHS:
        for turn in ("first", "again"):
            sequence = asking(text, f"{length} {turn}", length)
            scheduler.submit(sequence)
            with guarded():
                scheduler.drain()
            assert sequence.num_committed > 0
            assert sequence.pages.cached_tokens > 0 or turn == "first"


def test_captured_passes_have_the_bits_of_eager_ones(
    text: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probabilities are those of the same passes without graphs."""
    backend = text.runner._backend
    assert isinstance(backend, TorchBackend)
    graphs = GraphRunner(text.device, captures=False)
    resources = dataclasses.replace(backend._resources, graphs=graphs)
    given = []
    for prompts in (backend._prompts, CapturedPrompts.of_any_length(resources, CHUNK)):
        monkeypatch.setattr(backend, "_prompts", prompts)
        answers = []
        for length in TEXT_LENGTHS:
            scheduler = text.scheduler(Decodes(), pipeline_depth=2)
            sequences = [asking(text, f"{length} {turn}", length) for turn in ("first", "again")]
            answers += [answered(scheduler, each) for each in sequences]
        given.append(answers)
    assert given[0] == given[1]
    assert len({str(each) for each in given[0]}) > 2


# ---------------------------------------------------------------- moondream


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assembly]:
    """Moondream 2's shape with random weights in int8, and an adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    data = safetensors_file(random_adapter(moondream2_config().text, RANKS["x"], 0))
    (folder / "x.safetensors").write_bytes(data)
    config = EngineConfig(
        model="moondream2",
        random_weights=True,
        weight_dtype="int8",
        device="cuda",
        max_running=ROWS,
        adapters=str(folder),
        kv_memory_fraction=0.2,
        decode_path="graph",
    )
    assembly = assemble(config)
    yield assembly
    close(assembly)


@pytest.mark.parametrize("has_image", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_long_prompt_is_quiet(packed: Assembly, has_image: bool, adapted: bool) -> None:
    """With an image and an adapter that no launch has seen, and of packed maps."""
    scheduler = packed.scheduler(Decodes(), pipeline_depth=2)
    image = picture(packed) if has_image else None
    adapter = None
    if adapted:
        file = Path(packed.config.adapters) / "x.safetensors"
        adapter = packed.model.read_adapter(file.read_bytes(), "x", max(RANKS.values()))
    for length in (40, 449, 700, 1200):
        sequence = asking(packed, str(length), length, image, adapter)
        scheduler.submit(sequence)
        with guarded():
            scheduler.drain()
        assert sequence.num_committed > 0
