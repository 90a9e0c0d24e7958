"""The frontend of text models: chat prompts and the generation task."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models.decoder.template_process import Message, TemplateRefused, templates
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.frontend import PreparedImage
from legato_engine.models.grammar import GrammarCompiler, Vocabulary
from legato_engine.models.text import (
    SamplingDefaults,
    TextOutput,
    TokenLog,
    resolve_sampling,
    token_budget,
)
from legato_engine.sequence import Constraint, Grammar, SampledToken, with_token
from legato_engine.types import (
    SKILL_OF_TASK,
    CalibrationInfo,
    Event,
    FinishReason,
    ImageProperties,
    PromptToken,
    QueryOutput,
    QuerySpec,
    Request,
    SamplingParams,
    Turn,
)

_PLACEHOLDER = "\ue000{}\ue000"  # private-use characters, in no template
_PLACEHOLDERS = re.compile("\ue000(\\d+)\ue000")

Render = Callable[[Sequence[Message], str], str]
"""Renders messages; errors name the given field."""


class Plain:
    """Prompts without a template: the question itself."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def check(self) -> None:
        """Any text is a prompt."""

    def end_of_turn(self) -> None:
        """Return None: there are no conversations."""

    def encode(self, task: QuerySpec) -> tuple[int, ...]:
        if task.system or task.history:
            raise TaskUnsupported(
                "this model has no chat template: it takes one question and no conversation",
                task="query",
            )
        return self._tokenizer.encode(task.question, opened=True)


class ChatTemplate:
    """A chat template in jinja's sandbox and a process of its own, with thinking turned off.

    `variables`: special tokens by the names that templates use.
    """

    def __init__(
        self, template: str, variables: Mapping[str, str], tokenizer: TextTokenizer
    ) -> None:
        """Start the process that renders; `check` waits for it."""
        templates.start()
        self._render = _renderer(template, variables)
        self._tokenizer = tokenizer

    def check(self) -> None:
        self._render(_messages(QuerySpec(question="?")), "weights")

    def end_of_turn(self) -> int | None:
        """Return the first added token that the template puts between an answer and a question."""
        talk = QuerySpec(question="?", history=(Turn(question="?", answer="?"),))
        try:
            parts = self._parts(_messages(talk), "weights")
        except InvalidField:  # it takes no conversation
            return None
        answer = parts[1::2].index("1")
        return self._tokenizer.first_added(parts[2 * answer + 2])

    def encode(self, task: QuerySpec) -> tuple[int, ...]:
        """Encode the conversation as the template renders it.

        A message with the text of a special token is encoded apart, so that it stays text;
        otherwise all is encoded together, as the model's authors do.

        Raises:
            InvalidField: the template refuses or omits a message.
        """
        messages = _messages(task)
        has_turns = len(messages) > 1
        field = "messages" if has_turns else "question"
        forged = any(self._tokenizer.has_special(message["content"]) for message in messages)
        parts = self._parts(messages, field) if has_turns or forged else []
        if not forged:
            return self._tokenizer.encode_marked(self._render(messages, field))
        ids = list(self._tokenizer.encode_marked(parts[0]))
        for index, text in zip(parts[1::2], parts[2::2], strict=True):
            ids += self._tokenizer.encode(messages[int(index)]["content"])
            ids += self._tokenizer.encode_marked(text)
        return tuple(ids)

    def _parts(self, messages: Sequence[Message], field: str) -> list[str]:
        """Split the rendered template into texts, alternating with message indices in any order."""
        placeholders = [
            {"role": message["role"], "content": _PLACEHOLDER.format(index)}
            for index, message in enumerate(messages)
        ]
        parts = _PLACEHOLDERS.split(self._render(placeholders, field))
        for index, message in enumerate(messages):
            if str(index) not in parts[1::2]:
                raise InvalidField(
                    f"the chat template leaves out message {index}, of the role {message['role']}",
                    field=field,
                )
        return parts


def _messages(task: QuerySpec) -> list[Message]:
    said = [("system", task.system)] if task.system else []
    for turn in task.history:
        said += [("user", turn.question), ("assistant", turn.answer)]
    said.append(("user", task.question))
    return [{"role": role, "content": content} for role, content in said]


def _renderer(template: str, variables: Mapping[str, str]) -> Render:
    def render(messages: Sequence[Message], field: str) -> str:
        try:
            return templates.render(template, variables, messages)
        except TemplateRefused as error:
            raise InvalidField(f"the chat template: {error}", field=field) from None

    return render


# ---------------------------------------------------------------- task

# The task of generating text.


