"""Resuming a request that a lost engine had begun."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from legato_engine.core import FinishReason, Resumed, TokenInfo
from legato_engine.sequence import NO_PAYLOAD, Sequence
from legato_engine.tasks import SampledToken, tokens_of


def replay(sequence: Sequence, resumed: Resumed) -> list[TokenInfo]:
    """Bring a new sequence to where its outputs were; return the described tokens.

    Its prefill then computes prompt and tokens at once, as after a preemption, and the next token
    is sampled at the position it would have had. The events of the tokens were sent already.
    """
    task = sequence.task
    infos: list[TokenInfo] = []
    for token in _tokens(resumed):
        infos += tokens_of(task.consume(token))
        sequence.tokens.append((token.token_id, token.payload))
    sequence.progress.num_launched = sequence.num_committed
    sequence.timing.first_token = resumed.first_token
    return infos


def ended_as(sequence: Sequence) -> FinishReason | None:
    """The finish reason of a sequence whose last token is committed."""
    if sequence.num_committed == sequence.task.max_tokens:
        return sequence.task.finish_reason or FinishReason.LENGTH
    return sequence.task.finish_reason


def _tokens(resumed: Resumed) -> Iterator[SampledToken]:
    payloads = resumed.payloads or repeat(NO_PAYLOAD)
    logprobs = resumed.logprobs or repeat(None)
    return map(SampledToken, resumed.token_ids, payloads, logprobs)
