"""What only the asyncio face of a session can get wrong."""

from __future__ import annotations

import asyncio

import pytest
from legato_client import AsyncClient, AsyncSession, CaptionTask, FrameResult

from tests.clients.python.until import until

JPEG = b"picture"


async def answered(session: AsyncSession) -> int:
    """The frame of the next result."""
    answer = await anext(session)
    assert isinstance(answer, FrameResult)
    return answer.sequence


async def test_giving_up_waiting_ends_nothing(server):
    """A cancelled `send` or `anext` leaves the stream, its credits and its answers as they were."""
    server.sessions.on_frame = lambda said, frame: None
    async with AsyncClient(server.target) as client, client.session([CaptionTask()]) as session:
        for _ in range(2):
            await session.send(JPEG)
        for waiting in (session.send(JPEG), anext(session)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 0.02)
        conversation = server.sessions.last
        await asyncio.to_thread(until, lambda: len(conversation.frames) == 2)
        server.sessions.on_frame = type(conversation).answer
        for frame in conversation.frames:
            conversation.answer(frame)
        assert [await answered(session) for _ in range(2)] == [1, 2]
        assert await session.send(JPEG) == 3
        assert await answered(session) == 3
    assert not conversation.violations


async def test_a_slow_image_holds_no_other_up(server, tmp_path):
    """Frames that are read from files while others are sent keep growing sequences."""
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG)
    server.sessions.frame_credits = 20
    async with AsyncClient(server.target) as client, client.session([CaptionTask()]) as session:
        sends = (session.send(path if number % 2 else JPEG) for number in range(20))
        sent = await asyncio.gather(*sends)
        in_order = [await answered(session) for _ in range(20)]
    assert set(sent) == set(in_order)
    assert in_order == [*range(1, 21)]
    assert not server.sessions.last.violations
