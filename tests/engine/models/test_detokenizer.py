"""Whole characters, nothing lost, nothing after a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from legato_engine.models.moondream.tokenizer import NUM_SPECIAL, StandInTokenizer
from legato_engine.models.text import Detokenizer

TOKENIZER = StandInTokenizer()
TEXTS = st.text(alphabet=st.sampled_from("ab \n€é😀x"), max_size=40)
STOPS = st.lists(st.text(alphabet="ab €", min_size=1, max_size=4), max_size=3)


def stream_all(ids, stop=()):
    """The detokenizer after all ids, and the texts it returned."""
    stream = Detokenizer(TOKENIZER, stop)
    shown = [stream.push(token_id) for token_id in ids]
    return stream, [*shown, stream.close()]


@given(TEXTS)
def test_text_comes_back(text):
    """Returned texts add up to the text without leading whitespace."""
    stream, shown = stream_all(TOKENIZER.encode(text))
    assert "".join(shown) == stream.text == text.lstrip()


@given(st.lists(st.integers(0, 255), max_size=40))
def test_broken_bytes_never_show(values):
    """Of any bytes, only complete characters are returned, and no replacement character."""
    data = bytes(values)
    stream, shown = stream_all([NUM_SPECIAL + byte for byte in data])
    assert "".join(shown) == stream.text == data.decode("utf-8", "ignore").lstrip()


def test_an_unfinished_character_waits():
    """A character is returned with its last byte, and dropped if that is missing."""
    euro = TOKENIZER.encode("€")
    _, shown = stream_all([*euro, *euro[:2]])
    assert shown == ["", "", "€", "", "", ""]


@given(TEXTS, STOPS)
def test_text_ends_before_the_first_stop_string(text, stop):
    """The text ends before the stop string that is complete first."""
    stream = Detokenizer(TOKENIZER, stop)
    shown, read = "", b""
    for token_id in TOKENIZER.encode(text):
        read += TOKENIZER.piece(token_id)
        shown += stream.push(token_id)
        if stream.stopped:
            break
    seen = read.decode("utf-8", "ignore").lstrip()
    cuts = [seen.find(s) for s in stop if s in seen]
    assert stream.stopped == bool(cuts)
    shown += stream.close()
    assert shown == stream.text == (seen[: min(cuts)] if cuts else seen)


@given(TEXTS, STOPS)
def test_little_is_held_back(text, stop):
    """The text held back is shorter than the longest stop string."""
    stream = Detokenizer(TOKENIZER, stop)
    read = ""
    for letter in text:
        for token_id in TOKENIZER.encode(letter):
            stream.push(token_id)
        if stream.stopped:
            break
        read = (read + letter).lstrip()
        assert len(read) - len(stream.text) <= max((len(s) - 1 for s in stop), default=0)


def test_nothing_comes_after_a_stop():
    """Tokens after a stop string return nothing."""
    stream, shown = stream_all(TOKENIZER.encode("xabx"), ["ab"])
    assert stream.stopped
    assert "".join(shown) == "x"
