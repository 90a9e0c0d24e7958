"""The cut of a launch into passes, and their staging."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.passes import (
    PROMPT,
    ScheduledPrompt,
    ScheduledToken,
    cut_passes,
    num_groups,
    stage_pass,
    stage_step,
)
from legato_engine.scheduler.launch import ScheduledSequence

NO_VALUE = (0.0, 0.0)


def decode(row, position):
    """A row that feeds its newest token."""
    sequence: Any = SimpleNamespace(row=row)
    return ScheduledSequence(sequence, position)


def prompt(row, start, count):
    """A prompt whose token ids encode row and position."""
    return ScheduledPrompt(row, start, [(1000 * row + start + n, NO_VALUE) for n in range(count)])


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_scheduled_once_after_earlier_ones(seed):
    """Passes are as few as possible, and the sampled tokens come first in the last one."""
    draw = random.Random(seed)
    most = draw.choice((4, 8, 32))
    num_prompts = draw.randint(1, min(4, most))
    decodes = [decode(n, draw.randint(1, 99)) for n in range(draw.randint(0, most - num_prompts))]
    prompts = [
        prompt(100 + n, draw.randint(0, 50), draw.randint(1, most)) for n in range(num_prompts)
    ]
    passes = cut_passes(decodes, prompts, most)
    total = len(decodes) + sum(len(each.tokens) for each in prompts)
    assert len(passes) == -(-total // most)
    assert all(0 < len(tokens) <= most for tokens in passes)
    assert sum(map(len, passes)) == total
    sampled = passes[-1][: len(decodes) + num_prompts]
    assert [(t.row, t.position, t.source) for t in sampled[: len(decodes)]] == [
        (row.sequence.row, row.position, row.sequence.row) for row in decodes
    ]
    for token, each in zip(sampled[len(decodes) :], prompts, strict=True):
        last = each.start + len(each.tokens) - 1
        assert (token.row, token.position, token.token) == (each.row, last, each.tokens[-1])
    for each in prompts:
        fed = [
            (number, token)
            for number, tokens in enumerate(passes)
            for token in tokens
            if token.row == each.row
        ]
        assert all(token.source == PROMPT for _, token in fed)
        by_position = sorted(fed, key=lambda item: item[1].position)
        assert [token.token for _, token in by_position] == each.tokens
        numbers = [number for number, _ in by_position]
        assert numbers == sorted(numbers), "a later token runs in an earlier pass"


@pytest.mark.parametrize(
    ("rows", "groups"),
    [("a", 1), ("aaaaaaaa", 1), ("aaaaaaaaa", 2), ("abc", 3), ("abbbbbbbbbba", 4), ("aba", 3)],
)
def test_neighbours_of_one_row_are_groups(rows, groups):
    """A group is a run of up to eight tokens; a row with two runs has two groups."""
    assert num_groups([ScheduledToken(ord(row), 0) for row in rows], 8) == groups


@pytest.fixture
def slot():
    """A slot of eight tokens."""
    device = CpuDevice(1)
    made = DecodeSlot(
        device, max_rows=8, max_pages=2, max_prompt=8, width=1, vocab_size=9, dtype=torch.float32
    )
    for host in made.staged.hosts:
        for field in host.values():
            field.fill(77)
    yield made
    device.close()


def staged(slot, copy, count):
    """The first entries of the staged positions."""
    fields = ("row", "source", "position", "fresh")
    return [slot.staged.hosts[copy][field][:count].tolist() for field in fields]


def test_a_pass_is_staged_with_what_it_writes_first(slot):
    """`fresh` is the first position of a token's row in this pass; the entries after it are
    padding.
    """
    passes = cut_passes([decode(1, 20)], [prompt(2, 5, 3), prompt(3, 0, 3)], 4)
    assert len(passes) == 2
    stage_pass(slot, 0, passes[0], 4, 6)
    assert staged(slot, 0, 4) == [[2, 2, 3, 6], [-1, -1, -1, 6], [5, 6, 0, 0], [5, 5, 0, 1]]
    stage_pass(slot, 1, passes[1], 8, 6)
    assert staged(slot, 1, 8) == [
        [1, 2, 3, 3, 6, 6, 6, 6],
        [1, -1, -1, -1, 6, 6, 6, 6],
        [20, 7, 2, 1, 0, 0, 0, 0],
        [20, 7, 1, 1, 1, 1, 1, 1],
    ]
    assert slot.staged.hosts[1]["token"][1:4].tolist() == [2007, 3002, 3001]
    assert np.all(slot.staged.hosts[1]["payload"][:4] == 0)


def test_a_step_is_staged_up_to_its_bucket(slot):
    """Every row feeds its own newest token."""
    stage_step(slot, [decode(1, 20), decode(4, 9)], 4, 6)
    expected = [[1, 4, 6, 6], [1, 4, 6, 6], [20, 9, 0, 0], [20, 9, 1, 1]]
    assert staged(slot, 0, 4) == expected
    assert staged(slot, 0, 8)[0][4:] == [77] * 4
