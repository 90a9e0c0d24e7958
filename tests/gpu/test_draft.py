"""On a GPU: drafts are captured with everything else, and change no answer."""

from __future__ import annotations

import pytest
import torch
from legato_engine.assembly import assemble, speculating
from legato_engine.config import EngineConfig

from tests.engine.models import against_transformers as same
from tests.engine.models import hub_folder
from tests.engine.runtime.test_draft_model import asked as asked_in_text
from tests.engine.test_default_draft import asked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_default_draft_says_what_the_model_will(temperature):
    """Answers by the kernels are the same bits, in far fewer steps."""
    tiny = assemble(EngineConfig(device="cuda", max_running=2, crops_per_launch=0))
    plain = asked(tiny, temperature)
    figures = asked(speculating(tiny, "fixed:4"), temperature).figures("", 2, "", plain)
    tiny.device.close()
    assert figures.identical
    assert figures.tokens_per_verify > 1.5


def test_a_model_drafts_for_itself(tmp_path):
    """With fixed shapes and nothing read on the host: what it says is mostly what the model says,
    whose own sums depend on the batch here.
    """
    hub_folder.write(tmp_path, hub_folder.phi())
    settings = {"speculation": "fixed:4", "draft": f"phi:{tmp_path}", "device": "cuda"}
    with same.Engine("phi", tmp_path, **settings, dtype="f32") as engine:
        run = asked_in_text(engine, 0.0)
    figures = run.figures("", 5, "", run)
    assert figures.acceptance > 0.7
