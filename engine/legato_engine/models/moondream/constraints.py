"""Which tokens a skill may sample next; launches carry indices into this table."""

from __future__ import annotations

import enum

from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.tasks import Constraint


class Allow(enum.IntEnum):
    """Index of each constraint in the model's table."""

    FREE = 0
    COORD = 1
    SIZE = 2
    COORD_OR_EOS = 3
    TEXT = 4  # answers and captions
    REASONING = 5
    ANSWER = 6  # the token that opens an answer


def constraint_table(config: MoondreamConfig) -> tuple[Constraint, ...]:
    """Constraints in the order of `Allow`."""
    tokens, suppressed = config.tokens, config.suppressed
    return (
        Constraint(),
        Constraint(allowed=(tokens.coord,)),
        Constraint(allowed=(tokens.size,)),
        Constraint(allowed=(tokens.coord, tokens.eos)),
        Constraint(suppressed=suppressed.answer),
        Constraint(suppressed=suppressed.reasoning),
        Constraint(allowed=(tokens.answer,)),
    )
