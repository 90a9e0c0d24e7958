"""Keys of requests."""

import pytest
from legato_engine.types import RequestKey

KEYS = {
    "a": RequestKey("a"),
    "a#0": RequestKey("a", part="0"),
    "some/a": RequestKey("a", "some"),
    "some/a#7": RequestKey("a", "some", "7"),
    "a.b:c-d#3.1": RequestKey("a.b:c-d", part="3.1"),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_name_is_the_same_from_every_service_process(name):
    """Tenant, caller's id and part make the name, which seeds derive from; the worker does not."""
    key = KEYS[name]
    from_worker = RequestKey(key.caller_id, key.tenant, key.part, worker=3)
    assert key.name == from_worker.name == name
    assert key != from_worker


def test_the_parts_of_a_call_share_its_key():
    """A call is one request to its caller, however many parts it has."""
    key = RequestKey("a", "shop", worker=1)
    assert {key.with_part(part).call for part in ("", "0", "7.1")} == {key}


def test_a_target_without_a_tenant_means_every_tenants():
    """Part and worker do not matter to an operator."""
    part = RequestKey("a", "shop", "0", worker=1)
    assert part.matches(RequestKey("a"))
    assert part.matches(RequestKey("a", "shop"))
    assert not part.matches(RequestKey("a", "other"))
    assert not part.matches(RequestKey("b", "shop"))
    assert not RequestKey("a").matches(RequestKey("a", "shop"))
