"""Tokenizers of GGUF files make the tokens of the tokenizer.json that they were made from."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from legato_engine.errors import InvalidField
from legato_engine.models.decoder.gguf import end_tokens, gguf_tokenizer, special_tokens
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.gguf import GgufFile
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from tests.engine.models import hub_folder

# As in the published tokenizer.json of Llama 3, Qwen 2 and 3, SmolLM2.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
PRE = {
    "gpt-2": pre.ByteLevel(add_prefix_space=False),
    "smollm": pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(False)]),
    "llama-bpe": pre.Sequence(
        [pre.Split(Regex(_LLAMA3), "isolated"), pre.ByteLevel(False, use_regex=False)]
    ),
    "qwen2": pre.Sequence(
        [pre.Split(Regex(_QWEN2), "isolated"), pre.ByteLevel(False, use_regex=False)]
    ),
}
THINK = "<think>"
_WORDS = [
    "the",
    "Cat's",
    "12345",
    "  ",
    "\n\n",
    "\t",
    "é",
    "e\u0301",
    "😀",
    "x=y[3];",
    "naïve",
    "don't",
]
_WORDS += [THINK, hub_folder.TURN, hub_folder.EOS, "1.5e3", "ÄÖ", "日本語", "!!!\n", " a", "co-op"]


def texts():
    """Three hundred texts, with special tokens, digits, spaces and characters of several bytes."""
    generator = random.Random(0)
    joined = (generator.choice(["", " "]) for _ in range(300))
    return [by.join(generator.choices(_WORDS, k=generator.randrange(1, 12))) for by in joined]


def byte_level(split):
    """A vocabulary learnt with that split."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE[split]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[hub_folder.EOS, hub_folder.BOS, hub_folder.TURN],
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    return tokenizer


