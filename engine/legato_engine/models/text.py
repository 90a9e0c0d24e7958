"""Text generation: sampling defaults, token budget, detokenization, events, tasks."""

from __future__ import annotations

import abc
import codecs
import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from legato_engine.errors import InvalidField, PromptTooLong
from legato_engine.sequence import Grammar, SampledToken, with_token
from legato_engine.types import (
    Alternative,
    Event,
    FinishReason,
    PromptToken,
    QueryOutput,
    Request,
    SamplingParams,
    TaskOutput,
    TextEvent,
    TokenInfo,
)


def byte_of_letter() -> dict[str, int]:
    """Map letters to bytes: printable bytes are themselves, others count from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


# ---------------------------------------------------------------- budget


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling for requests that leave it open."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int = 768


def resolve_sampling(
    asked: SamplingParams, defaults: SamplingDefaults, seed: int
) -> SamplingParams:
    """Fill in all fields but `top_k`.

    Raises:
        InvalidField: a field is out of range.
    """
    known = {"seed": seed, **msgspec.structs.asdict(defaults)}
    left_open = {name: value for name, value in known.items() if getattr(asked, name) is None}
    sampling = msgspec.structs.replace(asked, **left_open)
    _check(sampling)
    return sampling


def max_objects(asked: int | None, default: int) -> int:
    if asked is not None and asked < 1:
        raise InvalidField("max_objects is at least 1", field="max_objects")
    return default if asked is None else asked


def token_budget(wanted: int, prompt_length: int, max_context: int) -> int:
    """Cut `wanted` tokens to the context; the last one needs no position.

    Raises:
        PromptTooLong: not even one token fits.
    """
    available = max_context - prompt_length + 1
    if available < 1:
        raise PromptTooLong(
            f"the prompt takes {prompt_length} positions, the context has {max_context}",
            limit=max_context,
            actual=prompt_length,
        )
    return min(wanted, available)


def _check(sampling: SamplingParams) -> None:
    temperature, top_p, max_tokens = sampling.temperature, sampling.top_p, sampling.max_tokens
    if temperature is None or not (math.isfinite(temperature) and temperature >= 0.0):
        raise InvalidField("temperature is a number of at least 0", field="temperature")
    if top_p is None or not 0.0 < top_p <= 1.0:
        raise InvalidField("top_p is in (0, 1]", field="top_p")
    if max_tokens is None or max_tokens < 1:
        raise InvalidField("max_tokens is at least 1", field="max_tokens")
    if any(not stop for stop in sampling.stop):
        raise InvalidField("a stop string is empty", field="stop")


@dataclasses.dataclass(slots=True)
class TokenLog:
    """Describes each token of a sequence, in order, by its text or its value.

    Log-probabilities and alternatives that the request does not want are dropped, because a launch
    computes them for all of its rows. `coord` and `size`: the ids that carry values.
    """

    pieces: Vocabulary
    logprobs: bool
    top_logprobs: int = 0
    coord: int | None = None
    size: int | None = None
    _decoder: codecs.IncrementalDecoder = dataclasses.field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("ignore"), init=False
    )

    def read(self, token: SampledToken) -> TokenInfo:
        """Describe a token; its text is what it completes, shown or not."""
        alternatives = self._alternatives(token) if self.top_logprobs else ()
        piece = self.pieces.piece(token.token_id)
        has_value = token.token_id in (self.coord, self.size)
        return TokenInfo(
            token_id=token.token_id,
            text=self._decoder.decode(piece),
            logprob=token.logprob if self.logprobs else None,
            coordinate=token.payload[0] if token.token_id == self.coord else None,
            size=token.payload if token.token_id == self.size else None,
            certainty=token.certainty if self.logprobs and has_value else None,
            alternatives=alternatives,
            piece=piece,
        )

    def _alternatives(self, token: SampledToken) -> tuple[Alternative, ...]:
        """Each with the text that it would have completed."""
        state = self._decoder.getstate()
        told = []
        for token_id, logprob in token.alternatives[: self.top_logprobs]:
            self._decoder.setstate(state)
            piece = self.pieces.piece(token_id)
            text = self._decoder.decode(piece)
            told.append(Alternative(token_id=token_id, text=text, logprob=logprob, piece=piece))
        self._decoder.setstate(state)
        return tuple(told)


# ---------------------------------------------------------------- detokenizer


class Vocabulary(Protocol):
    """Tokens of plain text."""

    def piece(self, token_id: int) -> bytes:
        """Return a token's bytes, perhaps part of a character; none for special ids."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Recognise no special tokens."""


