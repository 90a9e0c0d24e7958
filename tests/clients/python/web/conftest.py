"""One HTTP server for the tests here; those that need other settings start their own."""

from __future__ import annotations

import openai
import pytest

from tests.clients.python.web.serving import serving


@pytest.fixture(scope="package")
def running_web():
    """In front of a scripted server."""
    with serving() as web:
        yield web


@pytest.fixture
def web(running_web):
    """That server with an empty script, and nothing asked so far."""
    running_web.fake.script.clear()
    running_web.fake.requests.clear()
    running_web.fake.stream_ended.clear()
    running_web.fake.num_completed = 0
    return running_web


@pytest.fixture(scope="package")
def client(running_web):
    """OpenAI's client, which repeats nothing."""
    with openai.OpenAI(base_url=f"{running_web.url}/v1", api_key="x", max_retries=0) as made:
        yield made
