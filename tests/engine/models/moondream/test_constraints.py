"""The tokens that each state of a skill may sample."""

from __future__ import annotations

import msgspec
import pytest
from legato_engine.models.moondream.config import Suppression
from legato_engine.models.moondream.constraints import Allow, constraint_table
from legato_engine.models.moondream.presets import moondream2_config
from legato_engine.tasks import Constraint

EOS, ANSWER, COORD, SIZE = 0, 3, 5, 6


@pytest.fixture
def table():
    """Moondream 2's table, or one with other suppression rules."""

    def make(suppression=None):
        config = msgspec.structs.replace(moondream2_config(), suppression=suppression)
        return constraint_table(config)

    return make


def test_every_state_has_its_row(table):
    """The table has one constraint for each name, and the first allows everything."""
    assert len(table()) == len(Allow)
    assert table()[Allow.FREE] == Constraint()


def test_values_come_in_their_order(table):
    """Between objects only a coord or EOS is allowed, within them only the next value."""
    made = table()
    assert made[Allow.COORD] == Constraint(allowed=(COORD,))
    assert made[Allow.SIZE] == Constraint(allowed=(SIZE,))
    assert set(made[Allow.COORD_OR_EOS].allowed) == {COORD, EOS}
    assert made[Allow.ANSWER] == Constraint(allowed=(ANSWER,))


def test_moondream2_suppresses(table):
    """An answer has no answer id and no values, reasoning no EOS and no size."""
    made = table()
    assert set(made[Allow.TEXT].suppressed) == {ANSWER, COORD, SIZE}
    assert set(made[Allow.REASONING].suppressed) == {EOS, SIZE}


def test_a_model_may_suppress_nothing(table):
    """A config without ids leaves text and reasoning free."""
    made = table(Suppression())
    assert made[Allow.TEXT] == made[Allow.REASONING] == Constraint()


@pytest.mark.parametrize(
    ("answer", "has_values"),
    [((), True), ((ANSWER,), True), ((ANSWER, COORD), True), ((COORD, SIZE), False)],
)
def test_text_rows_read_values_only_where_there_may_be_some(answer, has_values):
    """Text needs no payload if its constraint excludes coords and sizes."""
    suppression = Suppression(answer=answer)
    config = msgspec.structs.replace(moondream2_config(), suppression=suppression)
    assert config.has_values_in_text == has_values
    assert not moondream2_config().has_values_in_text
