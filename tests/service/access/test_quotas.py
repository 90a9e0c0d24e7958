"""Quotas of credentials."""

from __future__ import annotations

import io

import pytest
from legato.v1 import image_pb2, inference_pb2, media_pb2
from legato_engine.errors import QuotaExceeded
from legato_service.access.principal import Principal, Quotas, RateLimit
from PIL import Image

from tests.service.access.tokens import Token, call_empty, write
from tests.service.harness import image_bytes, refusal, running
from tests.service.session.client import SessionClient, opening

QUESTION = inference_pb2.QueryRequest(question="How many?")
SLOW = 1e-3  # units a second: no test lasts long enough for a second one


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokens.toml"


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(limit, clock, times, amount=1.0):
    """How many of `times` attempts at one moment succeed."""
    count = 0
    for _ in range(times):
        try:
            limit.take(amount, "a")
        except QuotaExceeded:
            continue
        count += 1
    return count


def test_a_rate_allows_a_second_at_once_and_then_the_rate():
    clock = Clock()
    limit = RateLimit("requests_per_second", 5, clock)
    assert taken(limit, clock, 50) == 5
    for _ in range(10):
        clock.now += 0.2
        assert taken(limit, clock, 50) == 1
    clock.now += 100
    assert taken(limit, clock, 50) == 5, "a pause saves no more than a second"


def test_the_refusal_says_when_the_next_is_possible():
    clock = Clock()
    limit = RateLimit("requests_per_second", 2, clock)
    assert taken(limit, clock, 2) == 2
    with pytest.raises(QuotaExceeded) as caught:
        limit.take(1, "a")
    wait = int(caught.value.metadata["retry_after_ms"]) / 1000
    assert wait == pytest.approx(0.5)
    clock.now += wait - 0.01
    assert taken(limit, clock, 1) == 0
    clock.now += 0.02
    assert taken(limit, clock, 1) == 1


def test_an_amount_above_the_rate_is_paid_for_afterwards():
    """A large image under a small rate is delayed, not impossible."""
    clock = Clock()
    limit = RateLimit("pixels_per_second", 1000, clock)
    assert taken(limit, clock, 1, amount=5000) == 1
    clock.now += 4.5
    assert taken(limit, clock, 1, amount=1000) == 0
    clock.now += 0.6
    assert taken(limit, clock, 1, amount=5000) == 1


def test_processes_share_the_limits():
    """Each enforces its part; the engine counts held bytes for all."""
    quotas = Quotas(requests_per_second=8, pixels_per_second=100, image_bytes=7, sessions=5)
    assert quotas.shared_by(4) == Quotas(
        requests_per_second=2, pixels_per_second=25, image_bytes=7, sessions=2
    )
    assert Quotas().shared_by(4) == Quotas()


def test_a_session_that_fails_gives_its_place_back():
    principal = Principal("a", "t", frozenset(), quotas=Quotas(sessions=1))
    for _ in range(3):
        with pytest.raises(RuntimeError), principal.session():
            raise RuntimeError
    with principal.session(), pytest.raises(QuotaExceeded), principal.session():
        pass


async def test_calls_over_the_rate_are_refused_with_a_delay(path):
    """The details name the quota, its limit and the credential; other credentials go on."""
    slow = Token("slow", ["infer"], requests_per_second=f"{SLOW:f}")
    fast = Token("fast", ["infer"])
    async with running(tokens=write(path, slow, fast)) as server:
        await server.inference.Query(QUESTION, metadata=slow.metadata)
        failed = await refusal(server.inference.Query(QUESTION, metadata=slow.metadata))
        assert failed.reason == "QUOTA_EXCEEDED"
        facts = failed.details["ErrorInfo"].metadata
        assert facts["quota"] == "requests_per_second"
        assert float(facts["limit"]) == SLOW
        assert failed.details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        violation = failed.details["QuotaFailure"].violations[0]
        assert violation.subject == "credential:slow"
        assert len(server.engine.requests) == 1
        await server.inference.Query(QUESTION, metadata=fast.metadata)
        info = "/legato.v1.ServerService/GetServerInfo"
        assert await call_empty(server.channel, info, slow.metadata) is None, "not counted"


async def test_an_option_is_the_default_and_a_record_replaces_it(path):
    """0 in a record is no limit."""
    default, free = Token("d", ["infer"]), Token("f", ["infer"], requests_per_second="0")
    async with running(tokens=write(path, default, free), quota_requests=SLOW) as server:
        for _ in range(3):
            await server.inference.Query(QUESTION, metadata=free.metadata)
        await server.inference.Query(QUESTION, metadata=default.metadata)
        failed = await refusal(server.inference.Query(QUESTION, metadata=default.metadata))
        assert failed.reason == "QUOTA_EXCEEDED"


