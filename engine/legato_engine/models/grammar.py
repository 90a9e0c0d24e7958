"""Compilation of the grammars that answers must match, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models.text import Vocabulary
from legato_engine.sequence import Grammar, grammar_refused
from legato_engine.types import AnswerFormat

if TYPE_CHECKING:
    import llguidance

_MAX_SOURCE = 65_536  # bytes of a schema or grammar
_MAX_CHOICES = 1_024


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

    def compile(self, wanted: AnswerFormat | None) -> Grammar | None:
        """Return the start of a text that matches; None if any text does.

        Raises:
            InvalidField: The source is too long, not of its language, uses what is not implemented,
                or is too complex.
            TaskUnsupported: llguidance is missing, or no token ends an answer.
        """
        if wanted is None:
            return None
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
            raise grammar_refused(field, str(error)) from None
        if matcher.is_error():
            raise grammar_refused(field, matcher.get_error())
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


def _source(wanted: AnswerFormat) -> tuple[str, str]:
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
        raise grammar_refused(field, f"{size} bytes; at most {_MAX_SOURCE}")
    if len(wanted.choices) > _MAX_CHOICES:
        raise grammar_refused(field, f"{len(wanted.choices)} choices; at most {_MAX_CHOICES}")
    if not all(wanted.choices):
        raise grammar_refused(field, "a choice is empty")
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
