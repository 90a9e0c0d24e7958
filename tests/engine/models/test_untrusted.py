"""Files that crash their parsers, or keep them busy, cost a sentence and no engine."""

import json

import pytest
from legato_engine.errors import InternalError, InvalidField
from legato_engine.models import untrusted
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.moondream.tokenizer import BytePairTokenizer
from legato_engine.models.untrusted import check_tokenizer, encoding, refusing, start_check


def tokenizer(pattern=None, **parts):
    """A tokenizer.json of two letters."""
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = False
    steps = [split, byte_level] if pattern else [byte_level]
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
        **parts,
    }


def replacing(text, times):
    """A normalizer that makes one letter many."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": text}
    return {"type": "Sequence", "normalizers": [step] * times}


PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
SLICED = {
    "type": "BPE",
    "vocab": {"é": 0, "a": 1},
    "merges": [["a", "é"]],
    "continuing_subword_prefix": "x",
}
HOSTILE = {
    "a panic of the parser": (tokenizer(normalizer=PRECOMPILED), "is not a tokenizer"),
    "an abort of the parser": (tokenizer(model=SLICED), "ends the process|is not a tokenizer"),
    "an empty pattern": (
        tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "a"}),
        "cannot be read: PanicException",
    ),
    "a search without end": (tokenizer(r"(a+)+$"), "cannot be read: PanicException"),
    "a text that grows": (tokenizer(normalizer=replacing("a" * 50, 2)), "makes over"),
    "a text without end": (tokenizer(normalizer=replacing("a" * 9999, 9)), "ends|MiB|takes more"),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("read", [TextTokenizer.read, BytePairTokenizer])
def test_a_hostile_tokenizer_is_refused(tmp_path, kind, read):
    """The engine's process is not the one that panics, aborts or runs out of memory."""
    content, says = HOSTILE[kind]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidField, match=says) as caught:
        read(path)
    assert caught.value.metadata["field"] == "tokenizer"
    assert "\n" not in caught.value.message
    path.write_text(json.dumps(tokenizer()))
    assert read(path).num_ids == 3


def test_a_check_may_begin_ahead(tmp_path, monkeypatch):
    """Its result is that of the check which began, once."""
    path = tmp_path / "tokenizer.json"
    path.write_text("no json")
    start_check(path)
    with pytest.raises(InvalidField, match="is not JSON"):
        check_tokenizer(path)
    path.write_text(json.dumps(tokenizer()))
    start_check(path)
    untrusted._started[path].result(60)
    monkeypatch.setattr(untrusted, "_confined", None)
    check_tokenizer(path)
    with pytest.raises(TypeError):
        check_tokenizer(path)


def test_time_is_bounded(tmp_path, monkeypatch):
    """A parser that computes without end is ended by the kernel."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer(normalizer=replacing("a" * 200, 3))))
    monkeypatch.setitem(untrusted._MEMORY_PER_BYTE, "tokenizer", 1 << 24)
    monkeypatch.setattr(untrusted, "_CPU_SECONDS", 0.3)
    with pytest.raises(InvalidField, match=r"takes more than 0\.3 s"):
        check_tokenizer(path)


def test_a_panic_at_a_text_fails_one_request(tmp_path):
    """Past `except Exception` it would end the engine."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer(r"(?:a|b|aa)+$")))
    made = TextTokenizer.read(path)
    with pytest.raises(InternalError, match="the tokenizer fails on this text: PanicException"):
        made.encode("a" * 5000 + "c")
    assert made.encode("ab") == (2,)


@pytest.mark.parametrize(
    "error", [ValueError("two\nlines"), KeyError("vocab"), RecursionError(), SystemError("x")]
)
def test_any_error_of_a_parser_is_one_sentence(error):
    """It names the file, the field and the kind of error."""
    with pytest.raises(InvalidField) as caught, refusing("file", "weights"):
        raise error
    assert caught.value.message.startswith(f"file cannot be read: {type(error).__name__}")
    assert "\n" not in caught.value.message
    assert caught.value.metadata == {"field": "weights"}


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), InternalError("bug")])
def test_what_no_file_is_to_blame_for_passes(error):
    """Memory that ran out, an interrupt, and errors that have their type."""
    for guard in (refusing("file", "weights"), encoding()):
        with pytest.raises(type(error)), guard:
            raise error