class Detokenizer:
    """Joins tokens into text; the results of `push` and `close` add up to `text`.

    Bytes of an unfinished character wait for the rest, and text that may begin a stop string until
    that is decided. Leading whitespace and unfinished characters are dropped.
    """

    def __init__(self, tokenizer: Vocabulary, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Return the text that is final now; set `stopped` at a stop string."""
        if self.stopped:
            return ""
        pending = self._held + self._decoder.decode(self._tokenizer.piece(token_id))
        if not self.text:
            pending = pending.lstrip()
        if not self._stop:
            return self._show(pending)
        cut = min((at for stop in self._stop if (at := pending.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            self._held = ""
            return self._show(pending[:cut])
        shown = len(pending) - self._num_held(pending)
        self._held = pending[shown:]
        return self._show(pending[:shown])

    def close(self) -> str:
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, text: str) -> str:
        self.text += text
        return text

    def _num_held(self, pending: str) -> int:
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self._stop):
                return length
        return 0


# ---------------------------------------------------------------- tasks


@dataclasses.dataclass(frozen=True, slots=True)
class TaskSetup:
    """Parts of a task; `sampling` is resolved, and `max_tokens` fits the context."""

    prompt: tuple[PromptToken, ...]
    sampling: SamplingParams
    max_tokens: int
    eos: frozenset[int]
    log: TokenLog | None = None
    grammar: Grammar | None = None


def task_setup(
    request: Request,
    prompt: tuple[PromptToken, ...],
    defaults: SamplingDefaults,
    *,
    pieces: Vocabulary,
    eos: frozenset[int],
    max_context: int,
    prefix_length: int = 0,
    coord: int | None = None,
    size: int | None = None,
) -> TaskSetup:
    """Set a task up without a grammar; raise as `resolve_sampling` and `token_budget`."""
    sampling = resolve_sampling(request.sampling, defaults, request.request_id.seed)
    wanted = sampling.max_tokens or defaults.max_tokens
    max_tokens = token_budget(wanted, prefix_length + len(prompt), max_context)
    log = None
    if request.return_tokens:
        log = TokenLog(pieces, request.logprobs, request.top_logprobs, coord, size)
    return TaskSetup(prompt, sampling, max_tokens, eos, log)


class GenerationTask(abc.ABC):
    """A `Task` that ends with an EOS or its budget; `_read` may set `finish_reason`, too."""

    constrained = False
    uses_transition_table = True
    has_payload = False
    grammar: Grammar | None = None

    def __init__(self, setup: TaskSetup) -> None:
        self.prompt = setup.prompt
        self.sampling = setup.sampling
        self.max_tokens = setup.max_tokens
        self.finish_reason: FinishReason | None = None
        self._eos = setup.eos
        self._log = setup.log
        self._num_consumed = 0

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def constraint(self) -> int:
        return 0

    def consume(self, token: SampledToken) -> list[Event]:
        self._num_consumed += 1
        events: list[Event] = []
        if token.token_id in self._eos:
            self.finish_reason = FinishReason.STOP
        else:
            events = self._read(token)
        if self._log is not None:
            events = with_token(events, self._log.read(token))
        if self.finish_reason is None:
            if self._num_consumed < self.max_tokens:
                return events
            self.finish_reason = FinishReason.LENGTH
        return events + self._close()

    @abc.abstractmethod
    def _read(self, token: SampledToken) -> list[Event]: ...

    def _close(self) -> list[Event]:
        return []

    @abc.abstractmethod
    def result(self, finish_reason: FinishReason) -> TaskOutput: ...


class TextTask(GenerationTask):
    """An answer in text, which a stop string or the end of a grammar may end, too."""

    def __init__(self, setup: TaskSetup, answer: Detokenizer) -> None:
        super().__init__(setup)
        self.grammar = setup.grammar
        self.constrained = setup.grammar is not None
        self.uses_transition_table = setup.grammar is None
        self._answer = answer

    def _read(self, token: SampledToken) -> list[Event]:
        if self.grammar is not None:
            self.grammar.accept(token.token_id)
        events = _shown(self._answer.push(token.token_id))
        if self._answer.stopped or (self.grammar is not None and self.grammar.is_complete):
            self.finish_reason = FinishReason.STOP
        return events

    def _close(self) -> list[Event]:
        return _shown(self._answer.close())

    def result(self, finish_reason: FinishReason) -> TaskOutput:
        self._close()
        return QueryOutput(answer=self._answer.text)


def _shown(text: str) -> list[Event]:
    return [TextEvent(text=text)] if text else []
