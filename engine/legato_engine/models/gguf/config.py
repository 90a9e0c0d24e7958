"""Configuration of a GGUF file."""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from legato_engine.errors import InvalidField
from legato_engine.layers.rope import FactorScaling
from legato_engine.models.bundle import ModelBundle, ModelSource
from legato_engine.models.decoder.config import DecoderConfig, HubConfig, ModelSettings
from legato_engine.models.gguf.checkpoint import ROPE_FACTORS
from legato_engine.models.gguf.reader import GgufFile, read_gguf
from legato_engine.models.gguf.tokenizer import end_tokens, special_tokens
from legato_engine.models.text import SamplingDefaults

_TEMPLATE = "tokenizer.chat_template"


def gguf_settings(file: GgufFile) -> ModelSettings:
    """Read the stop tokens, the chat template and its special tokens; sampling is greedy."""
    template = file.metadata.get(_TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise InvalidField(f"{file.path.name}: {_TEMPLATE} is no text", field="weights")
    return ModelSettings(end_tokens(file), SamplingDefaults(), template, special_tokens(file))


# ---------------------------------------------------------------- config

# A GGUF file's sizes as a configuration of transformers, whose import takes time and 160 MB.

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures that are implemented; transformers' model types have the same names."""

_EMBEDDINGS, _HEAD, _BIAS = "token_embd.weight", "output.weight", "blk.0.attn_q.bias"


def hub_config(file: GgufFile, architectures: Collection[str] = ARCHITECTURES) -> HubConfig:
    """Return the fields of the configuration that transformers would have for this model.

    Raises:
        InvalidField: the architecture is another one, a size is missing, or a setting is not
            implemented.
    """
    if file.architecture not in architectures:
        known = ", ".join(architectures)
        problem = f"{file.path.name} is of the architecture {file.architecture!r}, not of {known}"
        raise InvalidField(problem, field="weights")
    return types.SimpleNamespace(model_type=file.architecture, **_fields(file))


def with_factors(config: DecoderConfig, file: GgufFile) -> DecoderConfig:
    """Add the file's rotation factors, as Llama 3.1 has them, to the configuration."""
    if ROPE_FACTORS not in file.tensors:
        return config
    factors = np.empty(file.tensors[ROPE_FACTORS].shape, np.float32)
    if factors.shape != (config.rotary_dim // 2,):
        raise _refusal(file, f"{ROPE_FACTORS} has {factors.size} factors")
    file.read(ROPE_FACTORS, factors)
    return dataclasses.replace(config, rope_scaling=FactorScaling(tuple(factors.tolist())))


def _fields(file: GgufFile) -> dict[str, Any]:
    heads = file.size("attention.head_count")
    width = file.size("embedding_length")
    head_dim = file.size("attention.key_length", width // max(heads, 1))
    if _EMBEDDINGS not in file.tensors:
        raise _refusal(file, f"it has no {_EMBEDDINGS}")
    if file.size("expert_count", 0):
        raise _refusal(file, "it has experts, which are not implemented")
    _require(file, "attention.value_length", head_dim)
    _require(file, "rope.dimension_count", head_dim)
    return {
        "hidden_size": width,
        "intermediate_size": file.size("feed_forward_length"),
        "num_hidden_layers": file.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors[_EMBEDDINGS].shape[0],
        "max_position_embeddings": file.size("context_length"),
        "rms_norm_eps": file.size("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "eos_token_id": None,
        "attention_bias": _BIAS in file.tensors,
    }


def _require(file: GgufFile, key: str, only: int) -> None:
    if (found := file.size(key, only)) != only:
        raise _refusal(file, f"{file.architecture}.{key} is {found}; only {only} is implemented")


def _rope(file: GgufFile) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": file.size("rope.freq_base", 10_000.0)}
    kind = file.metadata.get(f"{file.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return rope | {"rope_type": "default"}
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": file.size("rope.scaling.factor")}
    raise _refusal(file, f"rope.scaling.type is {kind!r}; only none and linear are implemented")


def _refusal(file: GgufFile, problem: str) -> InvalidField:
    return InvalidField(f"{file.path.name}: {problem}", field="weights")


# ---------------------------------------------------------------- family

# Models of GGUF files, by the architecture that the file names.

_NAMES = dict(zip(ARCHITECTURES, ("llama", "qwen", "qwen"), strict=True))


def find(source: ModelSource) -> ModelBundle:
    """Find the model of a GGUF file.

    Raises:
        InvalidField: the file is damaged, or its architecture is not implemented.
    """
    file = read_gguf(Path(source.weights))
    hub_config(file)
    name = _NAMES[file.architecture]
    families = importlib.import_module("legato_engine.models.decoder.families")
    found: ModelBundle = getattr(families, f"find_{name}")(dataclasses.replace(source, name=name))
    return found
