"""A request's stream of outputs, and callers that watch the timeline."""

import asyncio
from contextlib import aclosing

import pytest
from legato_engine.client.request_stream import MAX_LOOSE, RequestStream, merge_events
from legato_engine.client.timeline_watch import MAX_UNREAD, TimelineWatch
from legato_engine.errors import (
    DeadlineExceeded,
    EngineLost,
    InternalError,
    PromptTooLong,
    to_value,
)
from legato_engine.ipc.messages import Done, Failed, LaunchSpan, OutputDelta, TimelineBatch
from legato_engine.types import (
    Event,
    FinishReason,
    ImageBox,
    ImagePoint,
    OutlineEvent,
    PointEvent,
    QueryOutput,
    QuerySpec,
    ReasoningEvent,
    Request,
    RequestKey,
    RequestTimings,
    TextEvent,
    TokenInfo,
    TokensEvent,
    TokenUsage,
)

DONE = Done(
    request_id=RequestKey("r"),
    result=QueryOutput(answer="ab"),
    finish_reason=FinishReason.STOP,
    usage=TokenUsage(input_tokens=1, output_tokens=2),
    timings=RequestTimings(),
)


def delta(*events):
    """A delta of request r."""
    return OutputDelta(request_id=RequestKey("r"), events=events)


@pytest.fixture
def aborted():
    """Streams that called `on_abort`."""
    return []


@pytest.fixture
def stopped():
    """Streams that called `on_stop`."""
    return []


@pytest.fixture
def stream(aborted, stopped):
    """A stream under test."""
    request = Request(request_id=RequestKey("r"), task=QuerySpec(question="?"))
    return RequestStream(request, on_abort=aborted.append, on_stop=stopped.append)


async def test_a_stopped_stream_is_read_to_its_end(stream, stopped, aborted):
    """Outputs until the end are still delivered."""
    stream.feed(delta(TextEvent(text="a")))
    stream.stop()
    assert (stopped, aborted) == ([stream], [])
    stream.feed(DONE)
    stream.stop()
    assert stopped == [stream], "an ended stream has nothing to stop"
    assert [r async for r in stream] == [delta(TextEvent(text="a")), DONE]


async def test_lagging_consumer_gets_one_delta(stream):
    """Unread deltas are merged, with neighbouring text joined."""
    for text in "abc":
        stream.feed(delta(TextEvent(text=text)))
    stream.feed(DONE)
    assert [r async for r in stream] == [delta(TextEvent(text="abc")), DONE]


async def test_an_unread_stream_holds_its_text_and_few_objects(stream):
    """4,000 tokens are merged while none is read, and no text is lost or out of order."""
    words = [f"{number} " for number in range(4000)]
    for word in words:
        stream.feed(delta(TextEvent(text=word)))
    assert len(stream._pending) <= 2 * MAX_LOOSE + len(words) // MAX_LOOSE
    stream.feed(DONE)
    first, *rest = [output async for output in stream]
    assert [event.text for event in first.events] == ["".join(words)]
    assert rest == [DONE]


async def test_prompt_consumer_gets_each_delta(stream):
    """A reader that keeps up gets every delta as it was sent."""
    for text in "ab":
        stream.feed(delta(TextEvent(text=text)))
        assert await anext(stream) == delta(TextEvent(text=text))


async def test_failure_is_raised_once(stream):
    """The reader gets the error, then the end."""
    stream.feed(Failed(request_id=RequestKey("r"), error=to_value(PromptTooLong("long", limit=4))))
    with pytest.raises(PromptTooLong) as caught:
        await anext(stream)
    assert caught.value.metadata == {"limit": "4"}
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_nothing_follows_the_end(stream):
    """Outputs after the last one are dropped."""
    stream.feed(DONE)
    stream.feed(delta(TextEvent(text="x")))
    stream.fail(EngineLost("gone"))
    assert [r async for r in stream] == [DONE]


async def test_abort_wakes_the_reader(stream, aborted):
    """A waiting reader sees the end; a second abort has no effect."""
    reader = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    stream.abort()
    stream.abort()
    assert await reader is None
    assert aborted == [stream]


async def test_abort_after_the_end_is_not_sent(stream, aborted):
    """The engine has no such request any more."""
    stream.feed(DONE)
    stream.abort()
    assert aborted == []


async def test_cancelled_read_loses_nothing(stream):
    """An output that arrives after a cancelled read is delivered by the next one."""
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.feed(DONE)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert await anext(stream) == DONE


def test_merge_keeps_order_and_all_content():
    """Only neighbours of one kind are joined; boxes, points and tokens are all kept."""
    token = TokenInfo(token_id=1, text="a")
    box = ImageBox(x_min=0, y_min=0, x_max=1, y_max=1)
    point = PointEvent(point=ImagePoint(x=0, y=0), label="x")
    events: list[Event] = [
        ReasoningEvent(text="r", tokens=(token,)),
        ReasoningEvent(text="s", tokens=(token,)),
        TokensEvent(tokens=(token,)),
        TokensEvent(tokens=(token, token)),
        TextEvent(text="a", tokens=(token,)),
        TextEvent(text="b", tokens=(token,)),
        point,
        point,
        TextEvent(text="c"),
        OutlineEvent(index=0, box=box),
        OutlineEvent(index=0, path_delta="M"),
        OutlineEvent(index=1, path_delta="L"),
        OutlineEvent(index=1, box=box),
    ]
    assert merge_events(events) == (
        ReasoningEvent(text="rs", tokens=(token, token)),
        TokensEvent(tokens=(token, token, token)),
        TextEvent(text="ab", tokens=(token, token)),
        point,
        point,
        TextEvent(text="c"),
        OutlineEvent(index=0, box=box, path_delta="M"),
        OutlineEvent(index=1, path_delta="L"),
        OutlineEvent(index=1, box=box),
    )


