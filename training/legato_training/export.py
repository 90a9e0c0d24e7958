"""Checkpoint -> model.safetensors (bf16, averaged weights), config.json, tokenizer.json."""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from legato_training.config import ModelConfig, engine_config
from legato_training.model import LegatoTiny
from legato_training.vocabulary import TOKENIZER, Words


def export(checkpoint: Path, out: Path) -> None:
    """Write the three files the engine reads."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state["ema"].items()
    }
    save_file(
        weights, out / "model.safetensors", metadata={"format": "pt", "step": str(state["step"])}
    )
    words = Words()
    config = engine_config(
        ModelConfig(**state["model_config"]), words.templates(), words.untaught()
    )
    (out / "config.json").write_text(json.dumps(config) + "\n")
    shutil.copyfile(TOKENIZER, out / "tokenizer.json")


def load_exported(folder: Path) -> LegatoTiny:
    """Load the exported model in f32."""
    model = LegatoTiny(ModelConfig())
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.eval()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    export(options.checkpoint, options.out)
    print(f"{(options.out / 'model.safetensors').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
