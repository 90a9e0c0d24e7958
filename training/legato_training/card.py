"""Fill the model card from metrics: ``python -m legato_training.card --metrics metrics.json --out MODEL_CARD.md``."""

import argparse
import json
from pathlib import Path

import torch

from legato_training.config import ModelConfig
from legato_training.evaluate import table
from legato_training.model import LegatoTiny
from legato_training.vocabulary import ROOT

UNSEEN = "twemoji"
FEWEST = 5


def parameter_count() -> str:
    """Trained parameters, in millions."""
    with torch.device("meta"):
        model = LegatoTiny(ModelConfig())
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M"


def extremes(metrics: dict, worst: bool, count: int = 12) -> str:
    """Nouns with the highest or lowest F1 among those asked often enough."""
    asked = {
        name: score
        for name, (score, truth) in metrics[UNSEEN]["per_noun"].items()
        if truth >= FEWEST
    }
    ranked = sorted(asked, key=lambda name: asked[name], reverse=not worst)[:count]
    return ", ".join(f"{name} {asked[name]:.2f}" for name in ranked)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    metrics = json.loads(options.metrics.read_text())
    text = (ROOT / "MODEL_CARD.md.in").read_text()
    fields = {
        "PARAMETERS": parameter_count(),
        "TABLE": table(metrics),
        "BEST": extremes(metrics, False),
        "WORST": extremes(metrics, True),
    }
    for name, value in fields.items():
        text = text.replace(f"@{name}@", value)
    options.out.write_text(text)


if __name__ == "__main__":
    main()