def file_of(tokenizer, *, merges=True, **fields):
    """The metadata that a GGUF file of this tokenizer has."""
    data = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    added = {token["content"]: 3 if token["special"] else 4 for token in data["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    said = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [added.get(token, 1) for token in tokens],
        "bos_token_id": ids[hub_folder.BOS],
        "eos_token_id": ids[hub_folder.EOS],
        "add_bos_token": False,
    }
    if merges:
        said["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    said |= fields
    return GgufFile(Path("x.gguf"), {f"tokenizer.ggml.{k}": v for k, v in said.items()}, {})


def check_same(file, theirs):
    """Encode, with special tokens and without, and decode token by token."""
    whole = gguf_tokenizer(file)
    ours = TextTokenizer(whole)
    for text in texts():
        assert whole.encode(text).ids == theirs.encode(text).ids, text
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert list(ours.encode_marked(text)) == expected, text
        decoded = b"".join(map(ours.piece, expected)).decode(errors="replace")
        assert decoded.strip() == theirs.decode(expected, skip_special_tokens=True).strip(), text


@pytest.mark.parametrize("split", PRE)
def test_tokens_are_those_of_the_tokenizer_json(split):
    """For every split that is implemented."""
    theirs = byte_level(split)
    check_same(file_of(theirs, pre=split), theirs)


@pytest.mark.parametrize("split", PRE)
def test_splits_differ(split):
    """A test of one split would fail with another, so they are told apart."""
    theirs = byte_level(split)
    for other in set(PRE) - {split}:
        whole = gguf_tokenizer(file_of(theirs, pre=other))
        assert any(whole.encode(text).ids != theirs.encode(text).ids for text in texts()), other


def sentencepiece():
    """A vocabulary with byte fallback, and its scores: merges in their order."""
    theirs = hub_folder.byte_fallback_tokenizer()
    data = json.loads(theirs.to_str())
    made = {left + right: -at for at, (left, right) in enumerate(data["model"]["merges"])}
    ids = theirs.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {f"<0x{byte:02X}>": 6 for byte in range(256)} | {"<unk>": 2}
    added = {token["content"]: 3 for token in data["added_tokens"] if token["content"] != "<unk>"}
    fields = {
        "model": "llama",
        "scores": [float(made.get(token, -1e6)) for token in tokens],
        "token_type": [(kinds | added).get(token, 1) for token in tokens],
        "unknown_token_id": ids["<unk>"],
        "add_bos_token": True,
    }
    return theirs, file_of(theirs, merges=False, **fields)


def test_tokens_of_sentencepiece_are_those_of_the_tokenizer_json():
    """Merges come from the scores; spaces, bytes and BOS are as in the first Llamas."""
    theirs, file = sentencepiece()
    check_same(file, theirs)


def test_bos_is_added_where_the_file_says():
    """Else by the kind: Llamas have one."""
    theirs = byte_level("llama-bpe")
    ids = [
        gguf_tokenizer(file_of(theirs, **fields)).encode("a").ids
        for fields in (
            {"pre": "llama-bpe", "add_bos_token": True},
            {"pre": "llama-bpe", "add_bos_token": None},
            {"pre": "llama-bpe"},
            {"pre": "qwen2", "add_bos_token": None},
        )
    ]
    bos = theirs.token_to_id(hub_folder.BOS)
    assert [found[0] == bos for found in ids] == [True, True, False, False]


def test_text_makes_no_special_token():
    """Neither by merges nor as a whole word; only the template's own text does."""
    for file in (file_of(byte_level("llama-bpe"), pre="llama-bpe"), sentencepiece()[1]):
        tokenizer = TextTokenizer(gguf_tokenizer(file))
        for special in (hub_folder.EOS, hub_folder.TURN):
            assert tokenizer.token_id(special) not in tokenizer.encode(f"a {special}{special} b")
            assert tokenizer.token_id(special) in tokenizer.encode_marked(f"a {special} b")


def test_fillers_of_the_vocabulary_are_no_tokens():
    """Their ids are above the tokenizer's, and no text has them."""
    theirs = byte_level("qwen2")
    file = file_of(theirs, pre="qwen2")
    metadata = dict(file.metadata)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[PAD401]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 5]
    filled = file._replace(metadata=metadata)
    assert gguf_tokenizer(filled).to_str() == gguf_tokenizer(file).to_str()


def test_special_tokens_and_ends():
    """By the names of templates; eos, eot and eom end an answer."""
    file = file_of(byte_level("qwen2"), pre="qwen2", eot_token_id=2, padding_token_id=0)
    assert special_tokens(file) == {
        "bos_token": hub_folder.BOS,
        "eos_token": hub_folder.EOS,
        "pad_token": hub_folder.EOS,
    }
    assert end_tokens(file) == {0, 2}


def test_a_file_without_an_end_has_the_control_token_of_a_usual_name():
    """Text of that name is no end."""
    file = file_of(byte_level("qwen2"), pre="qwen2", eos_token_id=None)
    assert end_tokens(file) == set()
    metadata = dict(file.metadata)
    tokens = [*metadata["tokenizer.ggml.tokens"], "</s>", "<|endoftext|>"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 3]
    file = file._replace(metadata=metadata)
    assert end_tokens(file) == {tokens.index("<|endoftext|>")}
    assert special_tokens(file)["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"pre": "gpt-4o"}, "'gpt-4o' does; implemented are gpt-2, smollm, llama-bpe, qwen2"),
        ({"model": "t5"}, "kind 't5'; implemented are gpt2"),
        ({"pre": "qwen2", "merges": None}, "no tokenizer.ggml.merges"),
        ({"pre": "qwen2", "tokens": []}, "no tokenizer.ggml.tokens"),
    ],
)
def test_other_tokenizers_are_refused(fields, problem):
    """With what is implemented, and the way out."""
    file = file_of(byte_level("qwen2"), **fields)
    with pytest.raises(InvalidField, match=r"give the model's tokenizer\.json") as info:
        gguf_tokenizer(file)
    assert problem in info.value.message
    assert info.value.metadata["field"] == "tokenizer"
