"""A decoder's configuration, settings and tokenizer from a GGUF file."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from legato_engine.errors import InvalidField
from legato_engine.layers.rope import FactorScaling
from legato_engine.models.decoder.config import DecoderConfig, HubConfig, ModelSettings
from legato_engine.models.gguf import ROPE_FACTORS, GgufFile
from legato_engine.models.text import SamplingDefaults
from legato_engine.models.untrusted import refusing

# A GGUF file's sizes as a configuration of transformers, whose import takes time and 160 MB.

_EMBEDDINGS, _HEAD, _BIAS = "token_embd.weight", "output.weight", "blk.0.attn_q.bias"


def hub_config(file: GgufFile, architectures: Collection[str]) -> HubConfig:
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


_TEMPLATE = "tokenizer.chat_template"


def gguf_settings(file: GgufFile) -> ModelSettings:
    """Read the stop tokens, the chat template and its special tokens; sampling is greedy."""
    template = file.metadata.get(_TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise InvalidField(f"{file.path.name}: {_TEMPLATE} is no text", field="weights")
    tokens, eos = _tokens(file), _eos(file)
    ids = {"bos": _id(file, "bos"), "eos": eos}
    ids |= {"unk": _id(file, "unknown"), "pad": _id(file, "padding")}
    specials = {f"{name}_token": tokens[at] for name, at in ids.items() if at is not None}
    ends = (eos, _id(file, "eot"), _id(file, "eom"))  # of a sequence, of a turn, of a message
    eos_ids = frozenset(at for at in ends if at is not None)
    return ModelSettings(eos_ids, SamplingDefaults(), template, specials)


# ---------------------------------------------------------------- tokenizer

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5  # token types
_USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
_SPACE = "\u2581"
_MAX_TOKEN = 1024  # characters
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|\p{{N}}{_REST}"
_BYTE_LEVEL = ("gpt-2", "smollm", "llama-bpe", "qwen2")
"""Splits of byte-level vocabularies, by `tokenizer.ggml.pre`."""


def gguf_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Make the one that has the same tokens for every text as the model's tokenizer.json.

    Raises:
        InvalidField: the tokenizer is of another kind, incomplete or damaged.
    """
    with refusing(f"the tokenizer of {file.path.name}", "tokenizer"):
        return _tokenizer(file)


def _tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    tokenizer = _byte_level(file) if _get(file, "model") == "gpt2" else _byte_fallback(file)
    tokens = _tokens(file)
    for kind, special in ((_CONTROL, True), (_USER, False)):
        added = [
            tokenizers.AddedToken(text, special=special, normalized=False)
            for text, of in zip(tokens, _kinds(file), strict=True)
            if of == kind
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    bos = _id(file, "bos")
    # Files of before the flag have it by the kind of tokenizer.
    usual = _get(file, "model") == "llama" or _get(file, "pre") == "llama-bpe"
    if bos is not None and _get(file, "add_bos_token", usual):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _eos(file: GgufFile) -> int | None:
    """Return the file's end of sequence; without one, the control token of a usual name."""
    said = _id(file, "eos")
    if said is not None:
        return said
    kinds = zip(_tokens(file), _kinds(file), strict=True)
    controls = {text: at for at, (text, kind) in enumerate(kinds) if kind == _CONTROL}
    return next((controls[name] for name in _USUAL_EOS if name in controls), None)


def _byte_level(file: GgufFile) -> tokenizers.Tokenizer:
    split = _get(file, "pre")
    if split not in _BYTE_LEVEL:
        raise InvalidField(
            f"{file.path.name}: its tokenizer splits text as {split!r} does; implemented are "
            f"{', '.join(_BYTE_LEVEL)}: give the model's tokenizer.json",
            field="tokenizer",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _required(file, "merges")]
    model = models.BPE(_vocabulary(file), merges, ignore_merges=split == "llama-bpe")
    tokenizer = tokenizers.Tokenizer(model)
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    by_regex = {"llama-bpe": _LLAMA3, "qwen2": _QWEN2}
    if split in by_regex:
        first = pre_tokenizers.Split(tokenizers.Regex(by_regex[split]), "isolated")
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([first, second])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "gpt-2":
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _byte_fallback(file: GgufFile) -> tokenizers.Tokenizer:
    """Build a SentencePiece tokenizer: merges are ranked by the score of their result."""
    if (kind := _get(file, "model")) != "llama":
        raise InvalidField(
            f"{file.path.name}: its tokenizer is of the kind {kind!r}; implemented are gpt2 "
            "(byte-level) and llama (SentencePiece): give the model's tokenizer.json",
            field="tokenizer",
        )
    tokens, scores = _tokens(file), _required(file, "scores")
    normal = [kind == _NORMAL for kind in _kinds(file)]  # no text makes a special token
    scored = zip(tokens, scores, strict=True)
    unknown = _id(file, "unknown")
    model = models.BPE(
        _vocabulary(file),
        _merges(dict(itertools.compress(scored, normal))),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    adds_space = _get(file, "add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(score: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two: best scored token first, then longest left part."""
    found = [
        (-score[token], -cut, token)
        for token in score
        for cut in range(1, len(token))
        if token[:cut] in score and token[cut:] in score
    ]
    return [(token[:-cut], token[-cut:]) for _, cut, token in sorted(found)]


def _vocabulary(file: GgufFile) -> dict[str, int]:
    """Ids by token, without those that only fill the embeddings up."""
    texts = enumerate(zip(_tokens(file), _kinds(file), strict=True))
    return {text: at for at, (text, kind) in texts if kind != _UNUSED}


def _kinds(file: GgufFile) -> list[int]:
    return _get(file, "token_type") or [_NORMAL] * len(_tokens(file))


def _tokens(file: GgufFile) -> list[str]:
    tokens: list[str] = _required(file, "tokens")
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN:  # every way to cut a token in two is tried
        problem = f"{file.path.name} has a token of {longest} characters, more than {_MAX_TOKEN}"
        raise InvalidField(problem, field="tokenizer")
    return tokens


def _id(file: GgufFile, name: str) -> int | None:
    """Return the id of a special token, checked against the vocabulary."""
    found = _get(file, f"{name}_token_id")
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < len(_tokens(file)):
        problem = f"{file.path.name}: tokenizer.ggml.{name}_token_id is {found!r}, no token's id"
        raise InvalidField(problem, field="tokenizer")
    return found


def _required(file: GgufFile, key: str) -> Any:
    value = _get(file, key)
    if not isinstance(value, list) or not value:
        problem = f"{file.path.name} has no tokenizer.ggml.{key}: give the model's tokenizer.json"
        raise InvalidField(problem, field="tokenizer")
    return value


def _get(file: GgufFile, key: str, default: object = None) -> Any:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    return default if value is None else value
