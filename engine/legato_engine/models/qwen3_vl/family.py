"""Qwen3-VL models by name: a Hugging Face folder, or random weights of known sizes."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from legato_engine.layers.attention import HeadPlan
from legato_engine.models.decoder.config import ModelSettings
from legato_engine.models.decoder.families import Family, bundle_of, find_bundle, limited
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.qwen3_vl import config
from legato_engine.models.qwen3_vl.config import Qwen3VLConfig, TowerConfig
from legato_engine.models.qwen3_vl.frontend import IMAGE, VIDEO, Qwen3VLFrontend
from legato_engine.models.qwen3_vl.model import Qwen3VLModel, Qwen3VLNetwork
from legato_engine.models.registry import ModelBundle, ModelSource
from legato_engine.models.text import SamplingDefaults

_END = "<|im_end|>"
_SPECIALS = ("<|im_start|>", _END, "<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)
_CHAT = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}
{%- else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The form of the published template, for a folder without one."""


def find(source: ModelSource) -> ModelBundle:
    """Find a Qwen3-VL.

    - `qwen3-vl`: a folder with config.json, tokenizer.json and model*.safetensors, and optionally
      preprocessor_config.json and the files of a text model; with `random_weights` and no folder
      the sizes of the published model with 2 billion parameters.
    - `random-tiny-vl`: always random weights, for tests.

    Text of a model without a folder is made of bytes.

    Raises:
        InvalidField: as `find_bundle`.
    """
    if source.weights:
        return find_bundle(source, _family(Path(source.weights)))
    if source.name != "random-tiny-vl" and not source.random_weights:
        return find_bundle(source, _family(Path()))  # which says what is missing
    sizes = _TINY if source.name == "random-tiny-vl" else _PUBLISHED_2B
    source = dataclasses.replace(source, random_weights=True)
    tokenizer = TextTokenizer(_bytes_tokenizer())
    image, video, end = (tokenizer.token_id(text) or 0 for text in (IMAGE, VIDEO, _END))
    sizes = dataclasses.replace(sizes, image_token=image, video_token=video)
    settings = ModelSettings(frozenset({end}), SamplingDefaults(), None, {})
    return bundle_of(
        source, _family(Path()), limited(sizes, source.max_context), settings, tokenizer
    )


def _family(folder: Path) -> Family:
    return Family(
        {"qwen3_vl": functools.partial(config.read, folder=folder)},
        network=Qwen3VLNetwork,
        model=Qwen3VLModel,
        frontend=Qwen3VLFrontend,
        template=_CHAT,
    )


def _bytes_tokenizer() -> tokenizers.Tokenizer:
    """Make a tokenizer of one token per byte, and the special ones of a chat."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*_SPECIALS])
    return tokenizer


_TINY = Qwen3VLConfig(
    dim=64,
    ff_dim=96,
    num_layers=3,
    vocab_size=288,
    max_context=1024,
    norm_eps=1e-6,
    heads=HeadPlan(num_heads=4, num_kv_heads=2, head_dim=16, norm_eps=1e-6),
    rope_theta=10_000.0,
    rotary_dim=16,
    rope_scaling=None,
    tied_head=True,
    vision=TowerConfig(
        dim=32,
        ff_dim=48,
        num_layers=3,
        num_heads=2,
        grid=8,
        taps=(0, 1),
        min_pixels=4 * 32**2,
        max_pixels=64 * 32**2,
    ),
    sections=(4, 2, 2),
    image_token=0,
    video_token=0,
)
_PUBLISHED_2B = Qwen3VLConfig(
    dim=2048,
    ff_dim=6144,
    num_layers=28,
    vocab_size=151_936,
    max_context=262_144,
    norm_eps=1e-6,
    heads=HeadPlan(num_heads=16, num_kv_heads=8, head_dim=128, norm_eps=1e-6),
    rope_theta=5_000_000.0,
    rotary_dim=128,
    rope_scaling=None,
    tied_head=True,
    vision=TowerConfig(
        dim=1024, ff_dim=4096, num_layers=24, num_heads=16, grid=48, taps=(5, 11, 17)
    ),
    sections=(24, 20, 20),
    image_token=0,
    video_token=0,
)
