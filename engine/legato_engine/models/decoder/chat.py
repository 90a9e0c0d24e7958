"""Chat templates: a question as the model was taught to read one."""

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
Render = Callable[[Sequence[Message]], str]


class Plain:
    """No template: the prompt is the text itself, for the model to go on with."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, task: QueryTask) -> tuple[int, ...]:
        """Ids of the prompt; raises `TaskUnsupported` for a conversation."""
        if task.system or task.history:
            raise TaskUnsupported("without a chat template there is but one question", task="query")
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
        try:
            self._render(_messages(QueryTask(question="?")))
        except InvalidField as error:
            raise InvalidField(error.message, field="weights") from None

    def encode(self, task: QueryTask) -> tuple[int, ...]:
        """Ids of the prompt; raises `InvalidField` when the template refuses what is said.

        What looks like a special token in a text is text. Then the template's own is encoded apart
        from it; else all of it together, as the model's authors do.
        """
        messages = _messages(task)
        texts = [message["content"] for message in messages]
        if not any(map(self._tokenizer.has_special, texts)):
            return self._tokenizer.encode_marked(self._render(messages))
        stand_ins = [
            {"role": message["role"], "content": _STAND_IN.format(index)}
            for index, message in enumerate(messages)
        ]
        before, *rest = _STOOD_IN.split(self._render(stand_ins))
        if rest[::2] != [str(index) for index in range(len(texts))]:
            raise InvalidField(
                "there are special tokens, which this chat template cannot take as text",
                field="question",
            )
        ids = [self._tokenizer.encode_marked(before)]
        for text, behind in zip(texts, rest[1::2], strict=True):
            ids += [self._tokenizer.encode(text), self._tokenizer.encode_marked(behind)]
        return tuple(token_id for part in ids for token_id in part)


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

    def render(messages: Sequence[Message]) -> str:
        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                chat_template=template,
                add_generation_prompt=True,
                enable_thinking=False,
                **names,
            )
        except jinja2.TemplateError as error:
            raise InvalidField(f"the chat template: {error}", field="question") from None
        text: str = rendered[0][0]  # one text for each conversation, then what is of no use here
        return text

    return render
