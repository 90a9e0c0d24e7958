"""On a CUDA device: streams keep their order, graphs change nothing, answers are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from legato_engine.assembly import Assembly, SilentSink, assemble
from legato_engine.config import EngineConfig
from legato_engine.core import (
    CachedImage,
    CaptionTask,
    DetectResult,
    DetectTask,
    FinishReason,
    ImageInfo,
    QueryTask,
    Request,
    SamplingParams,
    TaskResult,
    TaskSpec,
)
from legato_engine.device.select import open_device
from legato_engine.engine import make_sequence
from legato_engine.sequence import Sequence

from tests.gpu.picture import shapes_picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TASKS: tuple[TaskSpec, ...] = (
    DetectTask(object="red circle"),
    DetectTask(object="blue square"),
    CaptionTask(),
    QueryTask(question="How many red circles are there?"),
)


class Results(SilentSink):
    """Keeps every request's result."""

    def __init__(self) -> None:
        self.by_id: dict[str, TaskResult] = {}

    def done(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Remember it."""
        self.by_id[sequence.request.request_id] = sequence.task.result(finish_reason)


def assembled(device: str, *, graphs: bool = True) -> Assembly:
    """legato-tiny in float32, so that both devices compute the same thing."""
    return assemble(
        EngineConfig(
            model="legato-tiny", device=device, dtype="f32", max_running=4, cuda_graphs=graphs
        )
    )


def answers(assembly: Assembly, depth: int, temperature: float = 0.0) -> dict[str, TaskResult]:
    """Every task asked twice, all together."""
    sink = Results()
    scheduler = assembly.scheduler(sink, pipeline_depth=depth)
    info = ImageInfo(image_id="shapes", width=640, height=480, cache_hit=False)
    image = assembly.frontend.prepare_image(shapes_picture(), "shapes", info)
    for index, task in enumerate(TASKS * 2):
        request = Request(
            request_id=str(index),
            task=task,
            image=CachedImage(image_id="shapes"),
            sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=48),
        )
        scheduler.submit(make_sequence(assembly.frontend, request, image))
    scheduler.drain()
    load = scheduler.load()
    assert (load.running, load.waiting, load.inflight, load.rows_used, load.pages_used) == (0,) * 5
    return sink.by_id


@pytest.fixture(scope="module")
def cuda() -> Iterator[Assembly]:
    """legato-tiny on the GPU with graphs."""
    assembly = assembled("cuda")
    yield assembly
    assembly.device.close()


def test_streams_order_and_overlap() -> None:
    """A copy behind an event sees what compute wrote, and event times follow the order."""
    device = open_device("cuda")
    value = torch.zeros(1 << 20, device=device.torch_device)
    host = device.pinned((1 << 20,), torch.float32)
    start = device.compute.record()
    for _ in range(200):
        device.compute.submit(lambda: (value.add_(1.0), None)[1])
    written = device.compute.record()
    device.copy.wait_event(written)
    device.copy.submit(lambda: (host.copy_(value, non_blocking=True), None)[1])
    copied = device.copy.record()
    copied.wait()
    assert host.eq(200.0).all()
    assert start.time_ns() < written.time_ns() < copied.time_ns()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_depth_changes_no_token(cuda: Assembly, temperature: float) -> None:
    """Blocking and pipelined answers are equal, greedy and with seeds."""
    assert answers(cuda, 1, temperature) == answers(cuda, 2, temperature)


def test_graphs_change_no_token(cuda: Assembly) -> None:
    """Captured and eager decode give the same answers."""
    assert answers(cuda, 2) == answers(assembled("cuda", graphs=False), 2)


def test_answers_are_those_of_the_cpu(cuda: Assembly) -> None:
    """Texts are equal and boxes agree within three bins, in float32."""
    on_cpu = answers(assembled("cpu"), 2)
    for key, result in answers(cuda, 2).items():
        expected = on_cpu[key]
        if isinstance(result, DetectResult) and isinstance(expected, DetectResult):
            assert len(result.objects) == len(expected.objects) > 0
            for ours, theirs in zip(result.objects, expected.objects, strict=True):
                assert _corners(ours.box) == pytest.approx(_corners(theirs.box), abs=3 / 1024)
        else:
            assert result == expected


def test_a_warm_engine_takes_no_more_memory(cuda: Assembly) -> None:
    """Once warm, a whole batch of answers reserves no more device memory."""
    answers(cuda, 2)
    before = torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()
    answers(cuda, 2)
    assert (torch.cuda.memory_stats()["num_alloc_retries"], torch.cuda.memory_reserved()) == before


def _corners(box: object) -> tuple[float, ...]:
    return tuple(getattr(box, name) for name in ("x_min", "y_min", "x_max", "y_max"))
