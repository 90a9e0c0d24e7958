"""The engine keeps tenants apart."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble

from tests.engine.tenants import IMAGES, OPERATIONS, Tenants, check_each_is_as_if_alone

CONFIG = EngineConfig(
    model="random-tiny", device="cpu", threads=1, max_running=3, max_waiting=8, page_size=16
)


@pytest.fixture(scope="module")
def assembly():
    """One small model for all tests."""
    made = assemble(CONFIG)
    yield made
    made.device.close()


@pytest.fixture(scope="module")
def make_world(assembly):
    """Return a function that makes two tenants of a new engine."""

    def make():
        fresh = dataclasses.replace(assembly)
        return Tenants(lambda blobs, send, wake: fresh.core(blobs=blobs, send=send, wake=wake))

    return make


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(OPERATIONS)
def test_each_tenant_observes_what_it_would_alone(make_world, operations):
    """Hits, ids, cached tokens, deletions and errors do not depend on what another tenant does."""
    check_each_is_as_if_alone(make_world, operations)


@pytest.mark.parametrize("kind", ["show", "ask"])
def test_what_another_tenant_sent_is_a_miss(make_world, kind):
    """Another tenant's image or prompt is no hit; the tenant's own is, the positive control."""
    with make_world() as world:
        (first,), (other,), (again,) = (
            world.perform([(tenant, kind, 0)]) for tenant in ("acme", "rival", "acme")
        )
    assert other == first
    assert other.cached_tokens == 0
    assert not other.cache_hit
    assert again.cached_tokens > 0


def test_the_time_to_find_a_known_image_is_not_spent_on_anothers(make_world):
    """Bytes that only another tenant sent are not looked up before they are decoded."""
    with make_world() as world:
        world.perform([("acme", "show", 0)])
        seen = world._engine._preprocessor._seen
        data = memoryview(IMAGES[0])
        assert seen.has("acme", data)
        assert not seen.has("rival", data)