class TextTask:
    """A `Task` that ends with an EOS, a stop string, the end of a grammar or its budget."""

    has_payload = False
    reasoning_tokens = 0

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        eos: frozenset[int],
        answer: TextOutput,
        log: TokenLog | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.prompt = tuple(map(PromptToken, prompt))
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.grammar = grammar
        self.constrained = grammar is not None
        self.uses_transition_table = grammar is None
        self.finish_reason: FinishReason | None = None
        self._eos = eos
        self._answer = answer
        self._log = log
        self._num_consumed = 0

    def constraint(self) -> int:
        return 0

    def consume(self, token: SampledToken) -> list[Event]:
        self._num_consumed += 1
        events: list[Event] = []
        if token.token_id in self._eos:
            self.finish_reason = FinishReason.STOP
        else:
            if self.grammar is not None:
                self.grammar.accept(token.token_id)
            events = self._answer.push(token.token_id)
            if self._answer.stopped or (self.grammar is not None and self.grammar.is_complete):
                self.finish_reason = FinishReason.STOP
            elif self._num_consumed == self.max_tokens:
                self.finish_reason = FinishReason.LENGTH
        if self._log is not None:
            events = with_token(events, self._log.read(token))
        return events if self.finish_reason is None else events + self._answer.close()

    def result(self, finish_reason: FinishReason) -> QueryOutput:
        self._answer.close()
        return QueryOutput(answer=self._answer.text)


# ---------------------------------------------------------------- frontend

# The frontend of text models.

_log = structlog.get_logger()

FREE: tuple[Constraint, ...] = (Constraint(),)
"""The constraints of plain text."""


class Prompter(Protocol):
    """Makes a prompt of a question and its conversation."""

    def check(self) -> None:
        """Raise InvalidField if no question would have a prompt."""

    def end_of_turn(self) -> int | None:
        """Return the token that follows an answer in a conversation, if there is one."""

    def encode(self, task: QuerySpec) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class TextSetup:
    """Parts of a frontend; any id of `eos` ends an answer."""

    name: str
    prompter: Prompter
    tokenizer: Vocabulary
    token: Callable[[int], str]
    eos: frozenset[int]
    sampling: SamplingDefaults
    max_context: int
    vocab_size: int


class TextFrontend:
    """A thread-safe `ModelFrontend` without images."""

    max_images = 0
    places_images = False
    tasks: tuple[str, ...] = ("query",)
    constraints = FREE
    confidence: CalibrationInfo | None = None
    notice = ""

    def __init__(self, setup: TextSetup) -> None:
        self.name = setup.name
        self.vocab_size = setup.vocab_size
        self._setup = setup
        self._end_at(setup.eos)

    def check(self) -> None:
        """Try the model's chat template, and end answers where it ends them.

        The files of many models name another token, the end of a document, or none: then an answer
        would run on into turns that the model makes up.

        Raises:
            InvalidField: the template makes no prompt of a question.
        """
        setup = self._setup
        setup.prompter.check()
        end = setup.prompter.end_of_turn()
        if end is not None and end not in setup.eos:
            _log.warning(
                "end_of_turn_is_no_eos",
                reason="the chat template ends turns with a token that the model's files do not "
                "name as an end: answers end there too",
                token=setup.token(end),
                token_id=end,
                eos={token_id: setup.token(token_id) for token_id in sorted(setup.eos)},
            )
            self._end_at(setup.eos | {end})
        if not self._eos:
            _log.warning(
                "no_end_of_answer",
                reason="neither the model's files nor its chat template name a token that ends an "
                "answer: each one ends at max_tokens or a stop string",
            )

    def _end_at(self, eos: frozenset[int]) -> None:
        self._eos = eos
        self._grammars = GrammarCompiler(self._setup.tokenizer, self.vocab_size, eos)

    def prepare_image(self, image_rgb: Any, key: str, info: ImageProperties) -> PreparedImage:
        raise _no_images("image")

    def resizing_on_device(self) -> TextFrontend:
        return self

    def keeping_images(self) -> TextFrontend:
        return self

    def prefix_length(self, has_image: bool) -> int:
        """0, because the prompt holds any BOS."""
        return 0

    def check_images(self, sizes: Sequence[tuple[int, int]]) -> None:
        raise _no_images("image")

    def make_task(self, request: Request, images: Sequence[PreparedImage] = ()) -> TextTask:
        setup, task = self._setup, request.task
        skill = SKILL_OF_TASK[type(task)]
        if not isinstance(task, QuerySpec):
            raise TaskUnsupported(f"this model has no {skill} skill", task=skill)
        if request.image is not None or task.spatial_refs or task.shows_image:
            raise _no_images(skill)
        if task.reasoning:
            raise TaskUnsupported("this model has no query with reasoning", task=skill)
        prompt = setup.prompter.encode(task)
        if not prompt:
            raise InvalidField("the question is empty", field="question")
        sampling = resolve_sampling(request, setup.sampling)
        wanted = sampling.max_tokens or setup.sampling.max_tokens
        max_tokens = token_budget(wanted, len(prompt), setup.max_context)
        stop = request.sampling.stop
        answer = TextOutput(setup.tokenizer, stop)
        log = None
        if request.return_tokens:
            log = TokenLog(
                setup.tokenizer, logprobs=request.logprobs, top_logprobs=request.top_logprobs
            )
        grammar = None
        if task.response_format is not None:
            grammar = self._grammars.compile(task.response_format)
        return TextTask(prompt, sampling, max_tokens, self._eos, answer, log, grammar)


def _no_images(skill: str) -> TaskUnsupported:
    return TaskUnsupported("this model takes no images", task=skill)
