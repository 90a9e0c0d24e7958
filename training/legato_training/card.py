"""Fill the model card: ``python -m legato_training.card --out MODEL_CARD.md``.

Numbers come from the metrics and the log of a run, the rest from MODEL_CARD.md.in.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from legato_training.config import ModelConfig
from legato_training.lexicon import lexicon
from legato_training.model import LegatoTiny
from legato_training.vocabulary import ROOT

TRAINED, UNSEEN, THIN = "trained art", "twemoji", "openmoji"
TITLES = {TRAINED: "trained art", UNSEEN: "Twemoji (unseen)", THIN: "OpenMoji (unseen)"}
FEWEST = 5
GOOD, BAD = 0.9, 0.5
BATCH = 768
WIDTH = 118


@dataclass(frozen=True)
class Row:
    """A metric's line in the table, and its aims on trained and on unseen art."""

    key: str
    title: str
    trained_aim: float | None = None
    unseen_aim: float | None = None
    at_most: bool = False

    def aim(self, group: str) -> float | None:
        return self.trained_aim if group == TRAINED else self.unseen_aim

    def gap(self, metrics: dict[str, Any], group: str) -> float:
        """By how much the aim is missed, 0 when it is met."""
        aim = self.aim(group)
        if aim is None:
            return 0.0
        over: float = metrics[group][self.key] - aim
        return max(0.0, over if self.at_most else -over)


ROWS = (
    Row("detect_f1", "detection F1", 0.92, 0.80),
    Row("detect_f1_small", "of them small"),
    Row("detect_f1_middle", "of them middle"),
    Row("detect_f1_large", "of them large"),
    Row("point_hit", "points", 0.95, 0.85),
    Row("invented", "boxes invented", 0.04, 0.04, at_most=True),
    Row("count_to_5", "counting to five", 0.80, 0.80),
    Row("segment_iou", "segment IoU", 0.70, 0.70),
    Row("caption_noun_f1", "caption noun F1", 0.85, 0.85),
)


def aim_text(row: Row) -> str:
    """Format the aims as the table shows them."""
    if row.trained_aim is None:
        return ""
    if row.at_most:
        return f"at most {row.trained_aim:.2f}"
    if row.trained_aim == row.unseen_aim:
        return f"{row.trained_aim:.2f}"
    return f"{row.trained_aim:.2f} / {row.unseen_aim:.2f}"


