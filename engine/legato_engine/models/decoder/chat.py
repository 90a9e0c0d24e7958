"""Chat templates: a question, and what was said before it, as the model was taught to read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from legato_engine.core import QueryTask
from legato_engine.errors import InvalidField, TaskUnsupported
from legato_engine.models.decoder.tokenizer import TextTokenizer

_STAND_IN = "\ue000{}\ue000"  # letters of private use, in no template
_STOOD_IN = re.compile("\ue000(\\d+)\ue000")

Message = dict[str, str]
Render = Callable[[Sequence[Message], str], str]
"""Messages and the field to name when the template refuses them."""


class Plain:
    """No template: the prompt is the text itself, for the model to go on with."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, task: QueryTask) -> tuple[int, ...]:
        """Ids of the prompt; raises `TaskUnsupported` for a conversation."""
        if task.system or task.history:
            raise TaskUnsupported(
                "this model has no chat template: it takes one question, and no conversation",
                task="query",
            )
        return self._tokenizer.encode(task.question, opened=True)


class ChatTemplate:
    """The turns of a conversation, the last one for the model to begin.

    Templates are programs: they run in jinja's sandbox. `variables` are the special tokens by the
    names that templates give them. Models that can think before they answer are told not to.
    """

    def __init__(
        self, template: str, variables: Mapping[str, str], tokenizer: TextTokenizer
    ) -> None:
        """Raises `InvalidField` for a template that does not run."""
        self._render = _compiled(template, variables)
        self._tokenizer = tokenizer
        self._render(_messages(QueryTask(question="?")), "weights")

    def encode(self, task: QueryTask) -> tuple[int, ...]:
        """Ids of the prompt.

        What looks like a special token in a text is text. Then the template's own is encoded apart
        from it; else all of it together, as the model's authors do.

        Raises `InvalidField` when the template refuses what is said, such as a role, or would leave
        out a message: of a conversation it names `messages`.
        """
        messages = _messages(task)
        talk = len(messages) > 1
        field = "messages" if talk else "question"
        forged = any(self._tokenizer.has_special(message["content"]) for message in messages)
        parts = self._parts(messages, field) if talk or forged else []
        if not forged:
            return self._tokenizer.encode_marked(self._render(messages, field))
        ids = list(self._tokenizer.encode_marked(parts[0]))
        for index, behind in zip(parts[1::2], parts[2::2], strict=True):
            ids += self._tokenizer.encode(messages[int(index)]["content"])
            ids += self._tokenizer.encode_marked(behind)
        return tuple(ids)

    def _parts(self, messages: Sequence[Message], field: str) -> list[str]:
        """The template's own text, by turns with the index of the message that stands there.

        In whatever order: some templates put the system before the last question.
        """
        stand_ins = [
            {"role": message["role"], "content": _STAND_IN.format(index)}
            for index, message in enumerate(messages)
        ]
        parts = _STOOD_IN.split(self._render(stand_ins, field))
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


def _compiled(template: str, variables: Mapping[str, str]) -> Render:
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    names: Mapping[str, Any] = variables

    def render(messages: Sequence[Message], field: str) -> str:
        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                chat_template=template,
                add_generation_prompt=True,
                enable_thinking=False,
                **names,
            )
        except jinja2.TemplateError as error:
            raise InvalidField(f"the chat template: {error}", field=field) from None
        text: str = rendered[0][0]  # one text for each conversation, then what is of no use here
        return text

    return render
