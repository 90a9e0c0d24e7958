"""Chat templates: a question as the model was taught to read one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from legato_engine.errors import InvalidField
from legato_engine.models.decoder.tokenizer import TextTokenizer

_STAND_IN = "\ue000question\ue000"  # letters of private use, in no template


class Plain:
    """No template: the prompt is the text itself, for the model to go on with."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, question: str) -> tuple[int, ...]:
        """Ids of the prompt."""
        return self._tokenizer.encode(question, opened=True)


class ChatTemplate:
    """One turn of a user, then the model's to begin.

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
            self._render("?")
        except InvalidField as error:
            raise InvalidField(error.message, field="weights") from None

    def encode(self, question: str) -> tuple[int, ...]:
        """Ids of the prompt; raises `InvalidField` when the template refuses the question.

        What looks like a special token in a question is text. Then the template's text before and
        behind it is encoded apart from it; else all of it together, as the model's authors do.
        """
        if not self._tokenizer.has_special(question):
            return self._tokenizer.encode_marked(self._render(question))
        parts = self._render(_STAND_IN).split(_STAND_IN)
        if len(parts) != 2:
            raise InvalidField(
                "the question has special tokens, which this chat template cannot take as text",
                field="question",
            )
        before, behind = map(self._tokenizer.encode_marked, parts)
        return (*before, *self._tokenizer.encode(question), *behind)


def _compiled(template: str, variables: Mapping[str, str]) -> Callable[[str], str]:
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    names: Mapping[str, Any] = variables

    def one_turn(question: str) -> str:
        try:
            rendered: Any = render_jinja_template(
                [[{"role": "user", "content": question}]],
                chat_template=template,
                add_generation_prompt=True,
                enable_thinking=False,
                **names,
            )
        except jinja2.TemplateError as error:
            raise InvalidField(f"the chat template: {error}", field="question") from None
        text: str = rendered[0][0]  # one text for each conversation, then what is of no use here
        return text

    return one_turn
