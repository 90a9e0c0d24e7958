"""The frontend of text models: chat prompts and the generation task."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models.decoder.template_process import Message, TemplateRefused, templates
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.models.grammar import GrammarCompiler
from legato_engine.models.text import (
    Detokenizer,
    SamplingDefaults,
    TaskSetup,
    TextTask,
    task_setup,
)
from legato_engine.sequence import Constraint
from legato_engine.types import (
    SKILL_OF_TASK,
    AnswerFormat,
    ImageProperties,
    PromptToken,
    QuerySpec,
    Request,
    TaskSpec,
    Turn,
)

if TYPE_CHECKING:
    from legato_engine.models.decoder.config import DecoderConfig  # loads torch

_PLACEHOLDER = "\ue000{}\ue000"  # private-use characters, in no template
_PLACEHOLDERS = re.compile("\ue000(\\d+)\ue000")


class Shown(NamedTuple):
    """Parts of a message before character `offset` of question `turn`, as templates take images."""

    turn: int
    offset: int
    parts: Sequence[dict[str, str]]


class Plain:
    """Prompts without a template: the question itself."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def check(self) -> None:
        """Any text is a prompt."""

    def end_of_turn(self) -> None:
        """Return None: there are no conversations."""

    def encode(self, task: QuerySpec, shown: Sequence[Shown] = ()) -> tuple[int, ...]:
        assert not shown, "images need a chat template"
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
        self._template = template
        self._variables = variables
        self._tokenizer = tokenizer

    def check(self) -> None:
        """Raise InvalidField if no question would have a prompt."""
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

    def encode(self, task: QuerySpec, shown: Sequence[Shown] = ()) -> tuple[int, ...]:
        """Encode the conversation as the template renders it.

        A message with the text of a special token is encoded apart, so that it stays text;
        otherwise all is encoded together, as the model's authors do.

        Raises:
            InvalidField: the template refuses or omits a message.
        """
        messages = _messages(task, shown)
        has_turns = len(messages) > 1
        field = "messages" if has_turns else "question"
        texts = [text for message in messages for text in _texts(message)]
        forged = any(map(self._tokenizer.has_special, texts))
        parts = self._parts(messages, field) if has_turns or forged else []
        if not forged:
            return self._tokenizer.encode_marked(self._render(messages, field))
        ids = list(self._tokenizer.encode_marked(parts[0]))
        for index, text in zip(parts[1::2], parts[2::2], strict=True):
            ids += self._tokenizer.encode(texts[int(index)])
            ids += self._tokenizer.encode_marked(text)
        return tuple(ids)

    def _render(self, messages: Sequence[Message], field: str) -> str:
        try:
            return templates.render(self._template, self._variables, messages)
        except TemplateRefused as error:
            raise InvalidField(f"the chat template: {error}", field=field) from None

    def _parts(self, messages: Sequence[Message], field: str) -> list[str]:
        """Split the rendered template into texts, alternating with indices of `_texts`.

        Those are in any order.
        """
        numbers = itertools.count()
        placeholders = [
            _changed(message, lambda _: _PLACEHOLDER.format(next(numbers))) for message in messages
        ]
        parts = _PLACEHOLDERS.split(self._render(placeholders, field))
        told, number = set(parts[1::2]), itertools.count()
        for index, message in enumerate(messages):
            if not {str(next(number)) for _ in _texts(message)} <= told:
                raise InvalidField(
                    f"the chat template leaves out message {index}, of the role {message['role']}",
                    field=field,
                )
        return parts


def _messages(task: QuerySpec, shown: Sequence[Shown] = ()) -> list[Message]:
    questions = [*(turn.question for turn in task.history), task.question]
    messages: list[Message] = []
    if task.system:
        messages.append({"role": "system", "content": task.system})
    for index, question in enumerate(questions):
        among = [each for each in shown if each.turn == index]
        content = _interleaved(question, among) if among else question
        messages.append({"role": "user", "content": content})
        if index < len(task.history):
            messages.append({"role": "assistant", "content": task.history[index].answer})
    return messages


def _interleaved(text: str, shown: Sequence[Shown]) -> list[dict[str, str]]:
    """Put parts, in ascending order of their offsets, between the pieces of a text."""
    content: list[dict[str, str]] = []
    start = 0
    for _, offset, parts in [*shown, Shown(0, len(text), ())]:
        if piece := text[start:offset]:
            content.append({"type": "text", "text": piece})
        content += parts
        start = max(start, offset)
    return content


def _texts(message: Message) -> list[str]:
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def _changed(message: Message, change: Callable[[str], str]) -> Message:
    """Return a message with its texts changed in order."""
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": change(content)}
    parts = [
        part | {"text": change(part["text"])} if part["type"] == "text" else part
        for part in content
    ]
    return {"role": message["role"], "content": parts}


# ---------------------------------------------------------------- frontend

_log = structlog.get_logger()

FREE: tuple[Constraint, ...] = (Constraint(),)
"""The constraints of plain text."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextSetup:
    """Parts of a frontend; any id of `eos` ends an answer."""

    name: str
    prompter: Plain | ChatTemplate
    tokenizer: TextTokenizer
    eos: frozenset[int]
    sampling: SamplingDefaults
    config: DecoderConfig


class TextFrontend(ModelFrontend):
    """A thread-safe `ModelFrontend` without images."""

    tasks: tuple[str, ...] = ("query",)
    constraints = FREE

    def __init__(self, setup: TextSetup) -> None:
        self.name = setup.name
        self.vocab_size = setup.config.vocab_size
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
                token=setup.tokenizer.token(end),
                token_id=end,
                eos={token_id: setup.tokenizer.token(token_id) for token_id in sorted(setup.eos)},
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

    def check_images(self, task: TaskSpec, sizes: Sequence[tuple[int, int]]) -> None:
        raise _no_images("image")

    def make_task(self, request: Request, images: Sequence[PreparedImage] = ()) -> TextTask:
        task = request.task
        skill = SKILL_OF_TASK[type(task)]
        if not isinstance(task, QuerySpec):
            raise TaskUnsupported(f"this model has no {skill} skill", task=skill)
        if request.image is not None or task.spatial_refs or task.shows_image:
            raise _no_images(skill)
        if task.reasoning:
            raise TaskUnsupported("this model has no query with reasoning", task=skill)
        prompt = tuple(map(PromptToken, self._setup.prompter.encode(task)))
        if not prompt:
            raise InvalidField("the question is empty", field="question")
        return TextTask(
            self._task_setup(request, prompt, self._setup.sampling, task.response_format),
            self._answer(request),
        )

    def _answer(self, request: Request) -> Detokenizer:
        return Detokenizer(self._setup.tokenizer, request.sampling.stop)

    def _task_setup(
        self,
        request: Request,
        prompt: tuple[PromptToken, ...],
        defaults: SamplingDefaults,
        response_format: AnswerFormat | None = None,
    ) -> TaskSetup:
        setup = task_setup(
            request,
            prompt,
            defaults,
            pieces=self._setup.tokenizer,
            eos=self._eos,
            max_context=self._setup.config.max_context,
        )
        return dataclasses.replace(setup, grammar=self._grammars.compile(response_format))


def _no_images(skill: str) -> TaskUnsupported:
    return TaskUnsupported("this model takes no images", task=skill)
