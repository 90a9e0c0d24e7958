"""Streams outlive their server: another one goes on, with the shipped client."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from legato_client import (
    AsyncClient,
    Client,
    DetectTask,
    Options,
    QueryTask,
    Sampling,
    TextDelta,
    TokensDelta,
)

from tests.e2e.scenes import two_shapes
from tests.e2e.server import Server

NULL = ("--model", "null", "--null-step-ms")
LONG = QueryTask("How many?", sampling=Sampling(max_tokens=60))
WILD = QueryTask(
    "How many?", sampling=Sampling(temperature=100.0, top_p=1.0, max_tokens=120, seed=11)
)
SLOW = "engine.launch=sleep(0.1)"
"""A failpoint: an answer of the server takes seconds."""


@contextlib.contextmanager
def started(folder: Path, name: str, *options: str, **variables: str) -> Iterator[Server]:
    own = folder / name
    own.mkdir()
    with Server(own, *options, environment=variables) as server:
        yield server


def both(one: Server, other: Server) -> str:
    """The name of both, between which the client's channel takes turns."""
    return f"ipv4:{one.address},{other.address}"


def said(events: list[Any]) -> tuple[str, list[int], Any]:
    """The text of the deltas, the tokens that they told, and the last event."""
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    telling = [event for event in events if isinstance(event, (TextDelta, TokensDelta))]
    return text, [token.token_id for event in telling for token in event.tokens], events[-1]


def end(server: Server) -> None:
    """As a machine that is lost: nothing of it answers any more."""
    engines = server.engine_pids
    server.process.kill()
    for pid in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait()


def ending(read: Iterator[Any], is_lost: Callable[[list[Any]], bool], server: Server) -> list[Any]:
    """The events of a stream whose server is ended once `is_lost` says so of those so far."""
    events: list[Any] = []
    for event in read:
        events.append(event)
        if server.process.poll() is None and is_lost(events):
            end(server)
    return events


def words(events: list[Any]) -> int:
    return sum(isinstance(event, TextDelta) for event in events)


def test_another_server_goes_on(tmp_path: Path) -> None:
    """No word is lost, doubled or changed, and the result tells of the loss."""
    with (
        started(tmp_path, "lost", *NULL, "500") as lost,
        started(tmp_path, "other", *NULL, "1") as other,
    ):
        with Client(other.address) as client:
            expected = said(list(client.generate(None, LONG)))
        with Client(both(lost, other)) as client:
            for number in itertools.count():  # the channel decides where a stream begins
                name = f"robot-{number}"
                stream = client.generate(None, LONG, options=Options(request_id=name))
                events = ending(stream, lambda told: lost.load().running == words(told) == 1, lost)
                if lost.process.poll() is not None:
                    break
        text, _, last = said(events)
        assert text == expected[0]
        assert last.result.answer == text
        assert last.result.info.resumptions == 1
        assert last.result.info.request_id == name
        assert last.result.info.usage.output_tokens == 60
        other.settle()


@pytest.mark.slow
async def test_another_server_goes_on_for_asyncio_too(tmp_path: Path) -> None:
    """Also twice, for a stream that loses two servers."""
    with contextlib.ExitStack() as stack:
        lost = [stack.enter_context(started(tmp_path, f"{n}", *NULL, "500")) for n in range(2)]
        other = stack.enter_context(started(tmp_path, "other", *NULL, "1"))
        name = "ipv4:" + ",".join(each.address for each in (*lost, other))
        async with AsyncClient(other.address) as client:
            expected = said([event async for event in client.generate(None, LONG)])
        async with AsyncClient(name) as client:
            while True:
                events = [e async for e in _ending(client, lost)]
                if any(each.process.poll() is not None for each in lost):
                    break
        text, _, last = said(events)
        assert text == expected[0]
        assert last.result.answer == text
        assert last.result.info.resumptions in (1, 2)


async def _ending(client: AsyncClient, lost: list[Server]) -> AsyncIterator[Any]:
    """Ends each slow server that has the stream, after its first word."""
    async for event in client.generate(None, LONG):
        yield event
        if isinstance(event, TextDelta):
            for each in lost:
                if each.process.poll() is None and each.load().running:
                    end(each)


@pytest.mark.slow
def test_a_model_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Seeded text, and boxes, of legato-tiny on a CPU: equal token for token."""
    scene, options = two_shapes().file(), Options(return_tokens=True)
    tasks = (WILD, DetectTask("red circle"))
    with started(tmp_path, "other") as other:
        with Client(other.address) as client:
            expected = [said(list(client.generate(scene, each, options=options))) for each in tasks]
        with (
            started(tmp_path, "lost", LEGATO_FAILPOINTS=SLOW) as lost,
            Client(both(lost, other)) as client,
        ):
            while lost.process.poll() is None:
                events = ending(
                    client.generate(scene, WILD, options=options),
                    lambda told: words(told) >= 1 and lost.load().running == 1,
                    lost,
                )
            found = said(list(client.generate(scene, tasks[1], options=options)))
        assert said(events)[:2] == expected[0][:2]
        last: Any = events[-1]
        assert last.result.info.resumptions == 1
        assert last.result.info.tokens == expected[0][2].result.info.tokens
        assert found[1] == expected[1][1]
