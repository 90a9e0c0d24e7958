"""A tiny Moondream 3 whose text always says the same outline, and heads for its refiner.

The vision encoder has random weights. The decoder only looks up the next token: hidden states are
directions that stand for tokens and values.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.presets import tiny_random3_config
from legato_engine.models.moondream.refiner import MaskHead
from legato_engine.models.moondream.vision import normalised, patches
from legato_engine.models.moondream.weights import random_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.reference.moondream3.numerics import (
    Array,
    Weights,
    gelu_erf,
    layer_norm,
    linear,
    sigmoid,
    softmax,
    weight,
)
from tests.shared import made_once

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
    """Write a head that turns a box around something bright into its mask, trained once a run."""
    trained = made_once(
        "head.pt", lambda part: torch.save({"head": _learnt_head().state_dict()}, part)
    )
    shutil.copyfile(trained, path)


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


# ---------------------------------------------------------------- heads
# Random ones, and one trained in seconds.

DIM = 32
NUM_MASKS = 4
_STEPS = 60
_BATCH = 8
_RATE = 5e-3
DARK, BRIGHT = 40, 220


def random_head(config: MoondreamConfig, seed: int = 0, *, dim: int = DIM) -> MaskHead:
    """A random head for this configuration's vision encoder."""
    torch.manual_seed(seed)
    head = MaskHead(config.vision.dim, config.vision.grid, dim, NUM_MASKS)
    for name, parameter in head.named_parameters():
        if name.endswith("in_proj_weight"):
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
        elif name.endswith(("tokens", "token", "_pe")):
            torch.nn.init.normal_(parameter, std=0.5)
        elif name.endswith("in_proj_bias"):
            torch.nn.init.zeros_(parameter)
    return head.eval().requires_grad_(requires_grad=False)


def _learnt_head() -> MaskHead:
    vision = random_weights(config(), 0, torch.device("cpu"), torch.float32).vision
    head = random_head(config()).requires_grad_()
    settings, side = config().refiner, config().vision.crop_size
    assert settings is not None
    adam = torch.optim.Adam(head.parameters(), lr=_RATE)
    random = np.random.default_rng(0)
    with torch.inference_mode(mode=False):
        for step in range(_STEPS):
            for group in adam.param_groups:
                group["lr"] = _RATE * min(1, step / 20) * (1 - step / _STEPS)
            scenes = [_scene(random, side) for _ in range(_BATCH)]
            pixels, coarse, truth = (
                torch.from_numpy(np.stack(part)) for part in zip(*scenes, strict=True)
            )
            with torch.no_grad():
                fed = patches(normalised(pixels, torch.float32), config().vision.patch_size)
                early, late = vision.encode_tapped(fed, settings.early_block)
            mask = coarse.float()
            loss = torch.zeros(())
            for _ in range(2):
                logits, _ = head(head.fused(late, early), mask)
                wanted = truth.float()[:, None].expand_as(logits)
                loss = loss + F.binary_cross_entropy_with_logits(logits, wanted)
                mask = logits[:, 0].detach().sigmoid()
            adam.zero_grad()
            loss.backward()
            adam.step()
    return head.requires_grad_(requires_grad=False)


