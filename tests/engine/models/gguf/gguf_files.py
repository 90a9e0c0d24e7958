"""GGUF files of tiny random models, written by the library `gguf`."""

from __future__ import annotations

import json
from typing import Any

import gguf
import numpy as np

from tests.engine.models import hub_folder

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
CONTROL, USER = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED


def write(
    path, model, *, tokenizer=None, kind="F32", kinds=None, factors=None, fields=None, **spoken
):
    """Write a model of transformers; matrices are of the type `kind`, or by part of `kinds`.

    `fields` are further fields of the architecture, by name and number; `spoken` is as in
    `add_tokenizer`.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    _add_sizes(writer, config)
    for name, value in (fields or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{config.model_type}.{name}", value)
    add_tokenizer(writer, tokenizer or hub_folder.byte_level_tokenizer(), **spoken)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _ordered(name, tensor.numpy(), config)
        own = next((each for part, each in (kinds or {}).items() if part in name), kind)
        of = gguf.GGMLQuantizationType[own if values.ndim == 2 else "F32"]
        plain = of in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        data = values if of.name == "F32" else quantised(values, of)
        writer.add_tensor(gguf_name(name), data, raw_dtype=None if plain else of)
    finish(writer)


def write_small(path, fields=None, add=None):
    """Write a Llama of one layer; `fields` replace fields by their full names."""
    vocabulary, width = 384, 32
    shapes = {
        "token_embd": (vocabulary, width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (width, width),
        "blk.0.attn_v": (width, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_norm": (width,),
        "blk.0.ffn_gate": (64, width),
        "blk.0.ffn_up": (64, width),
        "blk.0.ffn_down": (width, 64),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if add is None:
        add_tokenizer(writer, hub_folder.byte_level_tokenizer())
    else:
        add(writer)
    adders: dict[type, Any] = {
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for name, value in (fields or {}).items():
        writer.kv_data[0].pop(name, None)
        adders[type(value)](name, value)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 0.01, np.float32))
    finish(writer)


def quantised(values, of):
    """The library's blocks; of those that it does not write, simple ones of the same layout."""
    if of.name == "Q6_K":
        return _q6_k(values)
    if of.name not in ("Q4_K", "Q5_K"):
        return gguf.quantize(values, of)
    most = 15 if of.name == "Q4_K" else 31
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0)
    whole = [((groups.max(2) - low) / most).max(1), -low.min(1)]
    halves = [(each / 63).astype(np.float16)[:, None] for each in whole]
    step, least = (each.astype(np.float32) for each in halves)
    scale = np.ceil((groups.max(2) - low) / most / step).clip(1, 63).astype(np.uint8)
    minimum = np.ceil(-low / least).clip(0, 63).astype(np.uint8)
    exact = (groups + (minimum * least)[..., None]) / (scale * step)[..., None]
    codes = exact.round().clip(0, most).astype(np.uint8)
    six = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scale, minimum)]
    six.append(scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4)
    fifth = [np.bitwise_or.reduce(codes >> 4 << np.arange(8, dtype=np.uint8)[:, None], 1)]
    pairs = codes.reshape(-1, 4, 2, 32) & 15
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    parts = [
        *(each.view(np.uint8) for each in halves),
        *six,
        *(fifth if most > 15 else []),
        nibbles,
    ]
    return np.concatenate(parts, 1).reshape(values.shape[0], -1)


def _q6_k(values):
    """Blocks whose groups' largest numbers are -32 steps, before scales are rounded to 8 bits."""
    groups = values.reshape(-1, 16, 16)
    at = np.abs(groups).argmax(2)[..., None]
    scale = np.take_along_axis(groups, at, 2)[..., 0] / -32
    whole = (np.abs(scale).max(1) / 127).astype(np.float16)[:, None]
    eight = np.rint(scale / whole.astype(np.float32)).astype(np.int8)
    steps = np.where(eight == 0, 1, eight * whole.astype(np.float32))[..., None]
    codes = (np.rint(groups / steps).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4).reshape(-1, 128)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(codes >> 4 << shifts, 2).reshape(-1, 64)
    parts = [low, high, eight.view(np.uint8), whole.view(np.uint8)]
    return np.concatenate(parts, 1).reshape(values.shape[0], -1)


def finish(writer):
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(
    writer,
    tokenizer,
    *,
    pre="gpt-2",
    chat=None,
    eos=hub_folder.EOS,
    ends=(),
    model="gpt2",
    scores=None,
):
    """Add a byte-level tokenizer's vocabulary, or one of SentencePiece with its scores."""
    data = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    added = {token["content"]: token["special"] for token in data["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    normal = gguf.TokenType.NORMAL
    kinds = [(USER, CONTROL)[added[token]] if token in added else normal for token in tokens]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores is None:
        writer.add_token_merges([" ".join(pair) for pair in data["model"]["merges"]])
    else:
        writer.add_token_scores(scores)
    writer.add_bos_token_id(ids[hub_folder.BOS])
    if eos is not None:
        writer.add_eos_token_id(ids[eos])
    writer.add_add_bos_token(data["post_processor"] is not None)
    for name in ends:
        writer.add_eot_token_id(ids[name])
    if chat is not None:
        writer.add_chat_template(chat)


def gguf_name(name):
    """The name of a checkpoint's tensor in a GGUF file."""
    base, _, kind = name.rpartition(".")
    if base in _TOP:
        return f"{_TOP[base]}.{kind}"
    _, _, layer, part = base.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def _add_sizes(writer, config):
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _ordered(name, values, config):
    """Put the dims of a rotated pair side by side, as files of Llamas have them."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if config.model_type != "llama" or part not in heads:
        return values
    halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
