"""Block sizes and policies next to plain decoding, on real and on synthetic requests.

The same requests run once plainly and once with each setting, and their tokens are compared. Real
requests are captions of images and questions about them, drafted by the engine's own proposer.
Synthetic requests are drafted by an oracle, right at known rates, from the plain run's tokens.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
from legato_engine.config import SPECULATION_OFF
from legato_engine.core.assembly import Assembly
from legato_engine.core.process import freeze_loaded
from legato_engine.errors import InvalidField
from legato_engine.kernels.proposer import UNKNOWN, Proposer
from legato_engine.sequence import Sequence as EngineSequence

from benchmarks.speculation.oracle import OracleProposer, known_history
from benchmarks.speculation.run import Figures, Run, with_settings
from benchmarks.speculation.workloads import (
    FEWEST,
    PROFILES,
    REAL,
    at_once,
    cache_for,
    rates_of,
    real_requests,
    sample_images,
    synthetic_requests,
    text_requests,
)

SETTINGS = ("fixed:1", "fixed:2", "fixed:4", "fixed:8", "seed", "budget")
WORKLOADS = (REAL, *PROFILES)


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """A workload: a factory of fresh requests, run `at_once` together (0: all)."""

    name: str
    make: Callable[[], list[EngineSequence]]
    at_once: int

    def run(self, assembly: Assembly, num_waves: int = 0) -> Run:
        requests = self.make()
        few = num_waves * self.at_once or len(requests)
        return Run(assembly, requests[:few], self.at_once)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; the fastest of `repeats` runs counts.

    `length` is that of synthetic answers, `context` the position of their first token (0: after the
    prompt). At least `fewest` requests run, in waves of as many as there are streams. `workloads`
    are `REAL` and names of `PROFILES`. `texts` are prompts by the names of further workloads, whose
    answers have at most `length` tokens.
    """

    streams: Sequence[int]
    length: int
    repeats: int
    settings: Sequence[str] = SETTINGS
    workloads: Sequence[str] = WORKLOADS
    context: int = 0
    fewest: int = FEWEST
    texts: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


def measure(assembly: Assembly, plan: Plan) -> list[Figures]:
    """Measure every workload and setting, plain decoding first.

    Raises:
        InvalidField: a setting or workload is unknown.
    """
    unknown = [name for name in plan.workloads if name not in (*WORKLOADS, *plan.texts)]
    if unknown:
        known = ", ".join((*WORKLOADS, *plan.texts))
        raise InvalidField(f"unknown workload {unknown[0]!r}; there are {known}", field="workloads")
    rows: list[Figures] = []
    for streams in plan.streams:
        config = msgspec.structs.replace(assembly.config, max_running=streams)
        some = dataclasses.replace(assembly, config=config)
        off = with_settings(some, speculation=SPECULATION_OFF)
        try:
            rows += _real(off, plan)
            rows += _synthetic(off, plan)
            rows += _texts(off, plan)
        finally:
            gc.unfreeze()
    return rows


def _real(off: Assembly, plan: Plan) -> list[Figures]:
    if REAL not in plan.workloads:
        return []
    make = partial(real_requests, off, sample_images(off))
    changed = ((setting, with_settings(off, speculation=setting)) for setting in plan.settings)
    load = _Load(REAL, make, 1 if off.config.max_running == 1 else 0)
    return _compare(off, _plain(off, load, plan), load, changed, plan)


def _texts(off: Assembly, plan: Plan) -> list[Figures]:
    """Real prompts, one stream at a time or all at once, with the engine's own proposer."""
    if not plan.texts:
        return []
    speculative = {setting: with_settings(off, speculation=setting) for setting in plan.settings}
    rows: list[Figures] = []
    for name, prompts in plan.texts.items():
        make = partial(text_requests, off, prompts, length=plan.length)
        load = _Load(name, make, 1 if off.config.max_running == 1 else 0)
        rows += _compare(off, _plain(off, load, plan), load, speculative.items(), plan)
    return rows


def _synthetic(off: Assembly, plan: Plan) -> list[Figures]:
    """Run the profiles with every setting; one oracle learns each profile's tokens in turn."""
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
    oracle, proposer = oracle_for(off, capacity=(most, off.model.max_context))
    speculative = {
        setting: with_settings(off, proposer, speculation=setting) for setting in plan.settings
    }
    rows: list[Figures] = []
    for load in loads:
        profile, requests = PROFILES[load.name], load.make()
        cramped = cache_for(off, profile, requests)
        plain = _plain(cramped, load, plan)
        known = list(map(_history, plain.sequences, plain.tokens))
        oracle.know(known, rates=rates_of(profile, requests))
        changed = (
            (setting, cache_for(each, profile, requests)) for setting, each in speculative.items()
        )
        rows += _compare(cramped, plain, load, changed, plan)
    return rows


def oracle_for(assembly: Assembly, capacity: tuple[int, int]) -> tuple[OracleProposer, Proposer]:
    """Make an oracle without known sequences, and its proposer for this device."""
    on = assembly.device.torch_device
    vocab_size = assembly.model.vocab_size
    oracle = OracleProposer([[UNKNOWN]], on, rates=[1.0], vocab_size=vocab_size, capacity=capacity)
    if on.type != "cuda":
        return oracle, oracle
    from benchmarks.speculation.oracle_kernel import OracleKernel

    return oracle, OracleKernel(*oracle.tables)


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
    load.run(off, num_waves=1)  # warm-up
    return _fastest(off, load, plan.repeats)


def _fastest(assembly: Assembly, load: _Load, repeats: int) -> Run:
    freeze_loaded()
    return min((load.run(assembly) for _ in range(repeats)), key=lambda run: run.seconds)


def _history(sequence: EngineSequence, tokens: Sequence[int]) -> list[int]:
    return known_history(sequence.prefix_length, sequence.prompt, tokens)
