"""Hugging Face folders of tiny random models, written by transformers and tokenizers."""

from __future__ import annotations

import json
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCABULARY = 384
BOS, EOS, TURN = "<|begin|>", "<|end|>", "<|turn|>"
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
_TEXTS = ["the cat sat on the mat", "why is the sky blue", "what is it? 0 1 2 3", "a cup of tea"]


def phi(**fields):
    """A Phi of two layers and four heads of 16, half of each rotated."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "architectures": ["PhiForCausalLM"],
    }
    from transformers import PhiConfig  # takes seconds, not needed by most

    return PhiConfig(**(sizes | fields))


def byte_level_tokenizer(*, adds_bos=False, also=()):
    """A tokenizer like those of Phi, Llama 3 and Qwen: every byte is a letter.

    Special tokens in `also` follow all others.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOS, BOS, TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.add_special_tokens([*also])
    return _with_bos(tokenizer) if adds_bos else tokenizer


def byte_fallback_tokenizer():
    """A tokenizer like the first Llamas': spaces are letters, bytes are a fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<unk>", EOS, BOS, TURN, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _with_bos(_plain_bytes(tokenizer))


def write(folder, config, *, tokenizer=None, chat=None, generation=None, seed=0, shards=1):
    """Write a whole folder; return transformers' own model in float32.

    No weight keeps its initial value, because a bias of zeros or a norm of ones would hide that it
    is unused.
    """
    model = random_model(config, seed)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder, max_shard_size=size // shards + 1 if shards > 1 else "5GB")
    assert (folder / "model.safetensors").exists() == (shards == 1)
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": {"content": EOS, "special": True}}
    if chat is not None:
        settings["chat_template"] = chat
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    return model


def random_model(config, seed=0):
    """Make transformers' model with every weight random."""
    import transformers  # takes seconds, not needed by most

    sees = hasattr(config, "vision_config")
    kind = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif parameter.ndim == 2:
                parameter.copy_(noise / parameter.shape[1] ** 0.5 * 1.5)
            else:
                parameter.copy_(0.3 * noise)
    return model


def change(path, **fields):
    """Set fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _plain_bytes(tokenizer):
    """Byte tokens are not special: they are in the vocabulary only."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


def _with_bos(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer
