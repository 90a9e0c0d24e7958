"""How many tokens of a prompt a launch computes while others decode.

Decodes run in the last pass over the weights of their launch, or not at all beside a long prompt.
So a launch with many tokens makes them wait.
"""

from __future__ import annotations

from legato_engine.scheduler.launch import BatchLimits

_FEW_MORE_PASSES = 4 / 3
"""Passes of a prompt in parts, to those of the whole."""


def shared_part(
    num_tokens: int, num_decodes: int, limits: BatchLimits, *, others_wait: bool, may_join: bool
) -> int:
    """Tokens of the next launch, of a prompt of so many; 0: it is not cut.

    They share the launch with the decodes, or have it alone, before these have theirs, if the
    decodes are too many for it.

    Parts are the smallest that add few passes, or none while others wait, which these delay. If all
    add more, a prompt too long to share a launch has the largest, and any other is whole; so it is
    where another `may_join` it.
    """
    size = limits.pass_tokens
    if not size or not num_decodes or num_tokens + num_decodes <= size:
        return 0
    if num_decodes >= min(size, limits.sampled):
        return limits.tokens if num_tokens > limits.tokens else 0
    fits = num_tokens + num_decodes <= limits.tokens
    if fits and may_join:
        return 0
    most: float = -(-(num_tokens + num_decodes if fits else num_tokens) // size)
    most *= 1 if others_wait else _FEW_MORE_PASSES
    for room in range(size - num_decodes, min(limits.tokens - num_decodes, num_tokens), size):
        if _num_passes(num_tokens, room, num_decodes, size) <= most:
            return room
    return 0 if fits else limits.tokens // size * size - num_decodes


def _num_passes(num_tokens: int, room: int, num_decodes: int, size: int) -> int:
    """Of a prompt in parts of `room` tokens, each beside the decodes, in passes of `size`."""
    num_parts, rest = divmod(num_tokens, room)
    last = -(-(rest + num_decodes) // size) if rest else 0
    return num_parts * ((room + num_decodes) // size) + last