def table(metrics: dict[str, Any]) -> str:
    """Every metric beside its aim; a missed one is bold."""
    lines = [
        "| | aim | " + " | ".join(TITLES.values()) + " |",
        "| --- | --- |" + " --- |" * len(TITLES),
    ]
    for row in ROWS:
        shown = [
            ("**{:.3f}**" if row.gap(metrics, group) else "{:.3f}").format(metrics[group][row.key])
            for group in TITLES
        ]
        lines.append(f"| {row.title} | {aim_text(row)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def missed(metrics: dict[str, Any]) -> str:
    """List the missed aims of each column, with what lacks."""
    lines = []
    for group, title in TITLES.items():
        gaps = [(row.title, row.gap(metrics, group)) for row in ROWS]
        texts = [f"{name} by {gap:.3f}" for name, gap in gaps if gap]
        line = f"- {title}: {', '.join(texts) if texts else 'none'}."
        lines.append(fill(line, WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def parameter_count() -> str:
    """Trained parameters, in millions."""
    with torch.device("meta"):
        model = LegatoTiny(ModelConfig())
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M"


def known(metrics: dict[str, Any]) -> dict[str, float]:
    """F1 of each noun asked often enough, worst first."""
    scores = metrics[UNSEEN]["per_noun"].items()
    asked = {name: f1 for name, (f1, truth) in scores if truth >= FEWEST and name in drawn_nouns()}
    return dict(sorted(asked.items(), key=lambda pair: pair[1]))


def drawn_nouns() -> set[str]:
    """Names of the kinds that are drawings, not shapes."""
    book = lexicon()
    return {kind.names[0] for kind in book.kinds[: book.num_nouns]}


def drawings_alone(metrics: dict[str, Any], group: str) -> tuple[float, float]:
    """Mean F1 over drawn nouns by objects asked about, and the share of shapes among these."""
    nouns, scores = drawn_nouns(), metrics[group]["per_noun"]
    drawn = [(f1, truth) for name, (f1, truth) in scores.items() if name in nouns]
    objects = sum(truth for _, truth in drawn)
    everything = sum(truth for _, truth in scores.values())
    return sum(f1 * truth for f1, truth in drawn) / objects, 1 - objects / everything


def listing(scores: dict[str, float], names: list[str]) -> str:
    """``dog 0.98, cat 0.97``."""
    return fill(", ".join(f"{name} {scores[name]:.2f}" for name in names), WIDTH)


def run_fields(log: str) -> dict[str, str]:
    """Read steps, images and speed of the run from its log."""
    ended = re.search(r"trained (\d+) steps", log)
    assert ended is not None, "the log is of a run that has not ended"
    steps = int(ended.group(1))
    rates = sorted(int(rate) for rate in re.findall(r"images/s (\d+)", log))
    return {
        "STEPS": f"{steps:,}",
        "IMAGES": f"{steps * BATCH / 1e6:.2f}",
        "RATE": f"{round(rates[len(rates) // 2], -1):,}",
    }


def confidence_fields(measured: dict[str, Any]) -> dict[str, str]:
    """Format what the confidences are worth on held-out scenes."""
    lines = [
        "| | objects found | right | ranks right above wrong | ECE before | ECE after | ships |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    skills = measured["skills"]
    for skill, each in skills.items():
        shares = (f"{x:.3f}" for x in (each["right"] / each["objects"], each["auroc"]))
        errors = (f"{each[n]:.4f} ± {each[f'{n}_error']:.4f}" for n in ("ece_before", "ece_after"))
        ships = "yes" if each["ships"] else "no"
        cells = [skill, str(each["objects"]), *shares, *errors, ships]
        lines.append(f"| {' | '.join(cells)} |")
    boxes, outlines = measured["boxes"], skills["segment"]
    shown = (outlines["shown_ece_before"], outlines["shown_ece_after"])
    return {
        "CONFIDENCE": "\n".join(lines),
        "AP": f"{boxes['AP']:.3f} ({boxes['AP50']:.3f} at IoU 0.5, {boxes['AP75']:.3f} at 0.75)",
        "BOX_F1": f"{boxes['F1']:.3f}",
        "FIT_SCENES": f"{measured['fit_pictures']:,}",
        "HELD_OUT": f"{measured['pictures']:,}",
        "ABSENT": f"{1 - outlines['shown_objects'] / outlines['objects']:.0%}",
        "SHOWN": "{:.3f} before the fit and {:.3f} after it".format(*shown),
    }


def fields(metrics: dict[str, Any], log: str) -> dict[str, str]:
    """Return the text for each @NAME@."""
    scores = known(metrics)
    names = list(scores)
    alone = {group: drawings_alone(metrics, group) for group in (UNSEEN, THIN)}
    return run_fields(log) | {
        "PARAMETERS": parameter_count(),
        "TABLE": table(metrics),
        "MISSED": missed(metrics),
        "SHARE": f"{alone[UNSEEN][1]:.0%}",
        "DRAWINGS": f"{alone[UNSEEN][0]:.2f} (Twemoji) and {alone[THIN][0]:.2f} (OpenMoji)",
        "WORST": listing(scores, names[:16]),
        "KNOWN": str(len(names)),
        "GOOD": str(sum(f1 >= GOOD for f1 in scores.values())),
        "BAD": str(sum(f1 < BAD for f1 in scores.values())),
        "RECALL": f"{metrics[UNSEEN]['detect_recall']:.2f}",
        "PRECISION": f"{metrics[UNSEEN]['detect_precision']:.2f}",
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics", type=Path, default=ROOT / "results/metrics.json")
    parser.add_argument("--confidence", type=Path, default=ROOT / "results/confidence.json")
    parser.add_argument("--log", type=Path, default=ROOT / "results/training.log")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    text = (ROOT / "MODEL_CARD.md.in").read_text()
    metrics = json.loads(options.metrics.read_text())
    measured = json.loads(options.confidence.read_text())
    filled = fields(metrics, options.log.read_text()) | confidence_fields(measured)
    for name, value in filled.items():
        text = text.replace(f"@{name}@", value)
    options.out.write_text(text)


if __name__ == "__main__":
    main()
