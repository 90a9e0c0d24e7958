"""The same request gets the same answer: again, in company, and on either pipeline."""

import random

import pytest
from legato_client import Client, Options, Sampling

from tests.e2e.jobs import ask, ask_all, jobs
from tests.e2e.scenes import two_shapes
from tests.e2e.server import Server

IMAGE = two_shapes().image


def wild(seed=None):
    """Sampling that leaves much to chance."""
    return Sampling(temperature=3.0, top_p=1.0, max_tokens=20, seed=seed)


def test_a_seed_repeats(client):
    """One seed gives one answer; of several seeds the answers differ."""
    answers = [
        client.query(IMAGE, "What is this?", sampling=wild(seed)).answer for seed in (1, 1, 2, 3)
    ]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3


def test_a_request_id_repeats(client):
    """Without a seed the request id is one, so that a retry answers the same."""
    ids = ("one", "one", "two", "three")
    answers = [
        client.query(
            IMAGE, "What is this?", sampling=wild(), options=Options(request_id=name)
        ).answer
        for name in ids
    ]
    assert answers[0] == answers[1]
    assert len(set(answers)) == 3


def test_temperature_0_is_greedy(client):
    """Without chance the seed does not matter."""
    answers = {
        client.caption(IMAGE, sampling=Sampling(temperature=0.0, seed=seed)).caption
        for seed in (1, 2)
    }
    assert len(answers) == 1


@pytest.mark.parametrize("shuffle", [1, 2])
async def test_company_changes_nothing(server, alone, shuffle):
    """All jobs at once, in any order, answer as they do one at a time."""
    bag = list(zip(jobs(), alone, strict=True))
    random.Random(shuffle).shuffle(bag)
    assert await ask_all(server.address, [job for job, _ in bag]) == [said for _, said in bag]


@pytest.mark.slow
async def test_the_blocking_loop_answers_the_same(tmp_path, alone):
    """`--pipeline-depth 1` gives the answers of the pipelined server, alone and in company."""
    with Server(tmp_path, "--pipeline-depth", "1") as blocking:
        assert await ask_all(blocking.address, jobs()) == alone
        with Client(blocking.address) as client:
            assert [ask(client, job) for job in jobs()[::3]] == alone[::3]
