"""Settings of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from legato_engine.errors import InvalidField
from legato_engine.models.budget import SamplingDefaults
from legato_engine.models.decoder.tokenizer import TextTokenizer
from legato_engine.models.untrusted import refusing

_TOKENIZER, _GENERATION = "tokenizer_config.json", "generation_config.json"
_TEMPLATE = "chat_template.jinja"
_SAMPLING = ("temperature", "top_p", "top_k")
_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSettings:
    """Any id of `eos` ends an answer; `specials` are special tokens by role."""

    eos: frozenset[int]
    sampling: SamplingDefaults
    template: str | None
    specials: dict[str, str]


def read_settings(
    folder: Path, tokenizer: TextTokenizer, model_eos: int | list[int] | None
) -> ModelSettings:
    """Read the folder's files, each of which may be missing.

    EOS are those of generation_config.json, or else `model_eos`, and the tokenizer's. A repetition
    penalty is ignored, because this server's sampling has none.
    """
    texts, generation = _read(folder / _TOKENIZER), _read(folder / _GENERATION)
    specials = {name: text for name in _SPECIALS if (text := _content(texts.get(name)))}
    ids = generation.get("eos_token_id", model_eos)
    eos = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if (own := tokenizer.token_id(specials.get("eos_token", ""))) is not None:
        eos.add(own)
    if not all(type(token_id) is int and token_id >= 0 for token_id in eos):
        raise InvalidField(f"{_GENERATION}: eos_token_id is {ids!r}", field="weights")
    return ModelSettings(frozenset(eos), _sampling(generation), _template(folder, texts), specials)


def _sampling(generation: dict[str, Any]) -> SamplingDefaults:
    if not generation.get("do_sample"):
        return SamplingDefaults()
    said = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    try:
        return msgspec.convert({"temperature": 1.0, **said}, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise InvalidField(f"{_GENERATION}: {error}", field="weights") from None


def _template(folder: Path, texts: dict[str, Any]) -> str | None:
    """Prefer the template's own file; of several in tokenizer_config.json, `default`."""
    if (folder / _TEMPLATE).is_file():
        with refusing(_TEMPLATE, "weights"):
            return (folder / _TEMPLATE).read_text(encoding="utf-8")
    template = texts.get("chat_template")
    if isinstance(template, list):
        with refusing(f"chat_template of {_TOKENIZER}", "weights"):
            named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise InvalidField(f"{_TOKENIZER}: chat_template is no text", field="weights")
    return template


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidField(f"{path.name} cannot be read: {error}", field="weights") from None
    if not isinstance(content, dict):
        raise InvalidField(f"{path.name} is no JSON object", field="weights")
    return content
