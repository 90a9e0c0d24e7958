"""Refinement of outlines on a GPU."""

import numpy as np
import pytest
import torch
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.models.moondream import outline_shapes
from legato_engine.models.moondream.refiner import Crop
from legato_engine.runtime.graphs import GraphRunner
from legato_engine.runtime.model_runner import RefineStep
from legato_engine.types import QueryTask, SamplingParams

from tests.engine.engine.core.world import World
from tests.engine.engine.test_refinements import HEIGHT, WIDTH, ask, outline, truth
from tests.engine.models.moondream.outlines import scripted
from tests.engine.models.moondream.outlines.shapes import overlap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=["f32", "bf16"])
def assembly(request, tmp_path_factory):
    """The scripted model and its refiner on the GPU."""
    folder = tmp_path_factory.mktemp("scripted")
    scripted.write_model(folder)
    scripted.write_head(folder / "head.pt")
    config = EngineConfig(
        model="legato-tiny",
        weights=str(folder),
        refiner=str(folder / "head.pt"),
        device="cuda",
        dtype=request.param,
    )
    made = assemble(config)
    yield made
    made.device.close()


def likeness(found):
    """The overlap of an outline with the truth."""
    box, extent = found.box, np.array([WIDTH, HEIGHT])
    low = np.array([box.x_min, box.y_min]) * extent
    stretch = np.array([box.x_max, box.y_max]) * extent - low
    rings = [ring * stretch + low for ring in outline_shapes.polygons(found.path)]
    xs, ys = (np.arange(count, dtype=np.float64) + 0.5 for count in (WIDTH, HEIGHT))
    return overlap(truth(), outline_shapes.enclosed(rings, xs, ys))


def test_an_outline_is_refined_among_others_as_alone(assembly):
    """A captured graph gives the same bits each time, between decodes of other requests."""
    world = World(assembly)
    ask(world, "alone")
    (alone,) = world.run("alone")
    assert not outline(alone).coarse
    assert likeness(outline(alone)) > 0.85
    for number in range(5):
        ask(world, f"r{number}")
    world.submit("q", QueryTask(question="What?"), sampling=SamplingParams(max_tokens=60))
    *together, _ = world.run(*(f"r{number}" for number in range(5)), "q")
    assert [done.result for done in together] == [alone.result] * 5
    world.close()


def test_a_captured_refinement_is_an_eager_one(assembly):
    """Captured and eager refinement agree in every slot, repeatedly."""
    refiner, device = assembly.refiner, assembly.device
    side = refiner.answer.shape[0]
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (side, side, 3), np.uint8)
    mask = random.integers(0, 2, (side, side), np.uint8)
    given = Crop((side, side), 0, 0, (side, side), pixels, mask)
    answers = []
    for captures in (True, False):
        step = RefineStep(refiner, device, 2, GraphRunner(device, captures=captures))
        step.warm_up()
        for slot in (0, 1, 0):
            step.forward(slot, given)
            device.compute.record().wait()
            answers.append(torch.from_numpy(step.answer(slot)))
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert 0 < answers[0].mean() < 1
