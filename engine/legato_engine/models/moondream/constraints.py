"""Which tokens a skill may sample next; launches carry indices into this table."""

from __future__ import annotations

import enum

from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.tasks import Constraint


class Allow(enum.IntEnum):
    """Index of each constraint in the model's table; those of a skill lead to one another."""

    FREE = 0
    DETECT_X = 1  # or the end of the list
    DETECT_Y = 2
    DETECT_SIZE = 3
    POINT_X = 4  # or the end of the list
    POINT_Y = 5
    TEXT = 6  # answers and captions
    REASONING = 7
    ANSWER = 8  # the second of the tokens that open an answer; an index each for further ones


def constraint_table(config: MoondreamConfig) -> tuple[Constraint, ...]:
    """Constraints in the order of `Allow`."""
    tokens, suppressed = config.tokens, config.suppressed
    coord, coord_or_eos, answer = (tokens.coord,), (tokens.coord, tokens.eos), (tokens.answer,)
    opened = [*range(Allow.ANSWER, Allow.ANSWER + config.num_answer_tokens - 1), Allow.TEXT]
    return (
        Constraint(),
        Constraint(allowed=coord_or_eos, then=Allow.DETECT_Y),
        Constraint(allowed=coord, then=Allow.DETECT_SIZE),
        Constraint(allowed=(tokens.size,), then=Allow.DETECT_X),
        Constraint(allowed=coord_or_eos, then=Allow.POINT_Y),
        Constraint(allowed=coord, then=Allow.POINT_X),
        Constraint(suppressed=suppressed.answer),
        Constraint(suppressed=suppressed.reasoning, then=opened[0], on=tokens.answer),
        *(Constraint(allowed=answer, then=after) for after in opened[1:]),
    )
