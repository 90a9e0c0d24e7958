"""Requests that warm up an engine before it serves."""

from __future__ import annotations

import numpy as np
from PIL import Image

from legato_engine.core.images import CachedImage, ImageInfo
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request, SamplingParams
from legato_engine.core.task_specs import CaptionTask, QueryTask
from legato_engine.engine.sequences import make_sequence
from legato_engine.models.frontend import ModelFrontend
from legato_engine.scheduler.scheduler import Scheduler

_TOKENS = 4


def warm_up(frontend: ModelFrontend, scheduler: Scheduler) -> None:
    sampling = SamplingParams(max_tokens=_TOKENS, seed=0)
    info = ImageInfo(image_id="warm-up", width=64, height=48, cache_hit=False)
    pixels = Image.fromarray(np.zeros((48, 64, 3), np.uint8))
    source = CachedImage(image_id=info.image_id)
    if "caption" in frontend.tasks:
        request = Request(
            request_id=RequestKey("0"), task=CaptionTask(), image=source, sampling=sampling
        )
        image = frontend.prepare_image(pixels, info.image_id, info)
        scheduler.submit(make_sequence(frontend, request, image))
    if "query" in frontend.tasks:
        request = Request(
            request_id=RequestKey("1"), task=QueryTask(question="?"), sampling=sampling
        )
        scheduler.submit(make_sequence(frontend, request, None))
    scheduler.drain()
