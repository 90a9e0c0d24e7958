"""Configuration of Qwen3-VL, read from config.json and preprocessor_config.json."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from pathlib import Path
from typing import Any

from legato_engine.models.decoder.config import (
    DecoderConfig,
    HubConfig,
    check_sizes,
    decoder_config,
    head_plan,
    read_json,
    refusal,
    refuse_others,
)

_PREPROCESSOR = "preprocessor_config.json"
_MAX_SIZES = {
    "depth": 2**10,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_heads": 2**12,
    "patch_size": 2**8,
    "spatial_merge_size": 2**4,
    "num_position_embeddings": 2**20,
}
"""Sizes of the vision tower, which are at least 1 and at most so large."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """Sizes of the vision tower and of the images that it reads.

    `taps`: the blocks whose results go to the first layers of the text model (deepstack).
    `min_pixels` and `max_pixels` of an image once it is resized; `mean` and `std` of its channels.
    """

    dim: int
    ff_dim: int
    num_layers: int
    num_heads: int
    grid: int  # learned positions on a side
    taps: tuple[int, ...]
    patch_size: int = 16
    merge: int = 2  # patches on a side of a token
    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def side(self) -> int:
        """Return the pixels on a side of a token."""
        return self.patch_size * self.merge

    @property
    def stages(self) -> list[range]:
        """Return the blocks up to each tap, and those after the last if there are any."""
        bounds = [0, *(tap + 1 for tap in self.taps), self.num_layers]
        return [range(*each) for each in itertools.pairwise(bounds) if each[0] < each[1]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLConfig(DecoderConfig):
    """The text model with its vision tower; `sections`: rotated pairs by time, row and column."""

    vision: TowerConfig
    sections: tuple[int, int, int]
    image_token: int
    video_token: int

    @property
    def max_image_tokens(self) -> int:
        """Return the most of one image, which leaves three quarters of the context to others."""
        return min(self.vision.max_pixels // self.vision.side**2, max(1, self.max_context // 4))


def read(hub: HubConfig, folder: Path) -> Qwen3VLConfig:
    """Read a configuration of transformers, and how its folder says images are prepared.

    Raises:
        InvalidField: a setting is missing, out of range or not implemented.
    """
    text = hub.text_config
    refuse_others(text, {"hidden_act": "silu", "attention_bias": False})
    heads = head_plan(text, qkv_bias=False, out_bias=False, norm_eps=text.rms_norm_eps)
    # The whole model's setting rules, and the text model's may be missing.
    text.tie_word_embeddings = hub.tie_word_embeddings
    decoder = decoder_config(text, norm_eps=text.rms_norm_eps, heads=heads)
    vision = _vision(hub.vision_config, text.hidden_size, folder)
    if len(vision.taps) > decoder.num_layers:
        raise refusal("deepstack_visual_indexes has more blocks than there are text layers")
    return Qwen3VLConfig(
        **{field.name: getattr(decoder, field.name) for field in dataclasses.fields(decoder)},
        vision=vision,
        sections=_sections(text.rope_parameters, heads.head_dim),
        image_token=_token(hub, "image_token_id", decoder.vocab_size),
        video_token=_token(hub, "video_token_id", decoder.vocab_size),
    )


def _vision(hub: HubConfig, text_dim: int, folder: Path) -> TowerConfig:
    implemented = {
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "temporal_patch_size": 2,
        "out_hidden_size": text_dim,
    }
    refuse_others(hub, implemented)
    check_sizes(hub, "config.json", _MAX_SIZES)
    rope = hub.rope_parameters or {}
    if rope.get("rope_theta", 10_000.0) != 10_000.0:
        raise refusal(f"rope_theta of vision is {rope['rope_theta']!r}; only 10000 is implemented")
    grid = math.isqrt(hub.num_position_embeddings)
    if grid**2 != hub.num_position_embeddings:
        raise refusal("num_position_embeddings is no square number")
    if hub.hidden_size % hub.num_heads or hub.hidden_size // hub.num_heads % 4:
        raise refusal("a head of vision needs a multiple of 4 dimensions")
    taps = tuple(hub.deepstack_visual_indexes)
    if list(taps) != sorted(set(taps)) or any(not 0 <= each < hub.depth for each in taps):
        raise refusal(f"deepstack_visual_indexes is {list(taps)}, not blocks in ascending order")
    sizes = TowerConfig(
        dim=hub.hidden_size,
        ff_dim=hub.intermediate_size,
        num_layers=hub.depth,
        num_heads=hub.num_heads,
        grid=grid,
        taps=taps,
        patch_size=hub.patch_size,
        merge=hub.spatial_merge_size,
    )
    return dataclasses.replace(sizes, **_preparation(sizes, read_json(folder / _PREPROCESSOR)))


def _preparation(sizes: TowerConfig, said: dict[str, Any]) -> dict[str, Any]:
    """Read how images are resized and normalised; what is not said is as published."""
    implemented = {
        "patch_size": sizes.patch_size,
        "merge_size": sizes.merge,
        "temporal_patch_size": 2,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
    }
    told = types.SimpleNamespace(**{name: each for name, each in said.items() if each is not None})
    refuse_others(told, implemented, _PREPROCESSOR)
    size = said.get("size") or {}
    pixels = (
        said.get("min_pixels") or size.get("shortest_edge") or sizes.min_pixels,
        said.get("max_pixels") or size.get("longest_edge") or sizes.max_pixels,
    )
    whole = all(type(each) is int and 0 < each <= 2**30 for each in pixels)
    if not whole or pixels[1] < max(pixels[0], sizes.side**2):
        raise refusal(f"images of {pixels[0]!r} to {pixels[1]!r} pixels", _PREPROCESSOR)
    mean, std = (tuple(said.get(f"image_{name}") or (0.5,) * 3) for name in ("mean", "std"))
    if (
        any(len(each) != 3 or not all(map(_is_finite, each)) for each in (mean, std))
        or min(std) <= 0
    ):
        raise refusal("image_mean and image_std have three numbers each", _PREPROCESSOR)
    return {"min_pixels": pixels[0], "max_pixels": pixels[1], "mean": mean, "std": std}


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _sections(rope: dict[str, Any], head_dim: int) -> tuple[int, int, int]:
    sections = tuple(rope.get("mrope_section") or (24, 20, 20))
    if not rope.get("mrope_interleaved", True):
        raise refusal("mrope_interleaved is false; only interleaved rotations are implemented")
    whole = len(sections) == 3 and all(type(each) is int and each >= 0 for each in sections)
    if not whole or sum(sections) != head_dim // 2 or 3 * max(sections[1:]) > head_dim // 2:
        problem = f"mrope_section is {list(sections)}, not the parts of {head_dim // 2} pairs"
        raise refusal(problem)
    return sections


def _token(hub: HubConfig, name: str, vocab_size: int) -> int:
    token = getattr(hub, name)
    if type(token) is not int or not 0 <= token < vocab_size:
        raise refusal(f"{name} is {token!r}, not a token of {vocab_size}")
    return token
