"""What speculation buys: fixed blocks beside policies, on real answers and on known quality.

The same requests run once plainly and then with each setting, and their tokens are compared. Real
ones are captions of pictures and questions about them, by the engine's own proposals. Synthetic
ones are answers whose tokens are proposed right at known rates, by a replay of the plain run.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle

import msgspec
from legato_engine.config import SPECULATION_OFF
from legato_engine.engine.assembly import Assembly, speculating
from legato_engine.errors import InvalidField
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.speculative.proposer import UNKNOWN, Proposer

from benchmarks.speculation.oracle import OracleProposer, known_history
from benchmarks.speculation.run import Figures, Run
from benchmarks.speculation.workloads import (
    FEWEST,
    PROFILES,
    REAL,
    at_once,
    cache_for,
    real_requests,
    sample_images,
    synthetic_requests,
)

SETTINGS = ("fixed:1", "fixed:2", "fixed:4", "fixed:8", "seed", "budget")
WORKLOADS = (REAL, *PROFILES)


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """A workload: fresh requests each time, `at_once` together, 0: all of them."""

    name: str
    make: Callable[[], list[EngineSequence]]
    at_once: int

    def run(self, assembly: Assembly, num_waves: int = 0) -> Run:
        """To their ends; the first waves alone, if so many are wanted."""
        requests = self.make()
        few = num_waves * self.at_once or len(requests)
        return Run(assembly, requests[:few], self.at_once)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; of `repeats` runs the fastest counts.

    `length` is of synthetic answers and `context` the position of their first token (0: as it
    comes); there are at least `fewest`, run in waves of as many as there are streams. `workloads`
    are `REAL` and names of `PROFILES`.
    """

    streams: Sequence[int]
    length: int
    repeats: int
    settings: Sequence[str] = SETTINGS
    workloads: Sequence[str] = WORKLOADS
    context: int = 0
    fewest: int = FEWEST


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
        try:
            rows += _real(off, plan)
            rows += _synthetic(off, plan)
        finally:
            gc.unfreeze()
    return rows


def _real(off: Assembly, plan: Plan) -> list[Figures]:
    """Real requests with every setting."""
    if REAL not in plan.workloads:
        return []
    make = partial(real_requests, off, sample_images(off))
    changed = ((setting, speculating(off, setting)) for setting in plan.settings)
    load = _Load(REAL, make, 1 if off.config.max_running == 1 else 0)
    return _compare(off, _plain(off, load, plan), load, changed, plan)


def _synthetic(off: Assembly, plan: Plan) -> list[Figures]:
    """The profiles with every setting; one replay knows the answers of one after the other."""
    names = [name for name in plan.workloads if name in PROFILES]
    if not names:
        return []
    sizes = {"length": plan.length, "context": plan.context, "fewest": plan.fewest}
    loads = [
        _Load(
            name,
            partial(synthetic_requests, off, PROFILES[name], **sizes),
            at_once(off, PROFILES[name]),
        )
        for name in names
    ]
    most = max(len(load.make()) for load in loads)
    replay, proposer = _replay(off, room=(most, off.model.max_context))
    speculative = {setting: speculating(off, setting, proposer) for setting in plan.settings}
    rows: list[Figures] = []
    for load in loads:
        profile, requests = PROFILES[load.name], load.make()
        cramped = cache_for(off, profile, requests)
        plain = _plain(cramped, load, plan)
        rates = [rate for rate, _ in zip(cycle(profile.rates), requests, strict=False)]
        replay.know(list(map(_history, plain.sequences, plain.tokens)), rates=rates)
        changed = (
            (setting, cache_for(each, profile, requests)) for setting, each in speculative.items()
        )
        rows += _compare(cramped, plain, load, changed, plan)
    return rows


def _replay(assembly: Assembly, room: tuple[int, int]) -> tuple[OracleProposer, Proposer]:
    """A replay that knows nobody yet, and what proposes by it here."""
    on = assembly.device.torch_device
    vocab_size = assembly.model.vocab_size
    replay = OracleProposer([[UNKNOWN]], on, rates=[1.0], vocab_size=vocab_size, room=room)
    if on.type != "cuda":
        return replay, replay
    from benchmarks.speculation.oracle_kernel import OracleKernel

    return replay, OracleKernel(*replay.tables)


def _compare(
    off: Assembly,
    plain: Run,
    load: _Load,
    changed: Iterable[tuple[str, Assembly]],
    plan: Plan,
) -> list[Figures]:
    streams = off.config.max_running
    rows = [plain.figures(load.name, streams, SPECULATION_OFF, plain)]
    for setting, assembly in changed:
        run = _fastest(assembly, load, plan.repeats)
        rows.append(run.figures(load.name, streams, setting, plain))
    return rows


def _plain(off: Assembly, load: _Load, plan: Plan) -> Run:
    load.run(off, num_waves=1)  # nothing is cold in what is timed
    return _fastest(off, load, plan.repeats)


def _fastest(assembly: Assembly, load: _Load, repeats: int) -> Run:
    gc.collect()
    gc.freeze()  # as the engine's process does
    return min((load.run(assembly) for _ in range(repeats)), key=lambda run: run.seconds)


def _history(sequence: EngineSequence, tokens: Sequence[int]) -> list[int]:
    return known_history(sequence.prefix_length, sequence.prompt, tokens)
