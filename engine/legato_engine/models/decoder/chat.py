"""Prompts of conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from legato_engine.core.task_specs import QueryTask, Turn
from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models.decoder.template_process import Message, TemplateRefused, templates
from legato_engine.models.decoder.tokenizer import TextTokenizer

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

    def encode(self, task: QueryTask) -> tuple[int, ...]:
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
        self._render(_messages(QueryTask(question="?")), "weights")

    def end_of_turn(self) -> int | None:
        """Return the first added token that the template puts between an answer and a question."""
        talk = QueryTask(question="?", history=(Turn(question="?", answer="?"),))
        try:
            parts = self._parts(_messages(talk), "weights")
        except InvalidField:  # it takes no conversation
            return None
        answer = parts[1::2].index("1")
        return self._tokenizer.first_added(parts[2 * answer + 2])

    def encode(self, task: QueryTask) -> tuple[int, ...]:
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
        """The template's parts, alternating with message indices in any order."""
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


def _messages(task: QueryTask) -> list[Message]:
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
