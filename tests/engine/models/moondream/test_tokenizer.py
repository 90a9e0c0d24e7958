"""Text survives encoding and decoding, and never becomes special ids."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.errors import InvalidField
from legato_engine.models.moondream.tokenizer import (
    NUM_SPECIAL,
    BytePairTokenizer,
    StandInTokenizer,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", *(f"<|reserved_{index}|>" for index in range(1, NUM_SPECIAL))]


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """A byte-level tokenizer with merges, some of whose special tokens are flagged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a red cup and a red car", "the cat sat"] * 9, trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"][3]["special"] = False
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(data))
    return path


@pytest.fixture(scope="session", params=["bpe", "stand-in"])
def tokenizer(request, tokenizer_json):
    """Both implementations."""
    return BytePairTokenizer(tokenizer_json) if request.param == "bpe" else StandInTokenizer()


@given(text=st.text())
def test_pieces_add_up_to_the_text(tokenizer, text):
    """The bytes of a text's tokens are the text's bytes."""
    assert b"".join(map(tokenizer.piece, tokenizer.encode(text))) == text.encode()


@pytest.mark.parametrize("literal", [SPECIAL[0], SPECIAL[3], f"a{SPECIAL[5]}b {SPECIAL[0]}"])
def test_literal_special_tokens_are_text(tokenizer, literal):
    """Text that spells a special token is encoded to plain ids."""
    ids = tokenizer.encode(literal)
    assert min(ids) >= NUM_SPECIAL
    assert b"".join(map(tokenizer.piece, ids)) == literal.encode()


def test_special_ids_carry_no_text(tokenizer):
    """No special id has text."""
    assert all(tokenizer.piece(token_id) == b"" for token_id in range(NUM_SPECIAL))


def test_merges_are_used(tokenizer_json):
    """A learned word is fewer tokens than letters."""
    assert len(BytePairTokenizer(tokenizer_json).encode("a red cup")) < 9


def test_unknown_ids_have_no_text(tokenizer_json):
    """Ids beyond the vocabulary give nothing."""
    assert BytePairTokenizer(tokenizer_json).piece(99999) == b""


@pytest.mark.parametrize("text", ["{}", "no json", '{"decoder": {"type": "WordPiece"}}'])
def test_other_files_are_refused(tmp_path, text):
    """The error of a file of another kind names it."""
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(InvalidField, match=r"tokenizer\.json"):
        BytePairTokenizer(path)


def test_a_missing_file_is_named(tmp_path):
    """The error of a missing tokenizer names its path."""
    with pytest.raises(InvalidField, match="nowhere"):
        BytePairTokenizer(tmp_path / "nowhere.json")
