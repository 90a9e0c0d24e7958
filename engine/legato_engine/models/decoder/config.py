"""Configuration of text models, read from Hugging Face folders."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from legato_engine.errors import InvalidField
from legato_engine.layers.attention import HeadPlan
from legato_engine.layers.rope import LinearScaling, Llama3Scaling, Scaling
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.text import SamplingDefaults
from legato_engine.models.untrusted import refusing

_CONFIG = "config.json"
_TOKENIZER, _GENERATION = "tokenizer_config.json", "generation_config.json"
_TEMPLATE = "chat_template.jinja"
_SAMPLING = ("temperature", "top_p", "top_k")
_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSettings:
    """Any id of `eos` ends an answer; `specials` are special tokens by role."""

    eos: frozenset[int]
    sampling: SamplingDefaults
    template: str | None
    specials: dict[str, str]


def read_settings(
    folder: Path, tokenizer: TextTokenizer, model_eos: int | list[int] | None
) -> ModelSettings:
    """Read the folder's files, each of which may be missing.

    EOS are those of generation_config.json, or else `model_eos`, and the tokenizer's. A repetition
    penalty is ignored, because this server's sampling has none.
    """
    texts, generation = read_json(folder / _TOKENIZER), read_json(folder / _GENERATION)
    specials = {name: text for name in _SPECIALS if (text := _content(texts.get(name)))}
    ids = generation.get("eos_token_id", model_eos)
    eos = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if (own := tokenizer.token_id(specials.get("eos_token", ""))) is not None:
        eos.add(own)
    if not all(type(token_id) is int and token_id >= 0 for token_id in eos):
        raise InvalidField(f"{_GENERATION}: eos_token_id is {ids!r}", field="weights")
    return ModelSettings(frozenset(eos), _sampling(generation), _template(folder, texts), specials)


def _sampling(generation: dict[str, Any]) -> SamplingDefaults:
    if not generation.get("do_sample"):
        return SamplingDefaults()
    said = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    try:
        return msgspec.convert({"temperature": 1.0, **said}, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise InvalidField(f"{_GENERATION}: {error}", field="weights") from None


def _template(folder: Path, texts: dict[str, Any]) -> str | None:
    """Prefer the template's own file; of several in tokenizer_config.json, `default`."""
    if (folder / _TEMPLATE).is_file():
        with refusing(_TEMPLATE, "weights"):
            return (folder / _TEMPLATE).read_text(encoding="utf-8")
    template = texts.get("chat_template")
    if isinstance(template, list):
        with refusing(f"chat_template of {_TOKENIZER}", "weights"):
            named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise InvalidField(f"{_TOKENIZER}: chat_template is no text", field="weights")
    return template


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of settings; a missing one has none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidField(f"{path.name} cannot be read: {error}", field="weights") from None
    if not isinstance(content, dict):
        raise InvalidField(f"{path.name} is no JSON object", field="weights")
    return content


# ---------------------------------------------------------------- config

# Settings that are not implemented are refused with `InvalidField`.

HubConfig = Any
"""A configuration of transformers; its fields differ by family."""

_FULL = "full_attention"
_MAX_SIZES = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**28,
}
"""Sizes of a configuration, which are at least 1 and at most so large."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of every family; `tied_head`: the embeddings are the head, too."""

    dim: int
    ff_dim: int
    num_layers: int
    vocab_size: int
    max_context: int
    norm_eps: float
    heads: HeadPlan
    rope_theta: float
    rotary_dim: int
    rope_scaling: Scaling | None
    tied_head: bool


def read_config(folder: Path, model_types: Collection[str]) -> HubConfig:
    found = _model_type(folder)
    if found not in model_types:
        known = " or ".join(map(repr, model_types))
        raise InvalidField(f"config.json: model_type is {found!r}, not {known}", field="weights")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - errors of many types, all with a reason
        raise InvalidField(f"config.json: {error}", field="weights") from None


def text_config(config: HubConfig) -> HubConfig:
    """Return the part for the text model, of a configuration that has parts."""
    return getattr(config, "text_config", config)


