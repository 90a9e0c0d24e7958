"""ServerService: limits, capabilities and models."""

import pytest
from legato.v1 import server_pb2
from legato_engine.client.monitor import EngineState

from tests.service.fakes import FakeEngine
from tests.service.harness import refusal, running


async def test_limits_are_those_that_hold():
    """The limits are those of the settings and of the model."""
    settings = {"max_image_pixels": 1234, "max_running": 3, "max_waiting": 5}
    async with running(
        engine_settings=settings, max_request_bytes=4321, unary_deadline=7.5, max_sessions=9
    ) as server:
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
    limits = info.limits
    assert (limits.max_request_bytes, limits.max_image_pixels) == (4321, 1234)
    assert (limits.max_running, limits.max_waiting) == (3, 5)
    assert (limits.max_context_tokens, limits.max_output_tokens) == (2048, 512)
    assert limits.default_deadline.ToMilliseconds() == 7500
    assert limits.max_sessions == 9
    assert {"sessions", "tracking"} <= set(info.capabilities)
    assert info.name == "legato"
    assert info.version
    assert info.instance_id
    assert info.contract_revision >= info.minimum_client_revision >= 1
    assert {"pixel_format.nv12", "pixel_format.yuyv"} <= set(info.capabilities)
    assert not info.shm_namespace


async def test_info_answers_while_the_model_loads():
    """GetServerInfo needs no model; ListModels is refused until there is one."""
    engine = FakeEngine()
    engine.state, engine.model = EngineState.STARTING, None
    async with running(engine) as server:
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        failed = await refusal(server.info.ListModels(server_pb2.ListModelsRequest()))
    assert info.limits.max_context_tokens == 0
    assert failed.reason == "ENGINE_STARTING"


async def test_the_model_is_listed():
    """Name, tasks and context of the served model; one page holds it."""
    async with running() as server:
        response = await server.info.ListModels(server_pb2.ListModelsRequest(page_size=1))
    (model,) = response.models
    assert model.name == "fake-1"
    assert "segment" in model.tasks
    assert model.streaming_regions
    assert model.max_context_tokens == 2048
    assert not response.next_page_token


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"page_size": -1}, "page_size"),
        ({"page_token": "x"}, "page_token"),
        ({"page_token": "1"}, "page_token"),
        ({"page_token": "-1"}, "page_token"),
        ({"page_token": "²"}, "page_token"),
    ],
)
async def test_bad_pages_are_refused(request_fields, field):
    """A token that this server did not give, or a negative size, is INVALID_FIELD."""
    async with running() as server:
        failed = await refusal(
            server.info.ListModels(server_pb2.ListModelsRequest(**request_fields))
        )
    assert failed.reason == "INVALID_FIELD"
    assert failed.details["BadRequest"].field_violations[0].field == field
