"""Text to ids as the tokenizer's own library encodes it, and ids back to the same bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.errors import InvalidField
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.text import Detokenizer

from tests.engine.models import hub_folder

TEXTS = st.text(alphabet=st.sampled_from("the cat?\n é€😀ß"), max_size=30)
KINDS = {
    "bytes": hub_folder.byte_level_tokenizer,
    "fallback": hub_folder.byte_fallback_tokenizer,
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """Our tokenizer and the library's."""
    theirs = KINDS[request.param]()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    theirs.save(str(path))
    return TextTokenizer.read(path), theirs


@given(text=TEXTS)
def test_text_comes_back(pair, text):
    """Pieces join to the text, whatever the vocabulary's letters."""
    tokenizer, theirs = pair
    ids = tokenizer.encode(text)
    assert list(ids) == theirs.encode(text, add_special_tokens=False).ids
    stream = Detokenizer(tokenizer)
    shown = "".join(map(stream.push, ids)) + stream.close()
    assert shown == text.lstrip()
    assert "\ufffd" not in shown


def test_special_tokens_in_a_text_are_text(pair):
    """They are recognised only on request."""
    tokenizer, _ = pair
    for text in (hub_folder.EOS, f"a{hub_folder.TURN}b"):
        assert tokenizer.has_special(text)
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.piece, ids)).decode().strip() == text
    marked = tokenizer.encode_marked(hub_folder.EOS)
    assert marked[-1] == tokenizer.token_id(hub_folder.EOS)
    assert tokenizer.piece(marked[-1]) == b""
    assert not tokenizer.has_special("<|en d|>")


def test_a_sequence_opens_as_the_tokenizer_says(tmp_path):
    """It has a BOS if the tokenizer adds one."""
    for adds in (True, False):
        hub_folder.byte_level_tokenizer(adds_bos=adds).save(str(tmp_path / "tokenizer.json"))
        tokenizer = TextTokenizer.read(tmp_path / "tokenizer.json")
        bos = (tokenizer.token_id(hub_folder.BOS),) if adds else ()
        assert tokenizer.encode("cat", opened=True) == bos + tokenizer.encode("cat")


def test_added_words_keep_their_text(tmp_path):
    """Added tokens that are not special decode to their text, unused ids to nothing."""
    theirs = hub_folder.byte_level_tokenizer()
    theirs.add_tokens(["      ", "<think>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer.read(tmp_path / "tokenizer.json")
    (spaces,) = tokenizer.encode("      ")
    assert tokenizer.piece(spaces) == b"      "
    assert tokenizer.piece(tokenizer.num_ids) == b""
    assert not tokenizer.has_special("<think>")


def test_texts_are_neither_cut_nor_padded(tmp_path):
    """Not even where a tokenizer.json says so, which is for training."""
    theirs = hub_folder.byte_level_tokenizer()
    whole = theirs.encode("the cat", add_special_tokens=False).ids
    theirs.enable_truncation(1)
    theirs.enable_padding(length=9)
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer.read(tmp_path / "tokenizer.json")
    assert len(whole) > 1
    assert list(tokenizer.encode("the cat")) == whole
    assert list(tokenizer.encode_marked("the cat")) == whole


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a tokenizer"),
        ('{"version": "1.0"}', "is not a tokenizer"),
    ],
)
def test_other_files_are_refused(tmp_path, data, message):
    """The error says what is wrong."""
    (tmp_path / "tokenizer.json").write_text(data)
    with pytest.raises(InvalidField, match=message):
        TextTokenizer.read(tmp_path / "tokenizer.json")


def test_other_decoders_are_refused_by_name(tmp_path):
    """Other decoders would give other text."""
    data = json.loads(hub_folder.byte_level_tokenizer().to_str())
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(InvalidField, match="decodes by WordPiece; ByteLevel and ByteFallback"):
        TextTokenizer.read(tmp_path / "tokenizer.json")
