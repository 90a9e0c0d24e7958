"""The record of a comparison: tables, and whether it passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import record

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