async def test_done_resolves_at_the_end(stream):
    """Earlier outputs do not wake its reader."""
    waiting = asyncio.ensure_future(stream.done())
    await asyncio.sleep(0)
    stream.feed(delta(TextEvent(text="a")))
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.feed(DONE)
    assert await waiting == DONE


async def test_done_after_the_end(stream):
    """A result that has arrived is returned without waiting."""
    stream.feed(delta(TextEvent(text="a")))
    stream.feed(DONE)
    assert await stream.done() == DONE


async def test_done_raises_the_failure(stream):
    """The error is raised whatever was unread."""
    waiting = asyncio.ensure_future(stream.done())
    await asyncio.sleep(0)
    stream.feed(delta(TextEvent(text="a")))
    stream.fail(EngineLost("gone"))
    with pytest.raises(EngineLost):
        await waiting


async def test_done_of_an_aborted_stream(stream):
    """An aborted stream has no result; its waiting reader gets an error."""
    waiting = asyncio.ensure_future(stream.done())
    await asyncio.sleep(0)
    stream.abort()
    with pytest.raises(InternalError):
        await waiting


async def test_reading_after_a_cancelled_done(stream):
    """A cancelled wait for the result leaves the stream as it was."""
    waiting = asyncio.ensure_future(stream.done())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.feed(delta(TextEvent(text="a")))
    async with asyncio.timeout(5):
        assert await reading == delta(TextEvent(text="a"))


async def test_a_deadline_after_the_end_takes_nothing_from_the_reader(stream, aborted):
    """It passes between the arrival of the last output and its read."""
    stream.feed(delta(TextEvent(text="ab")))
    stream.feed(DONE)
    stream.abort(DeadlineExceeded("the deadline passed"))
    assert [output async for output in stream][-1] == DONE
    assert aborted == []


# ---------------------------------------------------------------- timeline watch


def batch(number, *, started=1):
    """Return a batch of one span with this launch, of the engine that started then."""
    span = LaunchSpan("slot 0", "held", 0, 1, number, "decode", 1, 0, 0)
    return TimelineBatch(spans=(span,), started=started)


async def test_the_engine_is_asked_while_a_caller_watches():
    """The first watcher begins, a new engine is asked again, the last watcher ends it."""
    asked: list[bool] = []
    watch = TimelineWatch(asked.append)
    watch.renew()
    assert asked == []
    batches = watch.batches()
    async with aclosing(batches):
        pending = anext(batches)
        task = asyncio.ensure_future(pending)
        await asyncio.sleep(0)
        assert asked == [True]
        watch.renew()
        watch.deliver(batch(1))
        assert (await task).batch.spans[0].launch == 1
    assert asked == [True, True, False]


async def test_a_slow_watcher_loses_the_oldest():
    """What a caller leaves unread is bounded, and it is told how much it lost."""
    watch = TimelineWatch(lambda _: None)
    async with aclosing(watch.batches()) as batches:
        watch.deliver(batch(0))  # before the first read: not watched yet
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        watch.deliver(batch(1))
        assert (await task).lost == 0
        for number in range(2, MAX_UNREAD + 10):
            watch.deliver(batch(number))
        first, second = await anext(batches), await anext(batches)
        assert (first.batch.spans[0].launch, first.lost) == (10, 8)
        assert (second.batch.spans[0].launch, second.lost) == (11, 0)


async def test_what_the_engine_dropped_counts_as_lost():
    """Launches are numbered, so it does not matter who lost them."""
    watch = TimelineWatch(lambda _: None)
    async with aclosing(watch.batches()) as batches:
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        for number in (5, 9):
            watch.deliver(batch(number))
        assert ((await task).lost, (await anext(batches)).lost) == (0, 3)


async def test_the_launches_of_another_engine_begin_anew():
    """No launch is lost between an engine and the next, whatever their numbers."""
    watch = TimelineWatch(lambda _: None)
    async with aclosing(watch.batches()) as batches:
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        for number, started in ((5, 1), (9, 2), (0, 3), (2, 3)):
            watch.deliver(batch(number, started=started))
        lost = [(await task).lost, *[(await anext(batches)).lost for _ in range(3)]]
        assert lost == [0, 0, 0, 1]


async def test_watchers_share_what_the_engine_sends():
    """The engine is asked to end only when the last one leaves, and nothing is kept then."""
    asked: list[bool] = []
    watch = TimelineWatch(asked.append)
    first, second = watch.batches(), watch.batches()
    tasks = [asyncio.ensure_future(anext(each)) for each in (first, second)]
    await asyncio.sleep(0)
    shared = batch(1)
    watch.deliver(shared)
    assert [(await task).batch is shared for task in tasks] == [True, True]
    await first.aclose()
    assert False not in asked
    await second.aclose()
    assert asked[-1] is False
    assert not watch._watchers
