"""A request's sampling and token budget."""

from __future__ import annotations

import math

import msgspec

from legato_engine.core.requests import Request, SamplingParams
from legato_engine.errors import InvalidField, PromptTooLong


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling for requests that leave it open."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int = 768


def resolve_sampling(request: Request, defaults: SamplingDefaults) -> SamplingParams:
    """Fill in all fields but `top_k`.

    Raises:
        InvalidField: a field is out of range.
    """
    asked = request.sampling
    seed = request.request_id.seed if asked.seed is None else asked.seed
    return fill_sampling(asked, defaults, seed)


def fill_sampling(asked: SamplingParams, defaults: SamplingDefaults, seed: int) -> SamplingParams:
    """As `resolve_sampling`, with a seed that is known."""
    sampling = SamplingParams(
        temperature=defaults.temperature if asked.temperature is None else asked.temperature,
        top_p=defaults.top_p if asked.top_p is None else asked.top_p,
        top_k=defaults.top_k if asked.top_k is None else asked.top_k,
        max_tokens=defaults.max_tokens if asked.max_tokens is None else asked.max_tokens,
        seed=seed,
        stop=asked.stop,
    )
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
