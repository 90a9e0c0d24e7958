"""What speculation buys: fixed blocks beside policies, on real answers and on known quality.

The same requests run once plainly and then with each setting, and their tokens are compared. Real
ones are captions of pictures and questions about them, by the engine's own proposals. Synthetic
ones are answers whose tokens are proposed right at known rates, by a replay of the plain run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle

import msgspec

from legato_engine.assembly import Assembly, speculating
from legato_engine.config import SPECULATION_OFF
from legato_engine.errors import InvalidField
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.speculation_loads import (
    PROFILES,
    REAL,
    cache_for,
    real_requests,
    sample_pictures,
    synthetic_requests,
)
from legato_engine.speculation_run import Figures, Run
from legato_engine.speculative.proposer import UNKNOWN
from legato_engine.speculative.replay import ReplayProposer, known_history

SETTINGS = ("fixed:1", "fixed:2", "fixed:4", "fixed:8", "seed", "budget")
WORKLOADS = (REAL, *PROFILES)

_Make = Callable[[], list[EngineSequence]]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; of `repeats` runs the fastest counts.

    `length` is of synthetic answers and `context` the position of their first token (0: as it
    comes). `workloads` are `REAL` and names of `PROFILES`.
    """

    streams: Sequence[int]
    length: int
    repeats: int
    settings: Sequence[str] = SETTINGS
    workloads: Sequence[str] = WORKLOADS
    context: int = 0


def measure(assembly: Assembly, plan: Plan) -> list[Figures]:
    """Every workload and setting, plain decoding first; nobody else uses the assembly meanwhile.

    Raises `InvalidField` for a setting or workload that does not exist.
    """
    unknown = [name for name in plan.workloads if name not in WORKLOADS]
    if unknown:
        raise InvalidField(f"there are {', '.join(WORKLOADS)}, no {unknown[0]}", field="workloads")
    rows: list[Figures] = []
    for streams in plan.streams:
        config = msgspec.structs.replace(assembly.config, max_running=streams)
        some = dataclasses.replace(assembly, config=config)
        off = speculating(some, SPECULATION_OFF)
        rows += _real(off, plan)
        rows += _synthetic(off, plan)
    return rows


def _real(off: Assembly, plan: Plan) -> list[Figures]:
    """Real requests with every setting."""
    if REAL not in plan.workloads:
        return []
    make = partial(real_requests, off, sample_pictures(off))
    changed = ((setting, speculating(off, setting)) for setting in plan.settings)
    return _compare(off, _plain(off, make, plan), make, changed, plan, REAL)


def _synthetic(off: Assembly, plan: Plan) -> list[Figures]:
    """The profiles with every setting; one replay knows the answers of one after the other."""
    names = [name for name in plan.workloads if name in PROFILES]
    makes = {
        name: partial(
            synthetic_requests, off, PROFILES[name], length=plan.length, context=plan.context
        )
        for name in names
    }
    if not names:
        return []
    everyone = [make() for make in makes.values()]
    room = max(map(len, everyone)), off.model.max_context
    replay = ReplayProposer(
        [[UNKNOWN]],
        off.device.torch_device,
        rates=[1.0],
        vocab_size=off.model.vocab_size,
        room=room,
    )
    speculative = {setting: speculating(off, setting, replay) for setting in plan.settings}
    rows: list[Figures] = []
    for name, make in makes.items():
        profile, requests = PROFILES[name], make()
        cramped = cache_for(off, profile, requests)
        plain = _plain(cramped, make, plan)
        rates = [rate for rate, _ in zip(cycle(profile.rates), requests, strict=False)]
        replay.know(list(map(_history, plain.sequences, plain.tokens)), rates=rates)
        changed = (
            (setting, cache_for(each, profile, requests)) for setting, each in speculative.items()
        )
        rows += _compare(cramped, plain, make, changed, plan, name)
    return rows


def _compare(
    off: Assembly,
    plain: Run,
    make: _Make,
    changed: Iterable[tuple[str, Assembly]],
    plan: Plan,
    workload: str,
) -> list[Figures]:
    streams = off.config.max_running
    rows = [plain.figures(workload, streams, SPECULATION_OFF, plain)]
    for setting, assembly in changed:
        run = _fastest(assembly, make, plan.repeats)
        rows.append(run.figures(workload, streams, setting, plain))
    return rows


def _plain(off: Assembly, make: _Make, plan: Plan) -> Run:
    Run(off, make())  # nothing is cold in what is timed
    return _fastest(off, make, plan.repeats)


def _fastest(assembly: Assembly, make: _Make, repeats: int) -> Run:
    return min((Run(assembly, make()) for _ in range(repeats)), key=lambda run: run.seconds)


def _history(sequence: EngineSequence, tokens: Sequence[int]) -> list[int]:
    return known_history(sequence.prefix_length, sequence.prompt, tokens)
