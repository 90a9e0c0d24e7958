"""Two answers to one case, side by side: numbers of every forward, then tokens and values.

A relative error is the largest difference over the largest expected magnitude, of one tensor.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from legato_engine.types import (
    CaptionOutput,
    DetectOutput,
    FinishReason,
    PointOutput,
    QueryOutput,
    TaskOutput,
)

from benchmarks import record
from benchmarks.reference.cases import Case
from benchmarks.reference.checkout import ANSWER, COORD, EOS, SIZE
from benchmarks.reference.ours import Answer
from benchmarks.reference.theirs import Token, Trace

_BINS = {COORD: 1024, SIZE: 1024}


class Errors:
    """Relative errors by stage."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}

    def add(self, stage: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compare two tensors of one shape."""
        assert ours.shape == theirs.shape, f"{stage}: {ours.shape} and {theirs.shape}"
        ours, theirs = ours.double(), theirs.double()
        self._seen.setdefault(stage, []).append(
            ((ours - theirs).abs().max() / theirs.abs().max()).item()
        )

    def figures(self) -> dict[str, dict[str, float]]:
        """Return by stage: number of tensors, the largest error, the mean one."""
        return {
            stage: {"tensors": len(all_), "max": max(all_), "mean": sum(all_) / len(all_)}
            for stage, all_ in self._seen.items()
        }


@dataclasses.dataclass(slots=True)
class Score:
    """Counts of equal tokens and values of one skill."""

    cases: int = 0
    tokens: int = 0
    equal: int = 0  # cases whose tokens are all the same
    ended: int = 0  # cases that the engine ended before its budget did
    same_prompt: int = 0
    whole: int = 0  # cases with the same tokens, all of the engine's compared
    same_text: int = 0  # of those
    values: int = 0  # coordinates and sizes of cases with equal ids
    value_error: float = 0.0
    box_error: float = 0.0
    agreed: int = 0  # tokens up to the first that differs
    changed: Counter[str] = dataclasses.field(default_factory=Counter)
    unchanged: int = 0  # cases in which no rule changed a token
    differing: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, case: Case, trace: Trace, answer: Answer, max_tokens: int) -> None:
        """Add one case."""
        theirs, ours = comparable(trace, answer, max_tokens)
        agreed = _agreed(theirs, ours)
        self.cases += 1
        self.tokens += len(theirs)
        self.agreed += agreed
        self.changed.update(trace.changed)
        self.unchanged += not trace.changed
        self.ended += answer.finish_reason is not FinishReason.LENGTH
        self.same_prompt += tuple(t for t, _ in answer.prompt) == prompt_ids(trace, case)
        if agreed < max(len(theirs), len(ours)):
            self._differs(case, theirs, ours, agreed)
            return
        self.equal += 1
        if len(ours) >= len(answer.tokens) - 1:
            self.whole += 1
            self.same_text += (shown(trace.thoughts), shown(trace.text)) == _texts(answer.result)
        for (token, expected), (_, given) in zip(theirs, ours, strict=True):
            if token in _BINS:
                self.values += 1
                pairs = zip(expected, given, strict=True)
                self.value_error = max(self.value_error, *(abs(a - b) for a, b in pairs))
        self.box_error = max(self.box_error, box_error(trace, answer.result))

    def _differs(self, case: Case, theirs: list[Token], ours: list[Token], at: int) -> None:
        self.differing.append(
            {
                "size": case.size,
                "at": at,
                "reference": theirs[at : at + 3],
                "legato": ours[at : at + 3],
            }
        )

    def figures(self) -> dict[str, Any]:
        """Return all counts, with the first five cases that differ."""
        figures = dataclasses.asdict(self)
        return {**figures, "changed": dict(self.changed), "differing": self.differing[:5]}


def comparable(trace: Trace, answer: Answer, max_tokens: int) -> tuple[list[Token], list[Token]]:
    """Return the tokens of both sides that mean the same.

    The engine's EOS is dropped, because the reference does not feed it back. The reference gives
    reasoning and answer a budget each, the engine one to both: tokens after the end of a budget are
    left out.
    """
    theirs, ours = trace.tokens, list(answer.tokens)
    if ours and ours[-1][0] == EOS:
        ours.pop()
    ids = [token for token, _ in theirs]
    thoughts = ids.index(ANSWER) if ANSWER in ids else 0  # no answer holds one
    if thoughts >= max_tokens:
        return theirs[:max_tokens], ours[:max_tokens]
    if max_tokens in (len(trace.passes) - 1, len(trace.passes) - thoughts - 2):
        ours = ours[: len(theirs)]  # the reference's last budget is used up
    return theirs, ours


def prompt_ids(trace: Trace, case: Case) -> tuple[int, ...]:
    """Return the ids of the reference's first prompt, with BOS if there is no image."""
    ids = tuple(token for token, _ in trace.passes[0].fed)
    return ids if case.size is not None else ids[1:]


def box_error(trace: Trace, result: TaskOutput) -> float:
    """Return the largest difference of coordinates of points or boxes, theirs cut to the image."""
    match result:
        case PointOutput():
            given = [{"x": each.point.x, "y": each.point.y} for each in result.points]
        case DetectOutput():
            names = ("x_min", "y_min", "x_max", "y_max")
            given = [{name: getattr(each.box, name) for name in names} for each in result.objects]
        case _:
            return 0.0
    if len(given) != len(trace.objects):
        return math.inf
    pairs = zip(given, trace.objects, strict=True)
    return max(
        (
            abs(value - min(1.0, max(0.0, expected[name])))
            for ours, expected in pairs
            for name, value in ours.items()
        ),
        default=0.0,
    )


def bins_apart(token: int, ours: tuple[float, float], theirs: tuple[float, float]) -> int:
    """Return by how many bins two values of a coordinate or size token differ."""
    if token == COORD:
        return round(abs(ours[0] - theirs[0]) * _BINS[COORD])
    apart = (abs(math.log2(a) - math.log2(b)) for a, b in zip(ours, theirs, strict=True))
    return round(max(apart) / 10 * (_BINS[SIZE] - 1))


def _agreed(theirs: list[Token], ours: list[Token]) -> int:
    for at, ((one, _), (other, _)) in enumerate(zip(theirs, ours, strict=False)):
        if one != other:
            return at
    return min(len(theirs), len(ours))


def shown(text: str) -> str:
    """Format text as the engine does: from the first word, without partial characters."""
    return text.replace("\ufffd", "").lstrip()


def _texts(result: TaskOutput) -> tuple[str, str]:
    """Return reasoning and answer."""
    match result:
        case CaptionOutput():
            return "", result.caption
        case QueryOutput():
            return result.reasoning or "", result.answer
        case _:
            return "", ""


# ---------------------------------------------------------------- report
# The record of a comparison: tables, and whether it passes.


LIMIT = 1e-4  # of a relative error in float32

_EXPLAINED = (
    "Both sides load the same file of random weights. The head's bias lifts a few ids (below), so "
    "that skills produce results. Hidden states and logits: the reference's tokens are fed to both "
    "sides (largest difference over largest magnitude). Tokens: the engine answers by itself, "
    "eight prompts at a time, two launches in flight; what is behind the reference's budget is "
    "left out. "
    "In float32 the crops of images are the same to the byte. `figures` has more columns."
)


def passes(name: str, run: Mapping[str, Any]) -> bool:
    """Say whether float32 is within the limit with equal tokens and values; bfloat16 passes."""
    if not name.endswith("f32"):
        return True
    skills = run["skills"].values()
    return (
        all(error["max"] <= LIMIT for error in run["errors"].values())
        and all(skill["equal"] == skill["same_prompt"] == skill["cases"] for skill in skills)
        and all(max(skill["value_error"], skill["box_error"]) < 1e-6 for skill in skills)
        and set(run["bins_apart"]) <= {"0"}
    )


def _verdict(name: str, run: Mapping[str, Any]) -> str:
    if not name.endswith("f32"):
        return "statistics"
    return "passes" if passes(name, run) else "FAILS"


def tables(facts: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    """Format all runs so far as Markdown."""
    lines = [_EXPLAINED, ""]
    for name, run in runs.items():
        layers = run["layers"]
        lines += [
            f"## {name}: {_verdict(name, run)}",
            "",
            f"{run['prompts']} prompts, {len(run['sizes'])} sizes of images, {layers['vision']} "
            f"vision and {layers['text']} text layers, {run['crops']} crops, {run['seconds']} s. "
            f"{run['different_answers']} answers are different. "
            f"The likeliest token of a forward is the same in {run['same_best_token']:.2%}; "
            f"coordinates and sizes differ by (bins: how often) {run['bins_apart']}.",
            "",
            _errors(run["errors"]),
            "",
            _skills(run["skills"]),
            "",
        ]
    return [*lines, *_rules(facts, runs)]


def _errors(errors: Mapping[str, Any]) -> str:
    rows = [
        (stage, error["tensors"], f"{error['max']:.1e}", f"{error['mean']:.1e}")
        for stage, error in errors.items()
    ]
    return record.table(("relative error", "tensors", "largest", "mean"), rows)


def _skills(skills: Mapping[str, Any]) -> str:
    heads = (
        "skill",
        "prompts",
        "same ids in",
        "tokens",
        "agree up to the first difference",
        "uncut",
        "of these with the same text",
        "largest difference",
    )
    rows = [
        (
            name,
            skill["cases"],
            skill["equal"],
            skill["tokens"],
            f"{skill['agreed'] / max(1, skill['tokens']):.1%}",
            skill["whole"],
            skill["same_text"],
            f"{skill['value_error']:.1e}",
        )
        for name, skill in skills.items()
    ]
    return record.table(heads, rows)


def _rules(facts: Mapping[str, Any], runs: Mapping[str, Any]) -> list[str]:
    changed: dict[str, int] = {}
    for run in runs.values():
        for skill in run["skills"].values():
            for rule, count in skill["changed"].items():
                changed[rule] = changed.get(rule, 0) + count
    rows = [(rule, text, changed.get(rule, "")) for rule, text in facts["rules"].items()]
    biases = [(name, bias) for name, bias in facts["biases"].items()]
    return [
        "## What the reference is held to",
        "",
        record.table(("rule", "the reference, and here", "changed a token"), rows),
        "",
        "## Biases of the head",
        "",
        record.table(("family", "added to the bias of these ids"), biases),
    ]
