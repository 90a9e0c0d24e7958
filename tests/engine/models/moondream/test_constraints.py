"""The tokens that each state of a skill may sample."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.models.moondream.config import Suppression
from legato_engine.models.moondream.frontend import MoondreamFrontend
from legato_engine.models.moondream.presets import moondream2_config, tiny_random_config
from legato_engine.models.moondream.tasks import Allow, constraint_table
from legato_engine.models.moondream.tokenizer import StandInTokenizer
from legato_engine.sequence import Constraint, SampledToken
from legato_engine.types import (
    CachedImage,
    CaptionTask,
    DetectTask,
    PointTask,
    QueryTask,
    Request,
    RequestKey,
    SamplingParams,
    SegmentTask,
)

from tests.fakes import successor

EOS, ANSWER, COORD, SIZE = 0, 3, 5, 6


@pytest.fixture
def table():
    """Moondream 2's table, or one with other suppression rules."""

    def make(suppression=None):
        config = msgspec.structs.replace(moondream2_config(), suppression=suppression)
        return constraint_table(config)

    return make


def test_every_state_has_its_row(table):
    """Moondream 2's table has one constraint for each name, and the first allows everything."""
    assert len(table()) == len(Allow)
    assert table()[Allow.FREE] == Constraint()


def test_values_come_in_their_order(table):
    """Between objects only a coord or EOS is allowed, within them only the next value."""
    made = table()
    assert made[Allow.DETECT_Y].allowed == made[Allow.POINT_Y].allowed == (COORD,)
    assert made[Allow.DETECT_SIZE].allowed == (SIZE,)
    assert set(made[Allow.DETECT_X].allowed) == {COORD, EOS} == set(made[Allow.POINT_X].allowed)
    assert made[Allow.ANSWER].allowed == (ANSWER,)


def test_moondream2_suppresses(table):
    """An answer has no answer id and no values, reasoning no EOS and no size."""
    made = table()
    assert set(made[Allow.TEXT].suppressed) == {ANSWER, COORD, SIZE}
    assert made[Allow.FORMATTED] == made[Allow.TEXT]
    assert set(made[Allow.REASONING].suppressed) == {EOS, SIZE}


def test_a_model_may_suppress_nothing(table):
    """A config without ids leaves text and reasoning free."""
    made = table(Suppression())
    assert made[Allow.TEXT] == Constraint()
    assert made[Allow.REASONING].suppressed == ()


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


def frontend_with(num_answer_tokens):
    """Of a tiny model whose answers are opened by so many tokens."""
    config = tiny_random_config()
    assert config.templates.query is not None
    suffix = (ANSWER,) * num_answer_tokens
    query = msgspec.structs.replace(config.templates.query, suffix=suffix)
    templates = msgspec.structs.replace(config.templates, query=query)
    made = msgspec.structs.replace(config, templates=templates)
    return MoondreamFrontend(made, StandInTokenizer())


FRONTENDS = {count: frontend_with(count) for count in (1, 2, 3)}


@given(
    spec=st.sampled_from(
        [
            DetectTask(object="cup", max_objects=4),
            PointTask(object="cup", max_objects=4),
            QueryTask(question="why?", reasoning=True),
            QueryTask(question="why?"),
            CaptionTask(),
            SegmentTask(object="cup"),
        ]
    ),
    num_answer_tokens=st.sampled_from(list(FRONTENDS)),
    draw=st.randoms(use_true_random=False),
)
def test_the_table_leads_where_the_tasks_go(spec, num_answer_tokens, draw):
    """After every token that a task's constraint allows, its next one is the table's successor."""
    frontend = FRONTENDS[num_answer_tokens]
    table = frontend.constraints
    request = Request(
        request_id=RequestKey("r"),
        task=spec,
        image=CachedImage(image_id="i"),
        sampling=SamplingParams(max_tokens=30),
    )
    task = frontend.make_task(request)
    assert task.uses_transition_table
    constraint = task.constraint()
    while task.finish_reason is None:
        assert task.constraint() == constraint
        allowed, suppressed = table[constraint][:2]
        likely = [EOS, ANSWER, ANSWER, COORD, SIZE, *range(20, 24)]
        token = draw.choice([t for t in allowed or likely if t not in suppressed])
        task.consume(SampledToken(token, (draw.random(), 0.5)))
        constraint = successor(table, constraint, token)
