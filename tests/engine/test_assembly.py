"""How an engine's parts are chosen for each other."""

from __future__ import annotations

import numpy as np
import pytest
from legato_engine import assembly
from legato_engine.config import EngineConfig
from legato_engine.core import ImageInfo
from legato_engine.models.moondream.preprocess import Crops, WholePicture
from legato_engine.runtime.model_runner import ModelRunner

CONFIG = EngineConfig(model="random-tiny", device="cpu", threads=1, max_running=1)
INFO = ImageInfo(image_id="img", width=300, height=200, cache_hit=False)


@pytest.mark.parametrize(("encodes", "kind"), [(None, Crops), (True, WholePicture)])
def test_pictures_are_left_whole_only_for_a_runner_that_encodes_them(monkeypatch, encodes, kind):
    """The runner decides, not the device: here it has none of the kernels, unless it says so."""
    if encodes is not None:
        monkeypatch.setattr(ModelRunner, "encodes_pictures", encodes)
        monkeypatch.setattr(assembly, "_warm_up_requests", lambda made: None)
    made = assembly.assemble(CONFIG)
    try:
        image = made.frontend.prepare_image(np.zeros((200, 300, 3), np.uint8), "key", INFO)
        assert isinstance(image.pixels, kind)
    finally:
        made.device.close()
