"""Tasks and prompts of a text model's questions."""

from __future__ import annotations

from legato_engine.models.decoder.frontend import TextFrontend
from legato_engine.models.registry import resolve
from legato_engine.types import QuerySpec, Request, RequestKey

from tests.engine.models import hub_folder


def task_of(folder, spec, **fields):
    """The frontend's task for a request."""
    frontend = resolve("phi", weights=str(folder)).frontend
    assert isinstance(frontend, TextFrontend)
    frontend.check()
    return frontend.make_task(Request(request_id=RequestKey("r"), task=spec, **fields))


def prompt_of(folder, question):
    """Ids of a prompt."""
    return [token.token_id for token in task_of(folder, QuerySpec(question=question)).prompt]


def theirs(folder):
    """The tokenizer as transformers uses it."""
    from transformers import PreTrainedTokenizerFast  # takes seconds, not needed by most

    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=hub_folder.BOS,
        eos_token=hub_folder.EOS,
        chat_template=hub_folder.CHAT,
    )