def check_sizes(
    config: HubConfig, source: str, largest_sizes: Mapping[str, int] = _MAX_SIZES
) -> None:
    """Refuse sizes that no model has, before anything is computed from them."""
    for name, largest in largest_sizes.items():
        value = getattr(config, name, None)
        if name == "head_dim" and value is None:
            continue  # it follows from others
        if type(value) is not int or not 1 <= value <= largest:
            problem = f"{source}: {name} is {value!r}, not a whole number from 1 to {largest}"
            raise InvalidField(problem, field="weights")


def decoder_config(
    config: HubConfig, *, norm_eps: float, heads: HeadPlan, partial: float = 1.0
) -> DecoderConfig:
    """Read the fields that families have in common; `partial` of a head is rotated."""
    refuse_others(config, {"quantization_config": None})
    if other := set(getattr(config, "layer_types", None) or ()) - {_FULL}:
        raise refusal(f"layer_types has {sorted(other)}; only {_FULL!r} is implemented")
    rope: Mapping[str, Any] = config.rope_parameters
    for name, value in {"rope_theta": rope["rope_theta"], "norm_eps": norm_eps}.items():
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise refusal(f"{name} is {value!r}, not a positive number")
    rotary_dim = int(heads.head_dim * partial)
    if heads.num_heads % heads.num_kv_heads:
        raise refusal("num_key_value_heads does not divide num_attention_heads")
    if (found := partial_rotary(config)) != partial:
        raise refusal(f"partial_rotary_factor is {found}; only {partial} is implemented")
    if rotary_dim % 2:
        raise refusal(f"{rotary_dim} rotary dimensions of a head; the number must be even")
    return DecoderConfig(
        dim=config.hidden_size,
        ff_dim=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        norm_eps=norm_eps,
        heads=heads,
        rope_theta=rope["rope_theta"],
        rotary_dim=rotary_dim,
        rope_scaling=_scaling(rope),
        tied_head=config.tie_word_embeddings,
    )


def head_plan(
    config: HubConfig, *, qkv_bias: bool, out_bias: bool, norm_eps: float | None = None
) -> HeadPlan:
    return HeadPlan(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        norm_eps=norm_eps,
    )


def refuse_others(
    config: HubConfig, implemented: Mapping[str, object], source: str = _CONFIG
) -> None:
    """Check fields of which one value is implemented."""
    for name, only in implemented.items():
        value = getattr(config, name, only)
        if value != only:
            raise refusal(f"{name} is {value!r}; only {only!r} is implemented", source)


def partial_rotary(config: HubConfig) -> float:
    return float(config.rope_parameters.get("partial_rotary_factor") or 1.0)


def _scaling(rope: Mapping[str, Any]) -> Scaling | None:
    def factor(name: str) -> float:
        value = rope.get(name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise refusal(f"{name} of the rope is {value!r}, not a positive number")
        return value

    kinds: dict[str, Callable[[], Scaling | None]] = {
        "default": lambda: None,
        "linear": lambda: LinearScaling(factor("factor")),
        "llama3": lambda: Llama3Scaling(
            factor=factor("factor"),
            low=factor("low_freq_factor"),
            high=factor("high_freq_factor"),
            first_context=int(factor("original_max_position_embeddings")),
        ),
    }
    kind = rope["rope_type"]
    if kind not in kinds:
        raise refusal(f"rope_type is {kind!r}; only {', '.join(kinds)} are implemented")
    return kinds[kind]()


def _model_type(folder: Path) -> object:
    try:
        fields = json.loads((folder / "config.json").read_bytes())
    except NotADirectoryError:
        problem = f"{folder} is a file, neither a folder with config.json nor in GGUF"
        raise InvalidField(problem, field="weights") from None
    except OSError as error:
        problem = f"no config.json in {folder}: {error.strerror}"
        raise InvalidField(problem, field="weights") from None
    except (ValueError, RecursionError):
        raise refusal("it is not JSON") from None
    return fields.get("model_type") if isinstance(fields, dict) else None


def refusal(problem: str, source: str = _CONFIG) -> InvalidField:
    return InvalidField(f"{source}: {problem}", field="weights")