def _scene(random: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels, the mask of a box, and the mask of the bright ellipse or bar in it."""
    centre = random.uniform(0.42, 0.58, 2)
    extent = random.uniform(0.24, 0.36, 2)
    y, x = (np.mgrid[:side, :side] + 0.5) / side
    u, v = (x - centre[0]) / extent[0], (y - centre[1]) / extent[1]
    box = np.maximum(abs(u), abs(v)) < 1
    truth = u * u + v * v < 1 if random.random() < 0.7 else abs(u) + abs(v) < 1
    noise = random.normal(0, 8, (side, side, 3))
    pixels = np.where(truth[..., None], BRIGHT, DARK) + noise
    return pixels.clip(0, 255).astype(np.uint8), box, truth


# ---------------------------------------------------------------- reference head
# The refiner's head in float64, one crop at a time, by the published tensor names.
#
# Shape legend: C channels, Y and X rows and columns of a map, T cells or tokens, D width.

_HEADS, _GROWN_HEADS, _BLOCKS = 8, 4, 2
_MASK_GROUPS = (1, 8, 16, 32)
_FUSED_GROUPS = 32


def refine(weights: Weights, late_TD: Array, early_TD: Array, mask_YX: Array, times: int) -> Array:
    """[Y, X] in 0..1: repeatedly the mask with the highest predicted IoU."""
    for _ in range(times):
        masks, ratings = masks_of(weights, late_TD, early_TD, mask_YX)
        mask_YX = sigmoid(masks[int(np.argmax(ratings))])
    return mask_YX


def masks_of(
    weights: Weights, late_TD: Array, early_TD: Array, mask_YX: Array
) -> tuple[Array, Array]:
    """Logits of all masks at the size of the given one, and their predicted IoU."""
    grid = weights["image_pe"].shape[-1]
    late = _conv(weights, "image_proj", _map(late_TD, grid))
    early = linear(early_TD, weights, "hq_fusion.early_proj.0")
    early = gelu_erf(layer_norm(early, weights, "hq_fusion.early_proj.1"))
    image = np.concatenate([_map(early, grid), late])
    for index, padding in ((0, 0), (3, 1)):
        image = _conv(weights, f"hq_fusion.fusion.{index}", image, padding=padding)
        name = f"hq_fusion.fusion.{index + 1}"
        image = gelu_erf(_group_norm(weights, name, image, _FUSED_GROUPS))
    hint = mask_YX[None]
    for number, groups in enumerate(_MASK_GROUPS, start=1):
        hint = _conv(weights, f"mask_encoder.conv{number}.0", hint, stride=2, padding=1)
        name = f"mask_encoder.conv{number}.1"
        hint = gelu_erf(_group_norm(weights, name, hint, min(groups, len(hint))))
    return _decode(weights, image + _resized(hint, (grid, grid)), mask_YX.shape)


def _decode(weights: Weights, image: Array, size: tuple[int, ...]) -> tuple[Array, Array]:
    places, where = _tokens(image), _tokens(weight(weights, "image_pe")[0])
    tokens = np.concatenate([weight(weights, "mask_tokens"), weight(weights, "iou_token")])
    own = weight(weights, "output_pe")
    for index in range(_BLOCKS):
        name = f"transformer_blocks.{index}."
        seen = _attend(weights, name + "output_self_attn", tokens + own, tokens + own, tokens)
        tokens = layer_norm(tokens + seen, weights, name + "norm1")
        looking = name + "cross_attn_token_to_image"
        seen = _attend(weights, looking, tokens + own, places + where, places)
        tokens = layer_norm(tokens + seen, weights, name + "norm2")
        thought = _mlp(weights, name + "mlp", tokens, 2)
        tokens = layer_norm(tokens + thought, weights, name + "norm3")
        looking = name + "cross_attn_image_to_token"
        seen = _attend(weights, looking, places + where, tokens + own, tokens)
        places = layer_norm(places + seen, weights, name + "norm4")
    seen = _attend(weights, "final_token_to_image", tokens + own, places + where, places)
    tokens = layer_norm(tokens + seen, weights, "final_norm")
    grown = _map(places, image.shape[-1])
    for index in (0, 6, 12):
        grown = _doubled(weights, f"upsample.{index}", grown)
        grown = gelu_erf(_channel_norm(weights, f"upsample.{index + 1}.norm", grown))
        grown = _conv(weights, f"upsample.{index + 3}", grown, padding=1)
        grown = gelu_erf(_channel_norm(weights, f"upsample.{index + 4}.norm", grown))
    queries = linear(tokens[:-1], weights, "final_q_proj")
    asking = layer_norm(queries, weights, "final_norm_up")
    flat = _tokens(grown)
    queries = queries + _attend(weights, "final_attn_up", asking, flat, flat, _GROWN_HEADS)
    logits = [
        np.einsum("c,cyx->yx", _mlp(weights, f"mask_mlps.{index}", query, 3), grown)
        for index, query in enumerate(queries)
    ]
    return _resized(np.stack(logits), size), _mlp(weights, "iou_head", tokens[-1], 3)


def _map(x_TD: Array, side: int) -> Array:
    return x_TD.reshape(side, side, -1).transpose(2, 0, 1)


def _tokens(x_CYX: Array) -> Array:
    return x_CYX.reshape(len(x_CYX), -1).T


def _mlp(weights: Weights, name: str, x: Array, layers: int) -> Array:
    for index in range(layers):
        x = linear(gelu_erf(x) if index else x, weights, f"{name}.{2 * index}")
    return x


def _channel_norm(weights: Weights, name: str, x_CYX: Array) -> Array:
    return layer_norm(x_CYX.transpose(1, 2, 0), weights, name).transpose(2, 0, 1)


def _group_norm(weights: Weights, name: str, x_CYX: Array, groups: int) -> Array:
    parts = x_CYX.reshape(groups, -1)
    centred = parts - parts.mean(axis=1, keepdims=True)
    parts = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    gain, shift = weight(weights, f"{name}.weight"), weight(weights, f"{name}.bias")
    return parts.reshape(x_CYX.shape) * gain[:, None, None] + shift[:, None, None]


def _attend(
    weights: Weights, name: str, query: Array, key: Array, value: Array, heads: int = _HEADS
) -> Array:
    matrices = np.split(weight(weights, f"{name}.in_proj_weight"), 3)
    shifts = np.split(weight(weights, f"{name}.in_proj_bias"), 3)
    parts = [
        (x @ matrix.T + shift).reshape(len(x), heads, -1)
        for x, matrix, shift in zip((query, key, value), matrices, shifts, strict=True)
    ]
    scores = np.einsum("qhd,khd->hqk", parts[0], parts[1]) / np.sqrt(parts[0].shape[-1])
    seen = np.einsum("hqk,khd->qhd", softmax(scores), parts[2])
    return linear(seen.reshape(len(query), -1), weights, name + ".out_proj")


def _conv(weights: Weights, name: str, x: Array, *, stride: int = 1, padding: int = 0) -> Array:
    kernel = weight(weights, f"{name}.weight")
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding)))
    size = [(side - kernel.shape[-1]) // stride + 1 for side in padded.shape[1:]]
    out = np.zeros((len(kernel), *size))
    for dy, dx in np.ndindex(*kernel.shape[2:]):
        window = padded[:, dy : dy + stride * size[0] : stride, dx : dx + stride * size[1] : stride]
        out += np.einsum("oc,cyx->oyx", kernel[:, :, dy, dx], window)
    return out + weight(weights, f"{name}.bias")[:, None, None]


def _doubled(weights: Weights, name: str, x: Array) -> Array:
    """A transposed convolution: every cell becomes two by two."""
    blocks = np.einsum("cyx,coij->oyixj", x, weight(weights, f"{name}.weight"))
    shape = (blocks.shape[0], 2 * x.shape[1], 2 * x.shape[2])
    return blocks.reshape(shape) + weight(weights, f"{name}.bias")[:, None, None]


def _resized(x_CYX: Array, size: tuple[int, ...]) -> Array:
    """Linear interpolation between centres."""
    rows, columns = (
        _weights_between(old, new) for old, new in zip(x_CYX.shape[1:], size, strict=True)
    )
    return np.einsum("ay,cyx,bx->cab", rows, x_CYX, columns)


def _weights_between(old: int, new: int) -> Array:
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))
