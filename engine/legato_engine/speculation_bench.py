"""What speculation buys: fixed blocks beside policies, on real answers and on known quality.

The same requests run once plainly and then with each setting, and their tokens are compared. Real
ones are captions of pictures and questions about them, by prompt lookup. Synthetic ones are answers
of fixed length whose tokens are proposed right at known rates, by a replay of the plain run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from PIL import Image

from legato_engine.assembly import Assembly, speculating
from legato_engine.config import SPECULATION_OFF
from legato_engine.core import (
    CachedImage,
    CaptionLength,
    CaptionTask,
    ImageInfo,
    QueryTask,
    Request,
    SamplingParams,
    TaskSpec,
)
from legato_engine.engine import make_sequence
from legato_engine.models.model import PreparedImage
from legato_engine.models.moondream.family import shipped
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.speculation_run import Figures, Run
from legato_engine.speculative.proposer import Proposer
from legato_engine.speculative.replay import ReplayProposer, known_history
from legato_engine.workload import FixedLengthTask

SETTINGS = ("fixed:1", "fixed:2", "fixed:4", "fixed:8", "seed", "budget")
PROFILES = {"0.4": (0.4,), "0.6": (0.6,), "0.8": (0.8,), "mixed": (0.95, 0.1, 0.6, 0.8)}
"""Rates at which synthetic proposals are right, by request in turn."""

REAL = "captions and queries"
_QUESTIONS = ("What is in the picture?", "How many things are there?")
_SHIPPED = "legato_tiny"

_Make = Callable[[], list[EngineSequence]]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; of `repeats` runs the fastest counts.

    `length` is of synthetic answers, `profiles` are names of `PROFILES`.
    """

    streams: Sequence[int]
    length: int
    repeats: int
    settings: Sequence[str] = SETTINGS
    profiles: Sequence[str] = tuple(PROFILES)


def measure(assembly: Assembly, plan: Plan) -> list[Figures]:
    """Every workload and setting, plain decoding first; nobody else uses the assembly meanwhile."""
    pictures = sample_pictures(assembly)
    rows: list[Figures] = []
    for streams in plan.streams:
        config = msgspec.structs.replace(assembly.config, max_running=streams)
        some = dataclasses.replace(assembly, config=config)
        requests = max(streams, len(PROFILES["mixed"]))
        rows += _compare(some, plan, REAL, partial(real_requests, assembly, pictures), ())
        synthetic = partial(synthetic_requests, assembly, requests, plan.length)
        for name in plan.profiles:
            rows += _compare(some, plan, name, synthetic, PROFILES[name])
    return rows


def _compare(
    assembly: Assembly, plan: Plan, workload: str, make: _Make, rates: Sequence[float]
) -> list[Figures]:
    streams = assembly.config.max_running
    off = speculating(assembly, SPECULATION_OFF)
    Run(off, make())  # nothing is cold in what is timed
    plain = _fastest(off, make, plan.repeats)
    rows = [plain.figures(workload, streams, SPECULATION_OFF, plain)]
    for setting in plan.settings:
        proposer = _replay(assembly, plain, rates) if rates else None
        run = _fastest(speculating(assembly, setting, proposer), make, plan.repeats)
        rows.append(run.figures(workload, streams, setting, plain))
    return rows


def _fastest(assembly: Assembly, make: _Make, repeats: int) -> Run:
    return min((Run(assembly, make()) for _ in range(repeats)), key=lambda run: run.seconds)


def _replay(assembly: Assembly, plain: Run, rates: Sequence[float]) -> Proposer:
    known = [
        known_history(sequence.prefix_length, sequence.prompt, tokens)
        for sequence, tokens in zip(plain.sequences, plain.tokens, strict=True)
    ]
    return ReplayProposer(
        known,
        assembly.device.torch_device,
        rates=[rates[index % len(rates)] for index in range(len(known))],
        vocab_size=assembly.model.vocab_size,
    )


def sample_pictures(assembly: Assembly) -> list[PreparedImage]:
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


def synthetic_requests(assembly: Assembly, count: int, length: int) -> list[EngineSequence]:
    """Questions without a picture, no two alike, each answered with `length` tokens."""
    sequences = []
    constraints = range(len(assembly.frontend.constraints))
    for index in range(count):
        task = QueryTask(question=f"{index}: what is there?")
        sequence = _sequence(assembly, str(index), task, None)
        sequence.task = FixedLengthTask(sequence.task, length, sequence.prompt, constraints)
        sequences.append(sequence)
    return sequences


def _sequence(
    assembly: Assembly, request_id: str, task: TaskSpec, picture: PreparedImage | None
) -> EngineSequence:
    request = Request(
        request_id=request_id,
        task=task,
        image=None if picture is None else CachedImage(image_id=picture.key),
        sampling=SamplingParams(temperature=0.0, seed=0),
    )
    return make_sequence(assembly.frontend, request, picture)
