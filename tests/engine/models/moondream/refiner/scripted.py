"""A tiny Moondream 3 whose text always says the same outline.

The vision encoder has random weights. The decoder only looks up the next token: hidden states are
directions that stand for tokens and values.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from pathlib import Path

import msgspec
import torch
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.presets import tiny_random3_config
from legato_engine.models.moondream.weights import random_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.engine.models.moondream.refiner.heads import write_learnt_head

CENTRE = (0.5, 0.375)
EXTENT = (0.4, 0.6)
NUMBERS = ("20", "25", "940", "30", "935", "930", "35", "945")
WORDS = ("M", *NUMBERS[:2], "L", *NUMBERS[2:], "Z")
PATH = "M 0.021,0.026 L 0.979,0.031 0.974,0.969 0.036,0.984 Z"
_VOCABULARY = 360
_BINS = 1024
_LOUD = 10.0


@functools.cache
def config() -> MoondreamConfig:
    """The tiny Moondream 3 with a larger vocabulary."""
    tiny = tiny_random3_config()
    text = msgspec.structs.replace(tiny.text, vocab_size=_VOCABULARY)
    return msgspec.structs.replace(tiny, text=text)


def write_model(folder: Path) -> None:
    """Write its folder: config.json, tokenizer.json, model.safetensors."""
    (folder / "config.json").write_text(json.dumps(msgspec.to_builtins(config())))
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    words = [vocabulary[f"Ġ{word}"] for word in WORDS]
    save_file(_weights(words), folder / "model.safetensors")


def write_head(path: Path) -> None:
    """Write a head trained for that model's vision encoder to find what is bright."""
    network = random_weights(config(), 0, torch.device("cpu"), torch.float32)
    write_learnt_head(path, "scripted", config(), network.vision)


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[f"<|{index}|>" for index in range(21)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f" {word}" for word in WORDS] * 9, trainer)
    return tokenizer


def _weights(words: list[int]) -> dict[str, torch.Tensor]:
    """`answer`, two coords, a size, the words and `eos`, each after the one before."""
    tokens, region = config().tokens, config().region
    state = random_weights(config(), 0, torch.device("cpu"), torch.float32).state_dict()
    for name, tensor in state.items():
        if re.search(r"^text.*(attn\.proj|mlp\.fc2)|^text\.(wte|lm_head)|coder", name):
            tensor.zero_()
        if re.search(r"^(text\.post_ln|region\.ln)", name):
            tensor.fill_(float(name.endswith("weight")))
    state["text.wte"].uniform_(-0.01, 0.01, generator=torch.Generator().manual_seed(0))
    chain = [tokens.answer, "x", "y", "size", *words, tokens.eos]
    direction = {step: torch.eye(config().text.dim)[n] for n, step in enumerate(chain)}
    said = {"x": tokens.coord, "y": tokens.coord, "size": tokens.size}
    for before, step in itertools.pairwise(chain):
        token = said.get(step, step) if isinstance(step, str) else step
        state["text.lm_head.weight"][token] += _LOUD * direction[before]
    for token in (tokens.answer, *words):
        state["text.wte"][token] = direction[token]
    bins = [round(value * region.coord_bins) for value in CENTRE]
    for place, before in zip(bins, (tokens.answer, "x"), strict=True):
        state["region.coord_decoder.weight"][place] = _LOUD * direction[before]
    for axis, extent in enumerate(EXTENT):
        place = round((math.log2(extent) + 10) / 10 * (_BINS - 1))
        state["region.size_decoder.weight"][axis * _BINS + place] = _LOUD * direction["y"]
    phases = torch.tensor([[2 * math.pi * place / _BINS] for place in bins])
    phases = phases @ state["region.coord_features"]
    seen = torch.cat([phases.cos(), phases.sin()], dim=1)
    wanted = torch.stack([direction["x"], direction["y"]])
    state["region.coord_encoder.weight"].copy_((torch.linalg.pinv(seen) @ wanted).T)
    state["region.size_encoder.bias"].copy_(direction["size"])
    return state
