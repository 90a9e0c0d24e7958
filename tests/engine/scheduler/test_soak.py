"""The soak runs every schedule once, however it is divided."""

import dataclasses

import pytest

from tests.engine.scheduler import soak
from tests.engine.scheduler.schedules import Totals, run_all


def test_processes_change_nothing_but_the_time(capsys):
    """Two processes have the same totals as one."""
    last = []
    for processes in ("1", "2"):
        assert soak.main(["--schedules", "90", "--first", "7", "--processes", processes]) == 0
        last.append(capsys.readouterr().out.splitlines()[-1].split(": ", 1)[1])
    assert last[0] == last[1] == str(run_all(range(7, 97)))


@pytest.mark.parametrize(("total", "processes"), [(1, 16), (100, 1), (1_000_000, 16)])
def test_parts_are_small_enough_to_end_together(total, processes):
    """No part is empty or too large."""
    size = soak.part_size(total, processes)
    assert 1 <= size <= soak.MAX_PART_SIZE
    assert size * processes <= max(total, processes)


def test_totals_add_up():
    """`join` adds every field."""
    names = [field.name for field in dataclasses.fields(Totals)]
    one = Totals(**{name: 1 + index for index, name in enumerate(names)})
    one.join(Totals(**dict.fromkeys(names, 10)))
    assert [getattr(one, name) for name in names] == [11 + index for index in range(len(names))]
