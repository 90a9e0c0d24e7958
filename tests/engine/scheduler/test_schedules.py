"""Ten thousand random schedules in tiny pools."""

import pytest

from tests.engine.scheduler.schedules import run_all

PARTS = 4
PART = 2_500

FOUND = (890271,)
"""Schedules that found a defect in a soak: the page that a copy is made of was never forgotten."""


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_changes_an_answer(part: int) -> None:
    """Preempted, aborted, stopped, sharing, short of pages or proposing: every request reads what
    it reads alone, all end, and every page has one owner all along.
    """
    totals = run_all(range(part * PART, (part + 1) * PART))
    assert totals.whole > 3 * PART
    assert totals.cached > totals.tokens / 10
    assert min(totals.preemptions, totals.drafts) > PART / 20
    assert totals.together > PART / 30
    assert min(totals.accepted, totals.rejected) > PART


def test_what_a_soak_has_found_stays_mended() -> None:
    """Each of them alone, as they are rare."""
    assert run_all(FOUND).requests > 0
