"""Workloads of the speculation benchmark: real requests, and answers drafted at known rates.

Profiles with a single rate have five times the requests, because the oracle meets its rates exactly
over multiples of five sequences (see `OracleProposer`). Over 20 requests of 110 tokens the accepted
share of the tokens tried has a standard deviation of 0.003 to 0.005 with blocks of one to three,
and of 0.002 with blocks of seven, so it lies within 0.01 of the rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from legato_engine.bench.workload import fixed_length
from legato_engine.core.assembly import Assembly
from legato_engine.core.requests import make_sequence
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.moondream.family import shipped
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import (
    CachedImageRef,
    CaptionLength,
    CaptionSpec,
    ImageProperties,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    TaskSpec,
)
from PIL import Image

from benchmarks.speculation.oracle import Rate

FEWEST = 4
"""Requests of a profile, so that all its rates occur."""

_MEASURED = 5

REAL = "captions and queries"
_QUESTIONS = ("What is in the picture?", "How many things are there?")
_SHIPPED = "legato_tiny"
_PREAMBLE = "Answer in one word, then say why, then name what stands beside it, left to right. "
_SHORTAGE = 0.4


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Requests whose tokens are drafted right at `rates`, one rate per request in turn.

    A rate may be a course: one for each of so many equal parts of the answer. Answers have `length`
    tokens (0: the plan's). With `pressure` the cache has pages for only a part of the answers,
    twice as many requests wait, and all begin with the same words. There are `times` as many
    requests as in the plan.
    """

    rates: tuple[float | tuple[float, ...], ...]
    times: int = 1
    length: int = 0
    pressure: bool = False


PROFILES = {
    "0.4": Profile((0.4,), times=_MEASURED),
    "0.6": Profile((0.6,), times=_MEASURED),
    "0.8": Profile((0.8,), times=_MEASURED),
    "mixed": Profile((0.95, 0.1, 0.6, 0.8)),
    "changing": Profile(
        (0.95, (0.95, 0.95, 0.05, 0.95, 0.95), (0.95, 0.95, 0.05, 0.05, 0.05), 0.35), times=2
    ),
    "structured": Profile((0.9,)),
    "creative": Profile((0.35,)),
    "near the end": Profile((0.8,), length=8),
    "under pressure": Profile((0.95, 0.1, 0.6, 0.8), pressure=True),
}


def rates_of(profile: Profile, requests: Sequence[EngineSequence]) -> list[Rate]:
    """Each request's rate, by position if it has a course."""
    rates: list[Rate] = []
    for request, rate in zip(requests, itertools.cycle(profile.rates), strict=False):
        if isinstance(rate, float):
            rates.append(rate)
            continue
        part = -(-(request.max_length - request.prompt_length) // len(rate))
        course = [each for each in rate for _ in range(part)]
        rates.append([rate[0]] * request.prompt_length + course)
    return rates


def at_once(assembly: Assembly, profile: Profile) -> int:
    """Return how many requests of a profile are submitted together."""
    return assembly.config.max_running * (1 + profile.pressure)


def synthetic_requests(
    assembly: Assembly, profile: Profile, *, length: int, context: int = 0, fewest: int = FEWEST
) -> list[EngineSequence]:
    """Questions without an image, answered with the profile's or `length` tokens.

    There are as many whole waves as make up `fewest`, times the profile's factor. All begin
    differently, except under pressure. `context` is the position of each answer's first token; 0
    leaves it to the prompt.
    """
    wave = at_once(assembly, profile)
    count = wave * -(-fewest * profile.times // wave)
    constraints = range(len(assembly.frontend.constraints))
    sequences = []
    for index in range(count):
        question = f"{index}: what is there?"
        if profile.pressure:
            question = _PREAMBLE + question
        sequence = _sequence(assembly, str(index), QuerySpec(question=question), None)
        sequences.append(fixed_length(sequence, profile.length or length, context, constraints))
    return sequences


def cache_for(assembly: Assembly, profile: Profile, requests: Sequence[EngineSequence]) -> Assembly:
    """Give the assembly the pages that the profile allows; the longest request always fits.

    Under pressure all streams are admitted, and then answers outgrow the pages: a running request
    is preempted. So there are pages for the streams' prompts and for a part of their answers.
    """
    if not profile.pressure:
        return assembly
    page_size = assembly.config.page_size
    streams = min(assembly.config.max_running, len(requests))
    longest = max(-(-request.max_length // page_size) for request in requests)
    prompt = max(-(-(request.prompt_length + 1) // page_size) for request in requests)
    shared = _common_length(requests) // page_size
    answers = max(streams, int(_SHORTAGE * streams * (longest - prompt)))
    num_pages = 1 + max(longest + 1, shared + streams * (prompt - shared) + answers)
    return dataclasses.replace(assembly, num_pages=min(num_pages, assembly.num_pages))


def _common_length(requests: Sequence[EngineSequence]) -> int:
    """Positions that all requests begin with; one has no image."""
    prompts = [request.prompt for request in requests]
    same = (len(set(tokens)) == 1 for tokens in zip(*prompts, strict=False))
    return requests[0].prefix_length + sum(itertools.takewhile(bool, same))


def sample_images(assembly: Assembly) -> list[PreparedImage]:
    """Load the images that come with legato-tiny."""
    folder = shipped(_SHIPPED) / "samples"
    return [_prepared(assembly, path) for path in sorted(folder.iterdir()) if _is_image(path)]


def _is_image(path: Path) -> bool:
    return path.suffix in (".png", ".jpg", ".webp")


def _prepared(assembly: Assembly, path: Path) -> PreparedImage:
    with Image.open(path) as opened:
        pixels = opened.convert("RGB")
    width, height = pixels.size
    info = ImageProperties(image_id=path.name, width=width, height=height, cache_hit=False)
    return assembly.frontend.prepare_image(np.asarray(pixels), path.name, info)


def real_requests(assembly: Assembly, images: Sequence[PreparedImage]) -> list[EngineSequence]:
    """Make a caption of each length and two questions for every image; greedy."""
    tasks: list[TaskSpec] = [CaptionSpec(length=length) for length in CaptionLength]
    tasks += [QuerySpec(question=question) for question in _QUESTIONS]
    return [
        _sequence(assembly, f"{image.key}-{index}", task, image)
        for image in images
        for index, task in enumerate(tasks)
    ]


def read_texts(folder: Path) -> dict[str, tuple[str, ...]]:
    """Prompts by the name of their file, a TOML with a list `prompts`."""
    return {
        path.stem: tuple(tomllib.loads(path.read_text())["prompts"])
        for path in sorted(folder.glob("*.toml"))
    }


def text_requests(
    assembly: Assembly, prompts: Sequence[str], *, length: int
) -> list[EngineSequence]:
    """Questions without an image; greedy answers of at most `length` tokens."""
    return [
        _sequence(assembly, str(index), QuerySpec(question=prompt), None, length=length)
        for index, prompt in enumerate(prompts)
    ]


def _sequence(
    assembly: Assembly,
    name: str,
    task: TaskSpec,
    image: PreparedImage | None,
    length: int | None = None,
) -> EngineSequence:
    request = Request(
        request_id=RequestKey(name),
        task=task,
        image=None if image is None else CachedImageRef(image_id=image.key),
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=length),
    )
    return make_sequence(assembly.frontend, request, image)
