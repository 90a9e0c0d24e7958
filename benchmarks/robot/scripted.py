"""A server without a model that answers from the clip's truth, as late as a model on a GPU.

    python -m benchmarks.robot.scripted TRUTH --listen 127.0.0.1:50051

TRUTH has the boxes of each image by the hash of its pixels. Service, session, tracker and engine
process are the product's; the null engine's images and answers are exchanged. Boxes are as inexact
as in `benchmarks.lift`, and some objects are not found.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from legato_engine.config import EngineConfig
from legato_engine.core import process
from legato_engine.null_engine import IMAGE_TOKENS, NullEngine, NullImages
from legato_engine.scripted_output import ScriptedOutput
from legato_engine.types import (
    DetectOutput,
    DetectSpec,
    Event,
    FinishReason,
    ImageBox,
    ImageProperties,
    ObjectEvent,
    Request,
    TextEvent,
)
from legato_service.engines.devices import make_engines

from benchmarks.lift import JITTER
from benchmarks.robot.scene import digest

MISSED = 0.05  # of the objects that can be seen
_STEPS = 4  # of a task, and one for each object; `drive.SCRIPTED` has their time


class SeenImages(NullImages):
    """Images with the hash of the one that was asked for last."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._digests: dict[str, str] = {}  # by image id
        self.latest = ""

    def find_or_load(self, source: Any, *, tenant: str, keep: bool) -> ImageProperties:
        image = super().find_or_load(source, tenant=tenant, keep=keep)
        self.latest = self._digests.get(image.image_id, "")
        return image

    def _load(self, source: Any, view: memoryview, **how: Any) -> ImageProperties:
        image = super()._load(source, view, **how)
        self._digests[image.image_id] = digest(view)
        return image


class TruthEngine(NullEngine):
    """The null engine with the images of a clip, and answers of a detector that knows its truth."""

    _images: SeenImages

    def __init__(self, truth: dict[str, Any], config: EngineConfig, **how: Any) -> None:
        super().__init__(config, **how)
        self._images = SeenImages(config, how["blobs"])
        self._truth = truth

    def _answer(self, request: Request) -> tuple[int, ScriptedOutput]:
        task, boxes = request.task, self._truth.get(self._images.latest)
        if not isinstance(task, DetectSpec) or boxes is None:
            return super()._answer(request)
        rng = np.random.default_rng(int(self._images.latest[:8], 16))
        found = tuple(
            ObjectEvent(box=_inexact(box, rng), label=task.object, confidence=0.9)
            for box in boxes.get(task.object, ())
            if rng.random() >= MISSED
        )
        events: tuple[Event, ...] = (*[TextEvent(text="")] * _STEPS, *found)
        whole, words = DetectOutput(objects=found), len(task.object.split())
        output = ScriptedOutput(task, events, FinishReason.STOP, whole, 0, words)
        return 1 + IMAGE_TOKENS + words, output


def _inexact(edges: list[float], rng: np.random.Generator) -> ImageBox:
    exact = np.array(edges)
    noisy = exact + rng.normal(size=4) * JITTER * np.tile(exact[2:] - exact[:2], 2)
    left, top, right, bottom = map(float, np.clip(noisy, 0, 1))
    return ImageBox(x_min=left, y_min=top, x_max=max(left, right), y_max=max(top, bottom))


def run_engine(path: str, arguments: list[str]) -> int:
    """Run the engine process with the truth."""
    truth = json.loads(Path(path).read_text())
    with mock.patch.object(process, "NullEngine", functools.partial(TruthEngine, truth)):
        return process.main(arguments)


def run_service(path: str, arguments: list[str]) -> int:
    """Run the service, whose engines are processes of this module."""
    from legato_service.__main__ import main

    command = (sys.executable, "-m", "benchmarks.robot.scripted", "--engine", path)
    engines = functools.partial(make_engines, command=command)
    with mock.patch("legato_service.__main__.make_engines", engines):
        return main(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "--engine":
        sys.exit(run_engine(sys.argv[2], sys.argv[3:]))
    sys.exit(run_service(sys.argv[1], sys.argv[2:]))
