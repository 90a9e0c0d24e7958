"""Adapters on a CUDA device: captured launches read the slots that rows name when they replay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.core.requests import make_sequence
from legato_engine.kernels import ops, reference
from legato_engine.kernels.parameters import AdapterRows
from legato_engine.models.base import Adapter
from legato_engine.models.moondream.presets import moondream2_config, moondream3_config
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Sequence
from legato_engine.types import (
    CachedImage,
    CaptionTask,
    FinishReason,
    ImageInfo,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
    TaskResult,
)
from PIL import Image

from tests.adapters import random_adapter, safetensors_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS = {"": 0, "x": 8, "y": 64, "z": 16}
PRESETS = {"moondream2": moondream2_config, "moondream3": moondream3_config}


def test_a_captured_step_follows_the_slots() -> None:
    """Replays read the slots and the weights of the moment, as row by row in float64 would."""
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    a_SRI, b_SRO, x_TI, out_TO = noise(5, 16, 96), noise(5, 16, 160), noise(8, 96), noise(8, 160)
    a_SRI[0] = b_SRO[0] = 0
    slot_T = torch.zeros(8, dtype=torch.int64, device="cuda")
    rank_S = torch.full((5,), 16, device="cuda")
    rows = AdapterRows(slot_T, rank_S, 16)
    ops.add_low_rank(out_TO.clone(), x_TI, a_SRI, b_SRO, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result_TO = ops.add_low_rank(out_TO, x_TI, a_SRI, b_SRO, rows)
    for slots in ([0] * 8, [1, 2, 3, 4, 0, 1, 1, 2], [4] * 8):
        slot_T.copy_(torch.tensor(slots))
        a_SRI[1:] = noise(4, 16, 96)
        graph.replay()
        out, x, a, b = (each.double().cpu() for each in (out_TO, x_TI, a_SRI, b_SRO))
        expected = reference.add_low_rank_rows(out, x, a, b, slot_T.cpu(), rank_S.cpu())
        torch.testing.assert_close(result_TO.double().cpu(), expected, rtol=1e-4, atol=1e-2)


class Answers(SilentSink):
    """Keeps every request's result."""

    def __init__(self) -> None:
        self.results: dict[str, TaskResult] = {}

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Remember it."""
        self.results[sequence.request.request_id.caller_id] = sequence.task.result(finish_reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the adapters could lie; the tests hand them over themselves."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module", params=PRESETS)
def large(folder: Path, request: pytest.FixtureRequest) -> Iterator[Assembly]:
    """A model's shape with random weights, its kernels, and room for two adapters."""
    config = EngineConfig(
        model=request.param,
        random_weights=True,
        max_context=2048,
        num_pages=1024,
        device="cuda",
        max_running=4,
        adapters=str(folder),
        adapter_slots=2,
    )
    assembly = assemble(config)
    yield assembly
    assembly.device.close()
    del assembly
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def adapters(large: Assembly) -> dict[str, Adapter]:
    """Three of different ranks, read as a file would be."""
    text = PRESETS[large.config.model]().text
    made = {}
    for seed, (name, rank) in enumerate(RANKS.items()):
        if rank:
            data = safetensors_file(random_adapter(text, rank, seed))
            made[name] = large.model.read_adapter(data, name, large.config.max_adapter_rank)
    return made


def run(
    assembly: Assembly, adapters: dict[str, Adapter], names: list[str], depth: int
) -> dict[str, TaskResult]:
    """A caption and a question for each name, together; nothing is held at the end."""
    sink = Answers()
    scheduler = assembly.scheduler(sink, pipeline_depth=depth)
    info = ImageInfo(image_id="grey", width=850, height=600, cache_hit=False)
    grey = assembly.frontend.prepare_image(Image.new("RGB", (850, 600), (90, 90, 90)), "grey", info)
    sampling = SamplingParams(temperature=0.0, max_tokens=16)
    for number, name in enumerate(names):
        asked = Request(
            request_id=RequestKey(f"{number}-caption"),
            task=CaptionTask(),
            image=CachedImage(image_id="grey"),
            sampling=sampling,
        )
        scheduler.submit(make_sequence(assembly.frontend, asked, grey, adapters.get(name)))
        asked = Request(
            request_id=RequestKey(f"{number}-query"),
            task=QueryTask(question="What?" * 20),
            sampling=sampling,
        )
        scheduler.submit(make_sequence(assembly.frontend, asked, None, adapters.get(name)))
    scheduler.drain()
    load = scheduler.load()
    assert (load.rows_used, load.pages_used, load.adapters_used) == (0, 0, 0)
    return sink.results


@pytest.mark.parametrize("depth", [1, 2])
def test_more_adapters_than_slots_all_answer(
    large: Assembly, adapters: dict[str, Adapter], depth: int
) -> None:
    """Mixed with rows of none, all are served, and each adapter says something of its own."""
    results = run(large, adapters, [*RANKS, *RANKS], depth)
    assert len(results) == 4 * len(RANKS)
    captions = {repr(results[f"{number}-caption"]) for number in range(len(RANKS))}
    assert len(captions) == len(RANKS)
