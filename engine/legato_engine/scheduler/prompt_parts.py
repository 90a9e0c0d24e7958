"""How many tokens of a prompt a launch computes while others decode.

Decodes run in the last pass over the weights of their launch, or not at all beside a long prompt.
So a launch with many tokens makes them wait.
"""

from __future__ import annotations

from legato_engine.scheduler.launch import BatchLimits

_FEW_MORE_PASSES = 4 / 3
"""Passes of a prompt in parts, to those of the whole."""


def shared_part(
    num_tokens: int, num_beside: int, limits: BatchLimits, *, others_wait: bool, may_join: bool
) -> int:
    """Tokens of the next launch, of a prompt of so many; 0: it is not cut.

    `num_beside` decodes share the launch; 0: all decodes have one of their own after it.

    Parts beside decodes are the smallest that add few passes, or none while other prompts wait,
    which these delay. If all add more, a prompt too long to share a launch has the largest, and any
    other is whole; so it is where another `may_join` it.
    """
    size = limits.pass_tokens
    fits = num_tokens + num_beside <= limits.tokens
    if not size or num_tokens + num_beside <= size or (fits and (may_join or not num_beside)):
        return 0
    largest = limits.tokens // size * size - num_beside
    if not num_beside:
        return largest
    most: float = -(-(num_tokens + num_beside if fits else num_tokens) // size)
    most *= 1 if others_wait else _FEW_MORE_PASSES
    for room in range(size - num_beside, min(largest + 1, num_tokens), size):
        if _num_passes(num_tokens, room, num_beside, size) <= most:
            return room
    return 0 if fits else largest


def _num_passes(num_tokens: int, room: int, num_beside: int, size: int) -> int:
    """Of a prompt in parts of `room` tokens, each beside the decodes, in passes of `size`."""
    num_parts, rest = divmod(num_tokens, room)
    last = -(-(rest + num_beside) // size) if rest else 0
    return num_parts * ((room + num_beside) // size) + last
