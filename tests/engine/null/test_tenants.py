"""The engine without a model keeps tenants apart."""

from hypothesis import given, settings
from legato_engine.config import EngineConfig
from legato_engine.null.engine import NullEngine

from tests.engine.tenants import OPERATIONS, Tenants, check_each_is_as_if_alone


def null_world():
    """Two tenants of a null engine."""
    config = EngineConfig(model="null")
    return Tenants(lambda blobs, send, _wake: NullEngine(config, blobs=blobs, send=send))


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_each_tenant_observes_what_it_would_alone(operations):
    """Hits, ids, counts, deletions and errors do not depend on what another tenant does."""
    check_each_is_as_if_alone(null_world, operations)


def test_a_tenant_cannot_ask_about_or_delete_anothers_image():
    """The id of another tenant's image is unknown, before and after an attempt to delete it."""
    with null_world() as world:
        (held,) = world.perform([("acme", "hold", 0)])
        assert [
            each[0] for each in world.perform([("rival", "name", 0), ("rival", "drop", 0)])
        ] == [
            "ImageNotFound",
            "ImageNotFound",
        ]
        (named,) = world.perform([("acme", "name", 0)])
        assert named[1:3] == (held[1], True)
