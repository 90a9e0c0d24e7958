"""Answers by drafting steps, a launch for each or in loops, with drafts of known quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from legato_engine.config import SPECULATION_OFF
from legato_engine.core.assembly import Assembly
from legato_engine.kernels.proposer import Proposer
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.speculation import TokenBudgetPolicy

from benchmarks.decode.loops import Decodes, recorded
from benchmarks.speculation.oracle import OracleProposer, known_history
from benchmarks.speculation.report import oracle_for
from benchmarks.speculation.run import RecordedTask, with_settings

PATHS = ("graph", "loop")


class Paths(NamedTuple):
    """The same model by single steps and in loops, both with the same costs of steps."""

    graph: Assembly
    loop: Assembly


class Answers(NamedTuple):
    """Tokens and block sizes by request, and what ran."""

    tasks: list[RecordedTask]
    blocks: list[list[int]]
    run: Decodes

    @property
    def tokens(self) -> list[list[int]]:
        return [task.tokens for task in self.tasks]


def both_paths(
    assembly: Assembly,
    setting: str,
    proposer: Proposer | None = None,
    costs: TokenBudgetPolicy | None = None,
) -> Paths:
    """`budget` goes by `costs`, else by those that single steps have."""
    made = Paths(*(_on_path(assembly, path, setting, proposer) for path in PATHS))
    if setting == "budget":
        costs = costs or TokenBudgetPolicy(made.graph.runner.costs().table())
        for each in made:
            each.runner.set_costs(costs)
    return made


def _on_path(assembly: Assembly, path: str, setting: str, proposer: Proposer | None) -> Assembly:
    return with_settings(assembly, proposer, decode_path=path, speculation=setting)


def oracle(assembly: Assembly, most: int) -> tuple[OracleProposer, Proposer]:
    """One for up to `most` requests, which knows none yet."""
    return oracle_for(assembly, capacity=(most, assembly.model.max_context))


def teach(
    known_by: OracleProposer, asked: Sequence[EngineSequence], answers: Answers, rate: float
) -> None:
    """Let an oracle draft these answers, each token right at this rate."""
    known = [
        known_history(sequence.prefix_length, sequence.prompt, tokens)
        for sequence, tokens in zip(asked, answers.tokens, strict=True)
    ]
    known_by.know(known, rates=[rate])


def answer(
    assembly: Assembly, asked: Sequence[EngineSequence], lengths: Sequence[int], depth: int = 2
) -> Answers:
    """Run requests at once; with `lengths` the device foresees their ends."""
    tasks = recorded(asked)
    run = Decodes(assembly, at_once=len(asked), depth=depth)
    for sequence, task, length in zip(asked, tasks, lengths, strict=True):
        task.max_tokens = length
        run.scheduler.submit(sequence)
    run.scheduler.drain()
    blocks = [each.draft_stats.block_size_history for each in asked]
    return Answers(tasks, blocks, run)


def off(assembly: Assembly) -> Assembly:
    """Without speculation, by single steps."""
    return _on_path(assembly, "graph", SPECULATION_OFF, None)