def png(width, height):
    data = io.BytesIO()
    Image.new("RGB", (width, height)).save(data, "PNG")
    return data.getvalue()


def layout(width, height):
    return media_pb2.PixelLayout(width=width, height=height, format=media_pb2.PIXEL_FORMAT_MONO8)


@pytest.mark.parametrize(
    "image",
    [
        media_pb2.Image(encoded=media_pb2.EncodedImage(data=png(40, 25))),
        media_pb2.Image(raw=media_pb2.RawImage(data=bytes(1000), layout=layout(40, 25))),
    ],
    ids=["file", "pixels"],
)
async def test_the_pixels_of_new_images_are_counted(path, image):
    """Of files and of raw pixels; images by their id cost nothing."""
    token = Token("a", ["infer"], pixels_per_second="10")
    query = inference_pb2.QueryRequest(question="?", image=image)
    async with running(tokens=write(path, token)) as server:
        await server.inference.Query(query, metadata=token.metadata)
        failed = await refusal(server.inference.Query(query, metadata=token.metadata))
        assert failed.reason == "QUOTA_EXCEEDED"
        facts = failed.details["ErrorInfo"].metadata
        assert (facts["quota"], facts["limit"], facts["actual"]) == (
            "pixels_per_second",
            "10",
            "1000",
        )
        known = media_pb2.Image(image_id="img_1")
        by_id = inference_pb2.QueryRequest(question="?", image=known)
        await server.inference.Query(by_id, metadata=token.metadata)


@pytest.mark.parametrize("kind", ["file", "pixels"])
async def test_the_pixels_of_uploads_are_counted(path, kind):
    token = Token("a", ["upload"], pixels_per_second="10")
    header = image_pb2.PutImageHeader(layout=layout(40, 25) if kind == "pixels" else None)
    data = bytes(1000) if kind == "pixels" else png(40, 25)
    messages = [image_pb2.PutImageRequest(header=header), image_pb2.PutImageRequest(chunk=data)]
    async with running(tokens=write(path, token)) as server:
        await server.images.PutImage(iter(messages), metadata=token.metadata)
        failed = await refusal(server.images.PutImage(iter(messages), metadata=token.metadata))
        assert failed.reason == "QUOTA_EXCEEDED"
        assert len(server.engine.holds) == 1


async def test_frames_of_a_session_count_as_requests(path):
    """A frame over the rate fails for all its tasks; the session goes on."""
    token = Token("a", ["infer"], requests_per_second="2")
    async with running(tokens=write(path, token)) as server:
        client = SessionClient(server.sessions.Session(metadata=token.metadata))
        await client.send(open=opening())
        await client.wait_for(lambda: client.opened.session_id)
        for sequence in range(1, 8):
            await client.frame(sequence)
            await client.outcome(sequence)
        refused = [
            result
            for results in client.results.values()
            for result in results
            if result.HasField("error")
        ]
        assert refused
        assert all(result.task_id == "cups" for result in refused)
        assert len(server.engine.requests) + len(refused) == 7
        await client.done()
        await client.end()


async def test_open_sessions_are_counted(path):
    """A place is free again when a session ends."""
    token = Token("a", ["infer"], sessions="1")
    async with running(tokens=write(path, token)) as server:
        for _ in range(2):
            await _fill_and_leave(server, token)


async def _fill_and_leave(server, token):
    """Open the one session, have a second refused, and close the first."""
    client = SessionClient(server.sessions.Session(metadata=token.metadata))
    await client.send(open=opening())
    await client.wait_for(lambda: client.opened.session_id)
    second = SessionClient(server.sessions.Session(metadata=token.metadata))
    failed = await second.failure()
    assert failed.reason == "QUOTA_EXCEEDED"
    assert failed.details["ErrorInfo"].metadata["quota"] == "sessions"
    await client.done()
    await client.end()


async def test_the_engine_learns_how_many_bytes_a_credential_may_hold(path):
    """0 leaves the engine's own limit."""
    small, usual = Token("s", ["upload"], image_bytes="1000"), Token("u", ["upload"])
    messages = [
        image_pb2.PutImageRequest(header=image_pb2.PutImageHeader()),
        image_pb2.PutImageRequest(chunk=image_bytes()),
    ]
    async with running(tokens=write(path, small, usual)) as server:
        for token in (small, usual):
            await server.images.PutImage(iter(messages), metadata=token.metadata)
        assert [hold.quota_bytes for hold in server.engine.holds] == [1000, 0]
        assert server.engine.holds[0].owner == "tenant:t"
