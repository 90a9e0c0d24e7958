"""A GGUF file's settings of conversations."""

from __future__ import annotations

from legato_engine.errors import InvalidField
from legato_engine.models.budget import SamplingDefaults
from legato_engine.models.decoder.settings import ModelSettings
from legato_engine.models.gguf.reader import GgufFile
from legato_engine.models.gguf.tokenizer import end_tokens, special_tokens

_TEMPLATE = "tokenizer.chat_template"


def gguf_settings(file: GgufFile) -> ModelSettings:
    """The ends of answers, the chat template and its special tokens; sampling is greedy."""
    template = file.metadata.get(_TEMPLATE)
    if template is not None and not isinstance(template, str):
        raise InvalidField(f"{file.path.name}: {_TEMPLATE} is no text", field="weights")
    return ModelSettings(end_tokens(file), SamplingDefaults(), template, special_tokens(file))
