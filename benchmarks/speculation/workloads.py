"""What speculation is measured on: real requests, and answers proposed at known rates.

A profile says how well its requests' tokens are foreseen, how long their answers are, and how much
of the KV cache there is for them.

What a lone rate is worth can be read only where the sample has that rate. So profiles of 0.4, 0.6
and 0.8 have five times the requests: among a multiple of five the proposer has exactly so many
fifths of each place right (`speculative.replay`, which also says why nothing is expected of its
luck that is not of independent draws). Of 20 requests of 110 tokens the share accepted of the
tokens tried has a standard deviation of 0.003 to 0.005 with blocks of one to three and of 0.002
with blocks of seven, so that it lies within 0.01 of the rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from legato_engine.bench.workload import fixed_length
from legato_engine.core import (
    CachedImage,
    CaptionLength,
    CaptionTask,
    ImageInfo,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
    TaskSpec,
)
from legato_engine.engine.assembly import Assembly
from legato_engine.engine.engine_core import make_sequence
from legato_engine.models.model import PreparedImage
from legato_engine.models.moondream.family import shipped
from legato_engine.sequence import Sequence as EngineSequence
from PIL import Image

FEWEST = 4
"""Requests of a profile, so that all its rates are met."""

_MEASURED = 5

REAL = "captions and queries"
_QUESTIONS = ("What is in the picture?", "How many things are there?")
_SHIPPED = "legato_tiny"
_PREAMBLE = "Answer in one word, then say why, then name what stands beside it, left to right. "
_SHORTAGE = 0.4


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Requests whose next tokens are foreseen at `rates`, one for each request in turn.

    Answers are `length` tokens long; 0: as the plan says. With `pressure` the cache has pages for
    a part of what so many requests come to need, twice as many requests wait for it, and all of
    them begin with the same words. There are `times` as many requests as the plan says.
    """

    rates: tuple[float, ...]
    times: int = 1
    length: int = 0
    pressure: bool = False


PROFILES = {
    "0.4": Profile((0.4,), times=_MEASURED),
    "0.6": Profile((0.6,), times=_MEASURED),
    "0.8": Profile((0.8,), times=_MEASURED),
    "mixed": Profile((0.95, 0.1, 0.6, 0.8)),
    "structured": Profile((0.9,)),
    "creative": Profile((0.35,)),
    "near the end": Profile((0.8,), length=8),
    "under pressure": Profile((0.95, 0.1, 0.6, 0.8), pressure=True),
}


def at_once(assembly: Assembly, profile: Profile) -> int:
    """How many requests of a profile are there at a time."""
    return assembly.config.max_running * (1 + profile.pressure)


def synthetic_requests(
    assembly: Assembly, profile: Profile, *, length: int, context: int = 0, fewest: int = FEWEST
) -> list[EngineSequence]:
    """Questions without a picture, answered with `length` tokens unless the profile knows better.

    As many waves of them as make up `fewest`, times the profile's. No two begin alike, but under
    pressure. A `context` is the position of the first token of each answer; 0 leaves it to the
    prompt.
    """
    wave = at_once(assembly, profile)
    count = wave * -(-fewest * profile.times // wave)
    constraints = range(len(assembly.frontend.constraints))
    sequences = []
    for index in range(count):
        question = f"{index}: what is there?"
        if profile.pressure:
            question = _PREAMBLE + question
        sequence = _sequence(assembly, str(index), QueryTask(question=question), None)
        sequences.append(fixed_length(sequence, profile.length or length, context, constraints))
    return sequences


def cache_for(assembly: Assembly, profile: Profile, requests: Sequence[EngineSequence]) -> Assembly:
    """The same with as many pages as the profile leaves it; the longest request always fits."""
    if not profile.pressure:
        return assembly
    page_size = assembly.config.page_size
    needs = [-(-request.max_length // page_size) for request in requests]
    wanted = max(needs) * assembly.config.max_running
    num_pages = 1 + max(*needs, int(_SHORTAGE * wanted))
    return dataclasses.replace(assembly, num_pages=min(num_pages, assembly.num_pages))


def sample_images(assembly: Assembly) -> list[PreparedImage]:
    """The pictures that come with legato-tiny."""
    folder = shipped(_SHIPPED) / "samples"
    return [_prepared(assembly, path) for path in sorted(folder.iterdir()) if _is_picture(path)]


def _is_picture(path: Path) -> bool:
    return path.suffix in (".png", ".jpg", ".webp")


def _prepared(assembly: Assembly, path: Path) -> PreparedImage:
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    width, height = picture.size
    info = ImageInfo(image_id=path.name, width=width, height=height, cache_hit=False)
    return assembly.frontend.prepare_image(np.asarray(picture), path.name, info)


def real_requests(assembly: Assembly, pictures: Sequence[PreparedImage]) -> list[EngineSequence]:
    """A caption of each length and two questions for every picture; greedy."""
    tasks: list[TaskSpec] = [CaptionTask(length=length) for length in CaptionLength]
    tasks += [QueryTask(question=question) for question in _QUESTIONS]
    return [
        _sequence(assembly, f"{picture.key}-{index}", task, picture)
        for picture in pictures
        for index, task in enumerate(tasks)
    ]


def _sequence(
    assembly: Assembly, name: str, task: TaskSpec, picture: PreparedImage | None
) -> EngineSequence:
    request = Request(
        request_id=RequestKey(name),
        task=task,
        image=None if picture is None else CachedImage(image_id=picture.key),
        sampling=SamplingParams(temperature=0.0, seed=0),
    )
    return make_sequence(assembly.frontend, request, picture)
