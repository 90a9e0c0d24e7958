"""Grammars that answers must match: compilation and token masks, by llguidance.

Shape legend: W words of 32 tokens.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.types import ResponseFormat

if TYPE_CHECKING:
    import llguidance

_MAX_SOURCE = 65_536  # bytes of a schema or grammar
_MAX_CHOICES = 1_024


class Vocabulary(Protocol):
    """Tokens and their bytes; a special token has none."""

    def encode(self, text: str) -> Collection[int]: ...

    def piece(self, token_id: int) -> bytes: ...


class GrammarCompiler:
    """Compiler of grammars over one vocabulary; thread-safe.

    The first compilation prepares the vocabulary, in some 100 ms for 50,000 tokens.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos = sorted(eos)
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None

    def compile(self, wanted: ResponseFormat) -> Grammar:
        """Return the start of a text that matches.

        Raises:
            InvalidField: The source is too long, not of its language, uses what is not implemented,
                or is too complex.
            TaskUnsupported: llguidance is missing, or no token ends an answer.
        """
        field, source = _source(wanted)
        try:
            import llguidance
        except ImportError:
            raise TaskUnsupported(
                "response_format needs the package llguidance on the server", task="query"
            ) from None
        if not self._eos:
            raise TaskUnsupported("response_format needs a token that ends answers", task="query")
        try:
            grammar = _grammar(field, source)
            limits = llguidance.LLParserLimits(  # some 20 ms to compile, some 5 for a mask
                initial_lexer_fuel=500_000,
                step_lexer_fuel=50_000,
                step_max_items=20_000,
                max_lexer_states=20_000,
                max_grammar_size=100_000,
                verbose_errors=False,
            )
            matcher = llguidance.LLMatcher(self._prepared(), grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise _refused(field, str(error)) from None
        if matcher.is_error():
            raise _refused(field, matcher.get_error())
        return Grammar(matcher, field)

    def _prepared(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                import llguidance

                wrapped = llguidance.TokenizerWrapper(self)
                self._tokenizer = llguidance.LLTokenizer(wrapped, eos_token=self._eos)
            return self._tokenizer

    # ------------------------------------------------------------ as llguidance reads a tokenizer

    bos_token_id = None

    @property
    def eos_token_id(self) -> int:
        return self._eos[0]

    @property
    def tokens(self) -> list[bytes]:
        # llguidance marks special tokens so, which no text matches.
        pieces = map(self._vocabulary.piece, range(self._vocab_size))
        return [piece or b"\xff[%d]" % index for index, piece in enumerate(pieces)]

    @property
    def special_token_ids(self) -> list[int]:
        piece = self._vocabulary.piece
        return [index for index in range(self._vocab_size) if not piece(index)]

    def __call__(self, text: str) -> list[int]:
        return list(self._vocabulary.encode(text))


class Grammar:
    """State of an answer that must match, advanced token by token."""

    def __init__(self, matcher: llguidance.LLMatcher, field: str) -> None:
        self._matcher = matcher
        self._field = field

    @property
    def is_complete(self) -> bool:
        """Return whether the answer matches and nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def fill(self, words_W: npt.NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may follow, and clear all others.

        A grammar that turns out to be too complex sets all; `accept` then raises.
        """
        self._matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        if self._matcher.is_error():
            words_W.fill(-1)

    def allows(self, token_id: int) -> bool:
        return bool(self._matcher.validate_tokens([token_id]) == 1)

    def accept(self, token_id: int) -> None:
        """Advance by a token that `fill` allowed.

        Raises:
            InvalidField: The grammar is too complex to go on.
        """
        if not self._matcher.consume_token(token_id):
            raise _refused(self._field, self._matcher.get_error())


def _source(wanted: ResponseFormat) -> tuple[str, str]:
    """Return the set field's name and its text, choices as JSON; check their sizes."""
    texts = {
        "json_schema": wanted.json_schema,
        "regex": wanted.regex,
        "grammar": wanted.grammar,
        "choices": json.dumps(wanted.choices) if wanted.choices else "",
    }
    fields = [name for name, text in texts.items() if text]
    if len(fields) != 1:
        problem = "one of json_schema, regex, choices and grammar is set"
        raise InvalidField(problem, field="response_format")
    (field,) = fields
    size = len(texts[field].encode())
    if size > _MAX_SOURCE:
        raise _refused(field, f"{size} bytes; at most {_MAX_SOURCE}")
    if len(wanted.choices) > _MAX_CHOICES:
        raise _refused(field, f"{len(wanted.choices)} choices; at most {_MAX_CHOICES}")
    if not all(wanted.choices):
        raise _refused(field, "a choice is empty")
    return field, texts[field]


def _grammar(field: str, source: str) -> str:
    """Return llguidance's own form of a grammar; raise ValueError for what is none."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    matcher = llguidance.LLMatcher
    if field == "json_schema":
        schema = _schema(source)
        return matcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    if field == "regex":
        return matcher.grammar_from_regex(source)
    if field == "choices":
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(source))
        return matcher.grammar_from_lark("start: " + " | ".join(choices))
    return matcher.grammar_from_lark(any_to_lark(source))


def _schema(source: str) -> str:
    try:
        schema: Any = json.loads(source)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema is an object")
    return source


def _refused(field: str, problem: str) -> InvalidField:
    first = problem.strip().splitlines()[0] if problem.strip() else "not valid"
    return InvalidField(first[:300], field=f"response_format.{field}")
