"""Resuming a request that a lost engine had begun."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import repeat

from legato_engine.core.requests import Resumed
from legato_engine.core.results import FinishReason
from legato_engine.core.tokens import TokenInfo
from legato_engine.errors import InvalidField
from legato_engine.models.frontend import ModelFrontend
from legato_engine.sequence import NO_PAYLOAD, Sequence
from legato_engine.tasks import SampledToken, tokens_of


def replay(sequence: Sequence, resumed: Resumed, frontend: ModelFrontend) -> list[TokenInfo]:
    """Bring a new sequence to where its outputs were; return the described tokens.

    Its prefill then computes prompt and tokens at once, as after a preemption, and the next token
    is sampled at the position it would have had. The events of the tokens were sent already.

    Raises:
        InvalidField: the tokens cannot be of this request.
    """
    task = sequence.task
    if bool(resumed.payloads) != (task.has_payload and bool(resumed.token_ids)):
        wanted = "two for each token" if task.has_payload else "none: the task has no values"
        raise InvalidField(wanted, field="resume_from.values")
    infos: list[TokenInfo] = []
    for index, token in enumerate(_tokens(resumed)):
        _check(sequence, token.token_id, index, frontend)
        infos += tokens_of(task.consume(token))
        sequence.commit(token)
    sequence.progress.num_launched = sequence.num_committed
    sequence.timing.first_token = resumed.first_token
    return infos


def ended_as(sequence: Sequence) -> FinishReason | None:
    """The finish reason of a sequence whose last token is committed."""
    if sequence.num_committed == sequence.task.max_tokens:
        return sequence.task.finish_reason or FinishReason.LENGTH
    return sequence.task.finish_reason


def _check(sequence: Sequence, token_id: int, index: int, frontend: ModelFrontend) -> None:
    """A token outside of the vocabulary would read memory that is no embedding."""
    field = f"resume_from.token_ids[{index}]"
    if ended_as(sequence) is not None:
        raise InvalidField("the answer has ended before it", field=field)
    constraint = frontend.constraints[sequence.task.constraint()]
    allowed = constraint.allowed is None or token_id in constraint.allowed
    if not (0 <= token_id < frontend.vocab_size and allowed) or token_id in constraint.suppressed:
        raise InvalidField("the task allows no such token here", field=field)


def _tokens(resumed: Resumed) -> Iterator[SampledToken]:
    """Raises InvalidField where something is not told of every token."""
    told: tuple[tuple[str, Sized], ...] = (
        ("values", resumed.payloads),
        ("logprobs", resumed.logprobs),
        ("certainties", resumed.certainties),
    )
    for name, values in told:
        if values and len(values) != len(resumed.token_ids):
            problem = f"{len(values)} for {len(resumed.token_ids)} tokens"
            raise InvalidField(problem, field=f"resume_from.{name}")
    payloads = resumed.payloads or repeat(NO_PAYLOAD)
    logprobs = resumed.logprobs or repeat(None)
    certainties = resumed.certainties or repeat(None)
    return map(SampledToken, resumed.token_ids, payloads, logprobs, certainties)
